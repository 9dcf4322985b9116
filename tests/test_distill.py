"""On-policy distillation: the policy learns from a teacher, `kl.reference`, which its rewards do not touch."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cohort.harness.checks.memory import estimate
from cohort.harness.checks.preflight import check_runs
from cohort.harness.policy.flops import Costs
from cohort.harness.policy.model import load_tokenizer, model_config, save_model
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.record.run import RunLog
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import RunSpec
from factories import FEW, make_spec
from fakes import MemoryLog
from test_learner import make_batch

DISTILL = {"name": "distill", "group_size": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher") / "policy"
    save_model(folder, tiny_model(3), load_tokenizer("tiny"))
    return str(folder)


def distilled(teacher: str, **changes: Any) -> RunSpec:
    return make_spec(DISTILL, **{**FEW, "algorithm": DISTILL, "kl.reference": teacher, **changes})


@pytest.mark.slow
def test_the_policy_comes_nearer_to_its_teacher_and_rewards_are_only_measured(runs, teacher):
    spec = distilled(teacher, **{"steps": 30, "optimizer.learning_rate": 3e-3, "evaluation.every": 99})
    with RunLog(runs, runs / "one", spec, experiment="train", run_name="one") as log:
        ended = train(spec, runs / "one", log, cache=runs / "cache")
    events = [json.loads(line) for line in (runs / "one/events.jsonl").read_text().splitlines()]
    found = [e["values"]["kl/reference"] for e in events if "kl/reference" in e.get("values", {})]
    assert ended.state == "complete" and len(found) == 30
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    # every reward is 0, which no gate calls stuck: there is credit
    assert {e["values"]["reward/mean"] for e in events if "reward/mean" in e.get("values", {})} == {0.0}
    assert {e["values"]["train/stuck_groups"] for e in events if "train/stuck_groups" in e.get("values", {})} == {0.0}


def test_the_advantage_is_the_log_ratio_of_teacher_and_policy(teacher):
    policy, other = tiny_model(0), tiny_model(3)
    learner = Learner(distilled(teacher), policy, other)
    assert learner.reference is other and not any(p.requires_grad for p in other.parameters())
    batch = make_batch(policy)
    with torch.no_grad():
        one = {m: torch.log_softmax(m(batch.tokens_BT).logits.float(), -1) for m in (policy, other)}
    batch = learner.annotate(batch)
    credit = learner.algorithm.advantages(batch).advantages_BT
    for row, column in batch.completion_mask_BT.nonzero()[:20].tolist():
        if column < int(batch.lengths_B[row]):
            token = int(batch.tokens_BT[row, column])
            expected = float(one[other][row, column - 1, token] - one[policy][row, column - 1, token])
            assert math.isclose(float(credit[row, column]), expected, abs_tol=2e-5)


def test_the_teachers_operations_and_memory_are_counted_by_its_own_size(tmp_path, teacher):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = model_config("tiny").to_dict()
    large = LlamaForCausalLM(LlamaConfig(**{**small, "num_hidden_layers": 3 * small["num_hidden_layers"]}))
    save_model(tmp_path / "large", large, load_tokenizer("tiny"))
    specs = [distilled(name) for name in (teacher, str(tmp_path / "large"))]
    sizes = [estimate(spec, model_config("tiny"), 8)["reference"] for spec in specs]
    assert sizes == [4 * sum(p.numel() for p in model.parameters()) for model in (tiny_model(0), large)]
    learners = [Learner(spec, tiny_model(0), model) for spec, model in zip(specs, (tiny_model(3), large), strict=True)]
    costs = [Costs.of(learner.reference) for learner in learners if learner.reference is not None]
    assert costs[1].forward.tokens == pytest.approx(3 * costs[0].forward.tokens)


def test_a_teacher_with_another_tokenizer_is_refused_before_a_model_loads(runs, tmp_path, teacher):
    folder = Path(shutil.copytree(teacher, tmp_path / "other"))
    (folder / "manifest.json").unlink(missing_ok=True)
    raw = json.loads((folder / "tokenizer.json").read_text())
    *_, one, other = vocabulary = raw["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    spec = distilled(str(folder))
    with pytest.raises(SpecError, match=r"kl.reference must have the tokenizer .* 2 tokens of .* differ"):
        check_runs([spec], runs)
    with pytest.raises(SpecError, match=r"kl\.reference must have the tokenizer"):  # as of a Hub id, which loads here
        train(spec, tmp_path / "run", MemoryLog(), cache=runs)
    assert not (tmp_path / "run").exists()


def test_a_missing_teacher_is_refused(runs, tmp_path):
    for reference, words in (
        (None, "must name the teacher of distill"),
        (str(tmp_path / "none"), "which is no folder"),
    ):
        spec = make_spec(DISTILL, **{**FEW, "algorithm": DISTILL, "kl.reference": reference})
        with pytest.raises(ValueError, match=words):
            check_runs([spec], runs)
