"""Text that no grader may choke on (`hostile.yaml`): it must neither raise nor take long, whatever it makes of it."""

from pathlib import Path
from typing import Any

import yaml


def _whole(text: Any) -> str:
    """A text that is written out, or as [text, times] for each of its parts."""
    return text if isinstance(text, str) else "".join(part * times for part, times in text)


_TEXTS = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text("ascii"))
ANSWERS = list(map(_whole, _TEXTS["answers"]))
# An answer in each place where one is looked for, and floods of a hundred kilobytes.
COMPLETIONS = [
    *(wrap for text in ANSWERS for wrap in (text, f"#### {text}", rf"\boxed{{{text}}}")),
    *map(_whole, _TEXTS["floods"]),
    "".join(rf"\boxed{{{n}}}," for n in range(8_000)),
]
