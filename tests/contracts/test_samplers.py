"""What every prompt sampler must keep; samplers are found by name, so that a new one is tested without a word here."""

import pytest
from cohort.harness import plugins
from cohort.harness.contracts import plugins as contract


@pytest.mark.parametrize("name", plugins.names("sampler"))
@pytest.mark.parametrize("check", contract.of_kind("sampler"), ids=lambda check: check.test.__name__)
def test_a_sampler_keeps_the_contract(name, check):
    sampler = contract.make("sampler", name)
    assert sampler.name == name
    check.test(sampler)
