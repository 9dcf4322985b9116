"""A reward model fitted on a run's own rollouts, and a run that is paid by it."""

import json
import math

import pytest
import torch
from cohort.harness.base.inputs import InputsChanged, expecting
from cohort.harness.checks.memory import _scorer_bytes
from cohort.harness.checks.preflight import run_inputs
from cohort.harness.extras.pipelines import bradley_terry
from cohort.harness.extras.pipelines.bradley_terry import (
    Ranked,
    Scorer,
    load_scorer,
    pair_loss,
    read_ranked,
    train_reward_model,
)
from cohort.harness.extras.pipelines.rewards.reward_model import RewardModel
from cohort.harness.extras.pipelines.stages.reward_model import RewardFit
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from factories import make_spec
from fakes import graded_group
from safetensors.torch import load_file


def line(prompt, completion, reward, step=1, **more):
    row = {"prompt_id": prompt, "prompt": f"{prompt}=", "completion": completion, "step": step, "reward": reward}
    return json.dumps({**row, "correct": reward > 0.5, "rewards": {"format": 1 - reward}, **more}) + "\n"


@pytest.fixture
def rollouts(tmp_path):
    """40 prompts, each with a right answer `y`, a wrong one `n`, and a repeated one."""
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    text = "".join(line(f"{i}+1", c, r) for i in range(40) for c, r in (("y", 1.0), ("n", 0.0), ("n", 0.0)))
    (folder / "step-000001.jsonl").write_text(text + line("all equal", "y", 1.0))
    return tmp_path / "run"


def test_the_loss_is_the_mean_over_the_pairs_of_a_prompt_of_which_distinct_completions_are_ranked(rollouts):
    # scores 2, 0, 1 ranked 1st, 2nd, 2nd: pairs (0, 1) and (0, 2), differences 2 and 1
    better = torch.tensor([[False, True, True], [False, False, False], [False, False, False]])
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    assert float(pair_loss(torch.tensor([2.0, 0.0, 1.0]), better)) == pytest.approx(expected, abs=1e-6)
    ranked, dropped = read_ranked([rollouts], "reward")
    assert ranked[0] == Ranked("0+1=", {"y": 1.0, "n": 0.0})
    assert (len(ranked), dropped) == (40, 1)
    assert read_ranked([rollouts / "rollouts" / "step-000001.jsonl"], "format")[0][0].ranks == {"y": 0.0, "n": 1.0}


@pytest.mark.parametrize(
    ("content", "by", "message"),
    [
        ("", "reward", "has no rollouts|must hold a prompt"),
        ("not json\n", "reward", r"line 1: must be a JSON object"),
        ("{}\n", "reward", "line 1: field 'prompt_id' is missing"),
        (line("a", "y", 1.0), "nothing", "--by must be one of reward, correct, format, got 'nothing'"),
        (line("a", "y", 1.0), "reward", "whose completions differ in 'reward', got 1 prompts without"),
    ],
)
def test_rollouts_that_cannot_be_used_are_refused_before_a_model_loads(tmp_path, monkeypatch, content, by, message):
    monkeypatch.setattr(bradley_terry, "load_classifier", lambda *_: pytest.fail("a model was loaded"))
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        train_reward_model([file], "tiny", tmp_path / "out", RewardFit(), by=by)


def test_a_folder_without_rollouts_an_existing_target_and_a_language_model_are_refused(tmp_path, rollouts, cohort):
    with pytest.raises(ValueError, match="has no rollouts"):
        train_reward_model([tmp_path], "tiny", tmp_path / "out", RewardFit())
    fit = ["reward-model", rollouts, "--model", "tiny", "--out"]
    assert cohort(*fit, rollouts) == 2 and "--out must be a new folder" in cohort.said
    assert cohort(*fit, tmp_path / "out", "--set", "epochs=0") == 2 and "--set: epochs: Input should be" in cohort.said
    tiny_model(0).save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"must be a sequence classifier with one label.*cohort reward-model"):
        load_scorer(str(tmp_path / "policy"))
    with pytest.raises(ValueError, match=r"rewards\.reward_model\.path must be a Hub id or an existing folder"):
        RewardModel(path=str(tmp_path / "nowhere")).check()


def test_a_fit_ranks_held_out_prompts_and_loads_as_a_reward(tmp_path, rollouts):
    before = torch.get_rng_state()
    fit = train_reward_model([rollouts], "tiny", tmp_path / "rm", RewardFit(epochs=8, learning_rate=3e-3))
    assert torch.equal(torch.get_rng_state(), before)
    assert fit.num_prompts + fit.held_out_prompts == 40
    assert fit.held_out_prompts == fit.held_out_pairs > 0
    assert fit.dropped_prompts == 1
    assert fit.accuracy == 1.0
    assert fit.held_out_accuracy == 1.0
    assert not list(tmp_path.glob(".partial*"))
    reward = RewardModel(path=str(tmp_path / "rm"))
    reward.check()
    numbers = load_file(tmp_path / "rm" / "model.safetensors").values()
    assert _scorer_bytes(reward.scorer) == 4 * sum(value.numel() for value in numbers)  # float32
    right, wrong = reward.score(graded_group([0, 1], prompt="77+1=", completions=("y", "n")))
    assert right > wrong


def test_a_score_does_not_depend_on_the_padding_of_its_batch():
    model, tokenizer = bradley_terry.load_classifier("tiny", seed=0)
    scorer = Scorer(model.eval(), tokenizer)
    rows = [("1+1=", "2"), ("1+2+3+4+5=", "a much longer completion"), ("1", "")]
    alone = [scorer.score([row])[0] for row in rows]
    assert scorer.score(rows) == pytest.approx(alone, abs=1e-6)
    assert len(set(alone)) == 3


@pytest.mark.attack("Data, model or tokenizer edited after the start")
def test_a_reward_model_that_was_replaced_is_refused(tmp_path):
    (tmp_path / "rm").mkdir()
    weights = tmp_path / "rm" / "model.safetensors"
    weights.write_bytes(b"old")
    spec = make_spec(rewards={"reward_model": {"path": str(tmp_path / "rm")}})
    with expecting(run_inputs([spec], tmp_path)):
        weights.write_bytes(b"new")
        with pytest.raises(InputsChanged, match=r"'model\.safetensors' of model"):
            run_inputs([spec], tmp_path)
