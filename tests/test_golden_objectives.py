"""Every objective on small batches, edge cases included, against float64 references in plain Python."""

import objective_references as references
import pytest
import torch
from cohort.harness import plugins
from cohort.harness.base.tensors import pad_right
from cohort.harness.data import Batch, PolicyOutput

BATCHES = references.inputs()
NEEDS_NO_GROUP = ("ppo", "reinforce_plus_plus", "remax", "distill")
CASES = [
    (case, label)
    for case, given in BATCHES.items()
    for label, s in references.SETTINGS.items()
    if given["group_size"] > 1 or (s["name"] in NEEDS_NO_GROUP and s.get("baseline") != "group")
]
PROMPT = 2  # tokens before each completion


def column(rows):
    """[B, T] float64 with each row after its prompt."""
    width = PROMPT + max(map(len, rows)) + 1  # one column of padding
    return pad_right([[0.0] * PROMPT + row for row in rows], torch.float64, width)


def make_batch(given, algorithm):
    mask = column([[1.0] * n for n in given["lengths"]]) > 0
    step_rewards = step_ends = None
    if given["steps"] is not None:
        rows = list(zip(given["steps"], given["lengths"], strict=True))
        step_rewards = column([[row.get(t, 0.0) for t in range(n)] for row, n in rows])
        step_ends = column([[float(t in row) for t in range(n)] for row, n in rows]) > 0
    return Batch(
        tokens_BT=torch.zeros(mask.shape, dtype=torch.int64),
        completion_mask_BT=mask,
        lengths_B=torch.tensor([PROMPT + n for n in given["lengths"]]),
        sampler_logprobs_BT=column(given["old"]),
        rewards_B=torch.tensor(given["rewards"], dtype=torch.float64),
        group_size=given["group_size"],
        reward_parts_BK=torch.tensor(given["parts"], dtype=torch.float64),
        reward_weights_BK=torch.tensor([references.PART_WEIGHTS] * len(mask), dtype=torch.float64),
        greedy_rewards_B=torch.tensor(given["greedy"], dtype=torch.float64).repeat_interleave(given["group_size"]),
        step_rewards_BT=step_rewards,
        step_ends_BT=step_ends,
        old_logprobs_BT=column(given["old"]),
        ref_logprobs_BT=column(given["ref"]) if algorithm.needs_reference else None,
        collision_BT=column(given["collision"]),
        values_BT=column(given["old_values"]) if algorithm.needs_critic else None,
        loss_weight_BT=algorithm.loss_weights(mask.double()),
    )


def flatten(value):
    return [x for part in value for x in flatten(part)] if isinstance(value, list) else [value]


def test_every_algorithm_has_a_reference():
    assert {setting["name"] for setting in references.SETTINGS.values()} == set(plugins.names("algorithm"))


@pytest.mark.parametrize(("case", "label"), CASES)
def test_an_objective_gives_the_numbers_of_its_reference(case, label):
    given, setting = BATCHES[case], references.SETTINGS[label]
    algorithm = plugins.load("algorithm", setting["name"])(**setting, group_size=given["group_size"])
    expected = references.answers(algorithm.model_dump(), given)
    batch = algorithm.advantages(make_batch(given, algorithm))
    logprobs = column(given["now"]).requires_grad_()
    values = column(given["values"]).requires_grad_() if algorithm.needs_critic else None
    loss, metrics = algorithm.minimised(batch, PolicyOutput(logprobs, column(given["entropy"]), values))
    loss.backward()

    def on_completions(tensor):
        """The numbers of the completion tokens; everything else must be 0."""
        assert tensor is not None and tensor[~batch.completion_mask_BT].abs().sum() == 0
        return tensor[batch.completion_mask_BT].tolist()

    found = {
        "advantages": on_completions(batch.advantages_BT),
        "policy_loss": [metrics["policy/loss"].item()],
        "gradient": on_completions(logprobs.grad),
        "clip_fraction": [metrics["policy/clip_fraction"].item()],
        "kl_old": [metrics["kl/old"].item()],
    }
    if values is not None:
        found |= {
            "returns": on_completions(batch.returns_BT),
            "critic_loss": [metrics["critic/loss"].item()],
            "value_gradient": on_completions(values.grad),
        }
    if algorithm.needs_reference:
        found["kl_reference"] = [metrics["kl/reference"].item()]
    assert found.keys() == expected.keys()
    for key, numbers in found.items():
        assert numbers == pytest.approx(flatten(expected[key]), abs=1e-6, rel=0), key
    if case == "equal_rewards" and "kl_reference" not in expected and algorithm.min_group_size > 1:
        assert found["gradient"] == [0.0] * sum(given["lengths"])
