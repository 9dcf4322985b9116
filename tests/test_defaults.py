"""Algorithms and rewards have the defaults, ranges and class facts of `golden/settings.txt`: who changes one changes
results.

`python tests/test_defaults.py` writes the file; a change of it is a line in CHANGELOG.md.
"""

from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.api.catalog import describe_plugins
from cohort.harness.interfaces import Algorithm, Reward

GOLDEN = Path(__file__).parent / "golden/settings.txt"
BASES = {"algorithm": Algorithm, "reward": Reward}
INNER = ("objective", "_stated")  # words
PLUGINS = [(kind, name) for kind in ("algorithm", "reward") for name in plugins.names(kind)]


def rows(kind: plugins.Kind, name: str) -> list[str]:
    (plugin,) = describe_plugins(kind, name)
    told = [f"{one['name']} | {one['default']} | {one['range']}" for one in plugin["settings"]]
    own, base = plugins.load(kind, name), BASES[kind]
    names = [fact for fact, of in base.__annotations__.items() if "ClassVar" in str(of) and fact not in INNER]
    facts = {fact: getattr(own, fact) for fact in names if getattr(own, fact) != getattr(base, fact)}
    told += [f"{fact} | {value} |" for fact, value in facts.items() if not isinstance(value, property)]
    return [f"{kind} {name} {row}".rstrip() for row in told]


def of_files(plugin: tuple[plugins.Kind, str]) -> str:
    """The files that a plugin's class is written in, by which `tests/mutants.py` finds its test."""
    return "-".join(dict.fromkeys(c.__module__.rpartition(".")[2] for c in plugins.load(*plugin).__mro__))


@pytest.mark.parametrize("plugin", PLUGINS, ids=of_files)
def test_defaults_and_ranges_are_those_that_were_released(plugin):
    kind, name = plugin
    known = [row for row in GOLDEN.read_text(encoding="utf-8").splitlines() if row.startswith(f"{kind} {name} ")]
    assert rows(kind, name) == known, "if that is meant, run `python tests/test_defaults.py`"


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{row}\n" for plugin in PLUGINS for row in rows(*plugin)), encoding="utf-8")
