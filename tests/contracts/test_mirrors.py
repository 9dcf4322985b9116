"""What every mirror must keep; mirrors are found by name, so that a new one is tested without a word here."""

from importlib.util import find_spec

import pytest
from cohort.harness import plugins
from cohort.harness.contracts import plugins as contract


@pytest.mark.parametrize("check", contract.of_kind("mirror"), ids=lambda check: check.test.__name__)
@pytest.mark.parametrize("name", plugins.names("mirror"))
def test_a_mirror_keeps_the_contract(name, check, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    package = plugins.load("mirror", name).package
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    check.test(contract.make("mirror", name))
