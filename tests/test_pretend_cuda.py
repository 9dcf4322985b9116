"""Training steps on tensors that say they are on `cuda`: each tensor is where it must be, and few waits for the GPU."""

import factories
import pytest
import torch
from cohort.harness import plugins
from cohort.harness.data import Prompt, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.build import prepare
from cohort.harness.run.learner import Learner
from cohort.harness.run.step import train_step
from fakes import MemoryLog, tiny_codec
from pretend_cuda import DeviceMismatch, pretend_cuda
from test_learner import make_batch, make_spec

PRECISIONS = {"float32": {}, "autocast": {"autocast": True}, "bfloat16": {"dtype": "bfloat16"}}
LORA = {"lora": {"rank": 2}}
DYNAMIC = {"dynamic_sampling": 2}
STOPS = {"sampling": {"max_tokens": 4, "stop": ["1", "=2"]}}
STEPS = [  # every pair of a precision, an adapter, dynamic sampling and stop texts, with what algorithms ask of a step
    ("ppo", "float32", {}),
    ("remax", "float32", LORA | DYNAMIC | STOPS),
    ("grpo_self_consistency", "autocast", LORA | STOPS),
    ("dapo", "autocast", DYNAMIC),
    ("reinforce_plus_plus", "bfloat16", STOPS | DYNAMIC),
    ("ppo", "bfloat16", LORA),
]


def start(tmp_path, algorithm, **changes):
    """A run of 4 prompts x 2 rollouts on the pretended GPU, and its prompts."""
    fixed = {"rollouts_per_step": 8, "steps": 2, "device": "cuda", "sampling": {"max_tokens": 4}}
    spec = factories.make_spec({"name": algorithm, "group_size": 2}, **fixed | changes)
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    return run, spec.task.prompts("train")


def updated(spec):
    """The waits for the GPU of an update on a batch, which raises where tensors of two devices meet."""
    with pretend_cuda() as mode:
        learner = Learner(spec, tiny_model(0).to("cuda"))
        batch = learner.annotate(make_batch().to("cuda"))
        batch = learner.algorithm.advantages(batch)
        before = mode.waits.copy()
        learner.update(batch, 0)
        return mode.waits - before


def test_tensors_of_two_devices_meet_nowhere_and_waits_are_counted():
    with pretend_cuda() as mode:
        there, here = torch.ones(2, device="cuda"), torch.ones(2)
        assert (there + 1).device.type == "cuda" and (there.cpu() + here).device.type == "cpu"
        for mixed in (lambda: there + here, lambda: torch.stack([there, here]), lambda: here[there.long()]):
            with pytest.raises(DeviceMismatch):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        before = mode.waits.total()
        assert float(there.sum()) == 2 and len(there[there > 0]) == 2
        assert mode.waits.total() == before + 2


@pytest.mark.parametrize("step", factories.slow_but(STEPS[1:3], STEPS))
def test_a_step_keeps_every_tensor_on_the_gpu(tmp_path, step):
    algorithm, precision, changes = step
    with pretend_cuda():
        run, prompts = start(tmp_path, algorithm, **PRECISIONS[precision], **changes)
        train_step(run, prompts, 0)


@pytest.mark.parametrize("algorithm", plugins.names("algorithm"))
def test_every_algorithms_credit_and_loss_stay_on_the_gpu(algorithm):
    updated(make_spec(algorithm))


def generated(device, max_tokens, end_ids=None):
    """Rollouts of 8 rows from prompts of two lengths, and the waits that they took."""
    with pretend_cuda() as mode:
        policy = tiny_model(0)
        with torch.no_grad():  # the end of a text is about every tenth token
            policy.get_input_embeddings().weight[1] = policy.get_input_embeddings().weight.mean(0) * 25
        engine = TransformersEngine(TransformersEngine.Settings(), policy.to(device), tiny_codec())
        engine.end_ids = engine.end_ids if end_ids is None else end_ids
        prompts = [Prompt("a", "1+2=", "3"), Prompt("b", "12+345-6=", "351")]
        before = mode.waits.total()
        groups = engine.generate(prompts, 4, Sampling(max_tokens=max_tokens), seed=0, step=0)
        return [rollout for group in groups for rollout in group.rollouts], mode.waits.total() - before


def test_the_fast_path_waits_for_the_gpu_once_in_many_tokens_and_an_update_for_its_metrics_once():
    # Nothing ends: all that may wait beyond the start is a look every 16th token.
    few, many = (generated("cuda", length, end_ids=())[1] for length in (32, 96))
    assert many - few <= 64 / 16
    whole, split = (updated(make_spec(tokens_per_microbatch=budget)) for budget in (1000, 1))
    own = [sum(n for place, n in found.items() if "learner.py" in place) for found in (whole, split)]
    assert own[0] == own[1] <= 5
    # Each pass more, of 8 instead of 1, waits twice where it picks its tokens, and once in the library.
    assert split.total() - whole.total() <= 3 * 7


def test_rows_that_end_between_two_looks_are_those_of_the_cpu():
    there, here = (generated(device, 40)[0] for device in ("cuda", "cpu"))
    assert [rollout.token_ids for rollout in there] == [rollout.token_ids for rollout in here]
    assert [rollout.finish_reason for rollout in there] == [rollout.finish_reason for rollout in here]
    for mine, other in zip(there, here, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len({len(rollout.token_ids) for rollout in here}) > 3
    assert {rollout.finish_reason for rollout in here} == {"stop", "length"}
