"""A checkpoint is complete or ignored, loads with transformers, and never feeds another run."""

import pytest
import torch
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.run.checkpoint import latest_checkpoint, save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer


def save(folder, step, seed=0, keep=2, digest="abc"):
    save_checkpoint(
        folder,
        step,
        spec_digest=digest,
        policy=tiny_model(seed),
        tokenizer=tiny_tokenizer(),
        learner_state={"policy": {"step": torch.tensor(step)}},
        progress={"totals": {"rollouts": step}},
        keep=keep,
    )


def test_a_saved_run_comes_back_bit_for_bit(tmp_path):
    save(tmp_path, 7, seed=3)
    checkpoint = latest_checkpoint(tmp_path, "abc")
    assert checkpoint is not None
    assert checkpoint.step == 7
    assert checkpoint.progress == {"totals": {"rollouts": 7}}
    assert checkpoint.learner_state()["policy"]["step"].item() == 7
    policy = tiny_model(0)
    policy.load_state_dict(checkpoint.policy_weights(policy))
    for (name, value), (_, other) in zip(tiny_model(3).state_dict().items(), policy.state_dict().items(), strict=True):
        assert torch.equal(value, other), name


def test_the_policy_of_a_checkpoint_loads_with_transformers(tmp_path):
    save(tmp_path, 1)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "step-00000001" / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-00000001" / "policy")
    assert torch.equal(policy.lm_head.weight, tiny_model(0).lm_head.weight)
    assert tokenizer("1+1=")["input_ids"] == tiny_tokenizer()("1+1=")["input_ids"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("file", ["learner.pt", "state.json", "policy/model.safetensors"])
@pytest.mark.attack("A torn or altered checkpoint")
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(tmp_path, file):
    save(tmp_path, 1)
    save(tmp_path, 2)
    torn = tmp_path / "step-00000002" / file
    torn.write_bytes(torn.read_bytes()[:-1])
    checkpoint = latest_checkpoint(tmp_path, "abc")
    assert checkpoint is not None
    assert checkpoint.step == 1


@pytest.mark.parametrize("steps", [(1, 2), (2,)])
@pytest.mark.attack("A torn or altered checkpoint")
def test_a_garbled_checkpoint_is_named_and_the_run_says_from_where_it_goes_on(tmp_path, steps, caplog):
    for step in steps:
        save(tmp_path, step)
    weights = tmp_path / "step-00000002" / "policy" / "model.safetensors"
    garbled = bytearray(weights.read_bytes())
    garbled[-1] ^= 255
    weights.write_bytes(garbled)
    checkpoint = latest_checkpoint(tmp_path, "abc")
    assert (checkpoint and checkpoint.step) == (1 if 1 in steps else None)
    instead = "continues from step 1" if 1 in steps else "starts again from the beginning"
    assert [record.message for record in caplog.records] == [
        f"a checkpoint must be as it was saved, but '{weights}' is torn, altered or missing; the run {instead}"
    ]
    with pytest.raises(
        ValueError, match=rf"is torn or altered: .*'{weights}' is torn, altered or missing\); make it or"
    ):
        model_sources(str(weights.parent))  # as an evaluation reads it


@pytest.mark.attack("A torn or altered checkpoint")
def test_a_checkpoint_whose_events_are_lost_is_named(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    checkpoint = latest_checkpoint(tmp_path, "abc", usable=lambda found: found.step < 2)
    assert checkpoint and checkpoint.step == 1
    assert f"events.jsonl lacks events of '{tmp_path / 'step-00000002'}'; the run continues from step 1" in caplog.text


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="other settings"):
        latest_checkpoint(tmp_path, "def")
