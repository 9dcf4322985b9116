"""Algorithms and rewards have the defaults and ranges of `golden/settings.txt`: who changes one changes results.

`python tests/test_defaults.py` writes the file; a change of it is a line in CHANGELOG.md.
"""

from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.api.catalog import describe_plugins

GOLDEN = Path(__file__).parent / "golden/settings.txt"
PLUGINS = [(kind, name) for kind in ("algorithm", "reward") for name in plugins.names(kind)]


def rows(kind: plugins.Kind, name: str) -> list[str]:
    (plugin,) = describe_plugins(kind, name)
    told = [f"{one['name']} | {one['default']} | {one['range']}" for one in plugin["settings"]]
    told.append(f"smallest group | {getattr(plugins.load(kind, name), 'min_group_size', '')} |")
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
