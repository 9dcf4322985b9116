"""Every stream of random numbers has a name and shares its numbers with no other."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
from cohort.harness.base.streams import generator
from cohort.harness.run.loop import train
from factories import FEW, make_spec
from fakes import MemoryLog

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_no_two_purposes_of_a_run_draw_the_same_numbers(tmp_path, monkeypatch):
    users: dict[tuple[int, ...], set[str]] = {}
    make = np.random.default_rng

    def recorded(seed):
        frame = sys._getframe(1)
        user = frame.f_back if frame.f_code.co_name == "generator" else frame
        users.setdefault(tuple(make(seed).integers(2**62, size=4)), set()).add(user.f_code.co_qualname)
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", recorded)
    minibatches = {"num_inner_epochs": 2, "num_minibatches": 2}
    spec = make_spec(**{**FEW, "cold_start": {"steps": 1}, "optimizer": minibatches, "dynamic_sampling": 3, "steps": 2})
    assert train(spec, tmp_path, MemoryLog(), cache=tmp_path).state == "complete"
    purposes = {user for found in users.values() for user in found}
    assert purposes == {"_batches", "Uniform.order", "shuffled", "Learner._minibatches"}
    assert [found for found in users.values() if len(found) > 1] == []


def test_a_stream_depends_on_its_name_and_on_every_number_of_its_key():
    keys = [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (10,), (2**32,), (2**32, 0)]
    first = [tuple(generator(name, *key).integers(2**62, size=4)) for name in ("a", "b") for key in keys]
    assert len(set(first)) == len(first)
    assert first[0] == tuple(generator("a").integers(2**62, size=4))


def test_numpy_draws_under_names_that_each_have_one_use():
    names, unnamed = [], {"streams.py", "cold_start.py"}
    for file in [f for folder in ("harness", "algorithms", "tasks") for f in (ROOT / folder).rglob("*.py")]:
        text = file.read_text()
        assert "default_rng" not in text or file.name in unnamed, file
        tree = ast.parse(text if "generator(" in text else "")
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "generator":
                assert isinstance(call.args[0], ast.Constant), file
                names.append(call.args[0].value)
    assert len(names) == len(set(names)) >= 7  # as many in the core alone
