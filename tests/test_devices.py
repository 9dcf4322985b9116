"""A trial on several devices is the trial on one: tokens, metrics and weights; and no rank that dies takes it along."""

import json
import multiprocessing.connection
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks_at_work
import torch
import torch.distributed as dist
from cohort.harness.checks import memory, preflight
from cohort.harness.devices import group
from cohort.harness.devices import ranks as rank_messages
from cohort.harness.engines.vllm import VLLMEngine
from cohort.harness.policy.model import load_policy, load_tokenizer, save_model
from cohort.harness.policy.tiny import tiny_config, tiny_model
from cohort.harness.run.checkpoint import Checkpoint
from cohort.harness.run.loop import train
from cohort.harness.run.standalone import train_once
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.settings.raw import with_overrides
from cohort.harness.settings.run import parse_run
from fakes import MemoryLog, StopAfter
from pretend_cuda import pretend_cuda
from ranks_at_work import EVERY_STEP, RESUMED, RUN, begun, ends, until
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves_with_path
from transformers import Qwen2Config


def case(algorithm: str = "grpo", **changes: Any) -> dict[str, Any]:
    return with_overrides({"algorithm": {"name": algorithm, "group_size": 4}}, changes)


CASES = {
    "some without advantage": case("dr_grpo", **{"algorithm.group_size": 2, "optimizer.tokens_per_microbatch": 60}),
    "lora_recomputed": case("ppo", lora={"rank": 4}, gradient_checkpointing=True),
    "grpo": case(
        optimizer={"num_minibatches": 2, "num_inner_epochs": 2, "tokens_per_microbatch": 60},
        **{"algorithm.kl_beta": 0.1},
    ),
    "older": case("ppo", staleness=1, mismatch={"correction": "truncated"}, steps=3),
    "fitted": case("ppo", critic={"head": "fitted"}),
}
MORE = {
    **{name: case(name) for name in ("ppo", "grpo_self_consistency", "dr_grpo", "gspo", "online_dpo", "cispo", "rloo",
                                     "reinforce_plus_plus", "tpo")},
    "lora": case(lora={"rank": 4}),
    "one_update": case(),
    "recomputed": case(gradient_checkpointing=True),
    "warm_up": case("ppo", critic={"warmup_steps": 1}),
    "shared_trunk": case("ppo", **{"algorithm.critic": "shared"}),
    "reference": case(**{"algorithm.kl_beta": 0.1, "kl.refresh_reference_every": 1}),
    "token_masks": case("dapo", **{"algorithm.entropy_bonus": 0.01, "cold_start.steps": 20}, high_entropy_tokens=0.5,
                        overlong="mask"),
    "own_teacher": case("sdpo", **{"algorithm.success_reward": 0.0}),  # every completion is one
    "replay": case("dr_grpo_replay", **{"algorithm.success_reward": 0.0, "cold_start.steps": 60}),
    "dynamic": case("dapo", dynamic_sampling=2),
    "banded": case(sampler="success_band", task={"name": "arithmetic", "num_train": 6}, cold_start={"steps": 20}),
}  # fmt: skip


@pytest.mark.slow
def test_two_ranks_sample_log_and_learn_what_one_does_and_one_goes_on_with_their_run(tmp_path):
    save_model(tmp_path / "teacher", tiny_model(3), load_tokenizer("tiny"))
    unpaid, teacher = {"repetition": {"weight": 0.0, "ngram": 1}}, str(tmp_path / "teacher")
    cases = CASES | {"taught": case("distill", rewards=unpaid, **{"kl.reference": teacher})}
    cases |= MORE if os.environ.get("COHORT_CHAOS") else {}
    ranks_at_work.side_by_side(tmp_path, cases)
    for name in cases:
        check_equal(name, tmp_path / "1" / name, tmp_path / "2" / name)
    events = json.loads((tmp_path / "2" / "some without advantage" / "log.json").read_text())["events"]
    assert any(0 < metrics.get("train/zero_advantage_groups", 0) < 1 for _, metrics in events)
    alone, parts = (json.loads((tmp_path / part / RESUMED / "log.json").read_text())["events"] for part in "12")
    assert [step for step, _ in parts] == [step for step, _ in alone if step > 2]  # the last of three attempts
    check_weights(RESUMED, tmp_path / "1" / RESUMED, tmp_path / "2" / RESUMED)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 4), (2, 1), (4, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("algorithm", [case("ppo"), case(lora={"rank": 4})], ids=["ppo", "lora"])
def test_a_run_goes_on_with_another_number_of_processes_from_the_same_weights_and_moments(tmp_path, algorithm, sizes):
    changes = {**algorithm, "steps": 3}
    (tmp_path / "cache").mkdir()
    for name, parts in (("whole", [(1, None)]), ("moved", [(sizes[0], 1), (sizes[1], None)])):
        for size, steps in parts:
            own = [begun(ranks_at_work.attempt, rank, size, tmp_path, name, changes, steps) for rank in range(size)]
            assert ends(*own) == [0] * size
    moved = tmp_path / "moved"
    folders = (part / "checkpoints" / "step-00000001" for part in (moved, moved / f"again-{sizes[1]}"))
    written, again = (Checkpoint(folder, 1, {}) for folder in folders)
    for read in (saved_policy, Checkpoint.learner_state):
        one, two = (dict(tree_leaves_with_path(read(checkpoint))) for checkpoint in (written, again))
        assert len(one) > 10 and one.keys() == two.keys()
        for path, value in one.items():
            assert torch.equal(value, two[path]) if isinstance(value, torch.Tensor) else value == two[path], path
    check_equal("moved", tmp_path / "whole", moved, size=sizes[1], since=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.attack("SIGKILL of one process of a trial on two devices")
def test_a_run_on_two_devices_survives_a_kill_of_either_process_at_every_write(tmp_path, record_property):
    own = [begun(ranks_at_work.attempt, rank, 2, tmp_path, "whole", EVERY_STEP) for rank in range(2)]
    assert ends(*own) == [0, 0]
    for rank in range(2):
        (tmp_path / "kills" / str(rank)).mkdir(parents=True)
        for number in range(20):  # so that 140 may die
            (tmp_path / "kills" / str(rank) / f"ended {number}").touch()
    for number in count():
        both = [begun(ranks_at_work.deadly_attempt, rank, tmp_path, "killed", number) for rank in range(2)]
        multiprocessing.connection.wait([one.sentinel for one in both])
        is_killed = -signal.SIGKILL in (one.exitcode for one in both)
        for one in both if is_killed else ():  # as torch's agent does
            one.kill()
        if ends(*both) == [0, 0]:
            break
        assert is_killed, "an error of their own"
    folders = [tmp_path / "kills" / str(rank) for rank in range(2)]
    places = [[file.name for file in folder.iterdir() if not file.name.startswith("ended")] for folder in folders]
    assert len(places[0]) >= 12 and len(places[1]) >= 6, places
    record_property("tried", sum(map(len, places)))
    for name in ("checkpoints/step-00000002", "checkpoints/step-00000003"):
        one, two = (json.loads((tmp_path / x / name / "state.json").read_text())["files"] for x in ("whole", "killed"))
        assert one == two


@pytest.mark.slow
def test_under_autocast_layers_are_gathered_in_half_the_bytes_and_products_stay_the_same(tmp_path):
    torch.manual_seed(1)
    assert ends(*[begun(ranks_at_work.gathers, rank, tmp_path) for rank in range(2)]) == [0, 0]
    whole, half, layers, different = json.loads((tmp_path / "gathers.json").read_text())
    assert whole - half == 2 * layers / 2  # once for the pass and once for its backward pass, the last layer too
    # Norms begin at 1, which bfloat16 holds; the gradient of their weights alone is rounded.
    assert [name for name in different if "norm" not in name] == []
    for rank in range(2):  # each device rounds and sums up its part of the weights for both
        steps, compares = json.loads((tmp_path / f"vllm-{rank}.json").read_text())
        assert 0 < steps <= 1 and compares


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tokens"), [
    (2, [10 + 7 + 5 + 6, 10 + 6 + 4 + 4]),
    pytest.param(4, [5 + 7 + 3, 5 + 6 + 3, 5 + 5 + 2, 5 + 4 + 1], marks=pytest.mark.long),
])  # fmt: skip
def test_ranks_read_shared_prompts_once_with_the_gradients_of_one_that_reads_rows_whole(tmp_path, size, tokens):
    for number in (1, size):
        assert ends(*[begun(ranks_at_work.gradients, rank, number, tmp_path) for rank in range(number)]) == [0] * number
    alone, shared = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in (1, size))
    for name, (right, _) in alone.items():
        found, _ = shared[name]
        assert (found - right).norm() <= 1e-6 * right.norm(), name  # the norms inside the model are in float32
    # Policy and critic read 8 rows of 4 to 10 tokens, 20 at once: 2 x 10, 2 x 9, 2 x 8, 2 x 7. Shared: 1 or 2 prompts
    # of 5 tokens, then completions: 7; 6; 5; 4; 2 x 3; 2 x 2 dealt to two, 7; 6; 5; 4; 3; 3; 2; 1 to four processes.
    assert [sum(read) // 2 for read in alone["all"][1]] == [68]
    assert [sum(read) // 2 for read in shared["all"][1]] == tokens
    assert [sum(read) // 4 for read in shared["all, again"][1]] == tokens


def check_equal(name: str, one: Path, two: Path, size: int = 2, since: int = 0) -> None:
    alone, both = (json.loads((folder / "log.json").read_text()) for folder in (one, two))
    assert alone["state"] == both["state"] == "complete", name
    assert len(alone["threads"]) == 1 and both["threads"] == [1] * size
    alone["events"] = [(step, values) for step, values in alone["events"] if step > since or not since]
    assert [step for step, _ in alone["events"]] == [step for step, _ in both["events"]], name
    for (step, values), (_, others) in zip(alone["events"], both["events"], strict=True):
        assert values.keys() == others.keys(), (name, step)
        for metric, value in values.items():
            if metric.startswith("flops/"):
                # the prompts' backward pass begins at their last hidden states, not at keys and values before them
                assert value <= others[metric] <= 1.1 * value, (name, step, metric)
                continue
            # a weight that moves by less than its last bit may stay on one side
            bound = 1e-4 if metric == "policy/weights_changed" else 2e-5
            if name == "fitted" and metric.startswith("critic/"):  # states that hardly differ leave the head some room
                bound = 1e-2
            assert others[metric] == pytest.approx(value, abs=bound, rel=bound, nan_ok=True), (name, step, metric)
    for step in (1, 2):
        rollouts = {(folder / "rollouts" / f"step-{step:06d}.jsonl").read_text() for folder in (one, two)}
        assert len(rollouts) == 1, (name, step)
    start, end = tiny_model(0).state_dict(), last_policy(one)
    assert max(float((end[key] - start[key]).abs().max()) for key in end) > 1e-4, name
    check_weights(name, one, two)


def check_weights(name: str, one: Path, two: Path) -> None:
    first, second = last_policy(one), last_policy(two)
    assert first.keys() == second.keys()
    different = torch.cat([(first[key] - second[key]).abs().flatten() for key in first])
    # AdamW moves a weight by up to the rate (1e-4) a step, even if its gradient is little more than rounding.
    assert different.max() <= 1e-4 and (different > 1e-6).double().mean() <= 1e-4, name


def saved_policy(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    files = (checkpoint.folder / "policy").glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def last_policy(directory: Path) -> dict[str, torch.Tensor]:
    folder = sorted((directory / "checkpoints").glob("step-*"))[-1]
    return load_policy(str(folder / "policy"), seed=0).state_dict()


@pytest.mark.slow
@pytest.mark.attack("SIGKILL of one process of a trial on two devices")
def test_a_process_that_is_killed_ends_the_attempt_and_the_next_one_goes_on_from_its_checkpoint(tmp_path):
    changes = {**RUN, "device": "cpu", "steps": 60, "checkpoints": {"every": 1}}
    (tmp_path / "run.yaml").write_text(json.dumps(changes))
    train_two = ["train", str(tmp_path / "run.yaml"), "--set", "devices=2", "--name", "one", "--runs", str(tmp_path)]
    folder, words = tmp_path / "train/one", tmp_path / "words"
    agent = begun(ranks_at_work.command, *train_two, output=words)
    until(lambda: list(folder.glob("checkpoints/step-*")), agent)
    ranks = [one for one in psutil.Process(agent.pid).children() if one.children() or one.num_threads() > 1]
    assert len(ranks) == 2
    addresses = {one.laddr.ip for process in (*ranks, psutil.Process(agent.pid)) for one in process.net_connections()
                 if one.status == psutil.CONN_LISTEN}  # fmt: skip
    assert addresses <= {"127.0.0.1", "::1"}  # nothing of it can be reached from another machine
    ranks[1].kill()
    assert ends(agent) == [137]
    assert "process 1 of the trial was killed by signal 9; the trial continues from its last" in words.read_text()
    assert not [one for one in ranks if one.is_running()]
    log = MemoryLog()
    log.holds = lambda *_: True
    spec = parse_run(changes, "next")
    assert train(spec, folder, log, cache=tmp_path / "cache", should_stop=StopAfter(1)).state == "stopped"
    assert log.resumed_at[0] >= 1


@pytest.mark.slow
def test_the_first_error_of_a_process_reaches_the_first_one_and_the_group_lives_on(tmp_path):
    """Of `group_of_two`, whose trials end in several ways, one after another."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    leader, _ = both = [begun(ranks_at_work.group_of_two, rank, tmp_path, store.port) for rank in range(2)]
    assert ends(leader) == [0], both
    assert json.loads((tmp_path / "ends.json").read_text()) == [
        ["well", "complete"],
        ["follower fails", "SpecError", "bad data"],
        ["follower fails oddly", "RuntimeError", "process 1: ZeroDivisionError: division by zero"],
        ["follower is invalid", "invalid"],
        ["first fails", "KeyError", "'own'"],
        ["first stops alone", "stopped"],
        ["well", "complete"],
        ["other files", "SpecError", "all hosts of a trial must see the same rank, process 1 sees others than process "
         f"0; give all the same files (the run is in '{tmp_path}')"],
        ["follower dies", "ChildProcessError", "only 1 of the trial's 2 processes answer; the trial continues from its "
         "last checkpoint when it is started again"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("how", "told", "statuses"), [
    ("follower", [True, False, "RuntimeError", "process 1: OutOfMemoryError: too long"], [1, 1]),
    ("first", [False, False, "KeyError", "'own'"], [1, 1]),
    ("stale", [True, False, "invalid"], [1, 1]),
    ("both", [False, True, "invalid"], [0, 0]),
    ("device", [True, False, "SpecError", "no GPU"], [1, 0]),
])  # fmt: skip
def test_an_error_of_one_process_ends_all_although_each_would_wait_for_the_others(tmp_path, how, told, statuses):
    """A fake NCCL: whoever ends the group, or vLLM in it, waits until the other does too (torchtitan's issue 1342)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    both = [begun(ranks_at_work.group_of_nccl, rank, tmp_path, store.port, how) for rank in range(2)]
    assert ends(*both) == statuses
    assert json.loads((tmp_path / f"{how}.json").read_text()) == told


@pytest.mark.slow
@pytest.mark.parametrize(("place", "lives_on"), [
    ("update", False), ("evaluation", False), ("checkpoint", False), ("closing", True),
])  # fmt: skip
def test_an_error_of_the_first_process_ends_the_others_at_once_wherever_they_wait_for_it(tmp_path, place, lives_on):
    """Where they wait in vain, the group ends with its trial: the next one would wait for them, and be told as lost."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    both = [begun(ranks_at_work.group_of_gloo, rank, tmp_path, store.port, place) for rank in range(2)]
    assert ends(*both) == [1 - lives_on] * 2
    assert json.loads((tmp_path / f"{place}.json").read_text()) == [False, lives_on, "KeyError", "'own'"]


def test_a_run_on_several_devices_needs_a_group(tmp_path):
    with pytest.raises(SpecError, match=r"devices=2 needs a group of as many processes.*`cohort train`"):
        group.lead(train, parse_run({**RUN, "devices": 2}, "alone"), tmp_path, MemoryLog(), cache=tmp_path)


def test_bad_numbers_of_devices_are_refused_before_anything_starts(monkeypatch, tmp_path):
    with pytest.raises(SpecError, match=r"devices must divide rollouts of a minibatch \(16\), got 3; use 2 or 4"):
        parse_run({**RUN, "devices": 3}, "bad")
    monkeypatch.setattr(preflight, "usable_cores", lambda: 2)
    four = parse_run({**RUN, "devices": 4, "device": "cpu"}, "bad")
    refusal = "devices must be at most 2, the cores of this machine, got 4; lower devices"
    with pytest.raises(SpecError, match=refusal):
        train_once(four, tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_devices_that_cannot_share_an_engine_are_refused_before_anything_starts(monkeypatch, tmp_path):
    def run(devices: int, size: int):
        engine = {"name": "vllm", "tensor_parallel_size": size}
        return parse_run({**RUN, "devices": devices, "device": "cpu", "engine": engine}, "bad")

    with pytest.raises(SpecError, match=r"engine.tensor_parallel_size must divide devices \(2\), got 4; use 2"):
        run(2, 4)
    monkeypatch.setattr(preflight, "usable_cores", lambda: 8)
    with pytest.raises(SpecError, match="must divide the 2 attention heads of 'tiny', got 4; use 2"):
        preflight.check_runs([run(4, 4)], tmp_path, copies=None)
    preflight.check_devices([run(4, 2)])
    monkeypatch.setattr(group, "_own", group.RankGroup(None, 0, 4, 1, ""))  # four hosts
    with pytest.raises(SpecError, match="must divide the processes on each host, 1, got 2"):
        preflight.check_devices([run(2, 2)])
    with pytest.raises(SpecError, match="devices must be at most 4, the processes of this group, got 8"):
        preflight.check_devices([run(8, 1)])


def test_gpus_that_torch_cannot_use_or_that_can_hardly_talk_are_told(monkeypatch, caplog):
    run = {device: parse_run({**RUN, "devices": 2, "device": device}, "run") for device in ("auto", "cpu", "cuda")}
    monkeypatch.setattr(preflight, "usable_gpus", lambda: ("0", "1"))
    monkeypatch.setattr(preflight, "usable_cores", lambda: 2)
    for device, words in (("cpu", ""), ("auto", "is the CPU, because torch cannot use this machine's GPUs")):
        preflight.check_capacity([run[device]], [])
        assert words in caplog.text and bool(words) == bool(caplog.text)
    caplog.clear()
    with pretend_cuda():
        for free, is_told in ((None, False), (2**30, False), (2**26, True)):
            monkeypatch.setattr(preflight, "shared_memory_bytes", lambda free=free: free)
            preflight.check_capacity([run["cuda"]], [run["cuda"]])
            assert ("/dev/shm has less than 1 GiB free" in caplog.text) == is_told


@pytest.mark.parametrize(("together", "parts"), [(1, [[0], [1, 2], [3], [4, 5]]), (2, [[0, 1, 2], [3, 4, 5]])])
def test_ranks_that_share_an_engine_get_the_same_items(monkeypatch, together, parts):
    def everywhere(own: Any) -> list[Any]:
        found = [[item * 10 for item in part] for part in parts for _ in range(together)]
        assert found[rank_messages.rank()] == own
        return found

    monkeypatch.setattr(rank_messages, "world_size", lambda: 4)
    monkeypatch.setattr(rank_messages, "of_all", everywhere)
    for rank in range(4):
        monkeypatch.setattr(rank_messages, "rank", lambda rank=rank: rank)
        found = rank_messages.shared(range(6), lambda part: [item * 10 for item in part], together)
        assert found == [0, 10, 20, 30, 40, 50]


QWEN_7B = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.slow
def test_7b_fits_with_adapters_on_one_gpu_and_whole_on_eight_and_is_refused_whole_on_one():
    study = load_study("math_7b", [])
    whole = load_study("math_7b", ["lora=null", "devices=8", "optimizer.learning_rate=1e-6"])
    assert (study.devices, whole.devices) == (1, 8)
    arm, spread = (each.checked_arms()[0].spec for each in (study, whole))
    gpu, config = torch.device("cuda"), Qwen2Config(**QWEN_7B, tie_word_embeddings=False)
    with pretend_cuda(gib=79.6):
        for spec in (arm, spread):
            again = spec.model_copy(update={"gradient_checkpointing": True})
            memory.check_fits(memory.estimate(again, config, 300, gpu), gpu, again)
        alone = spread.model_copy(update={"devices": 1})
        expected = "must fit in memory: the GPU has 77.60 GiB free beside 2.00 GiB for CUDA.*spread it over more GPUs"
        with pytest.raises(SpecError, match=expected):
            memory.check_fits(memory.estimate(alone, config, 300, gpu), gpu, alone)


def test_what_is_spread_takes_its_share_on_each_device(monkeypatch):
    spec = parse_run({**RUN, **case("ppo")}, "one")
    counts = [
        memory.estimate(spec.model_copy(update={"devices": devices}), tiny_config(), 30, torch.device("cpu"))
        for devices in (1, 2, 4)
    ]
    for name in ("reference", "gradients", "optimizer"):
        assert [counts[0][name] // n for n in (1, 2, 4)] == [part[name] for part in counts]
    engines = [
        memory.estimate(spec.model_copy(update={"engine": engine}), tiny_config(), 30, torch.device("cpu"))
        for engine in (VLLMEngine.Settings(tensor_parallel_size=size) for size in (1, 2))
    ]
    assert engines[0]["engine"] // 2 == engines[1]["engine"] > 0  # of the weights, and of the heads that keep keys
    assert counts[0]["gathered"] == 0 < counts[1]["gathered"] == counts[2]["gathered"]


def test_a_device_reads_its_part_of_the_prompts_and_keeps_the_keys_of_all():
    spec = parse_run({**RUN, **case(), "optimizer": {"tokens_per_microbatch": 4 * 30}}, "one")
    one, two = (
        memory.estimate(spec.model_copy(update={"devices": n}), tiny_config(), 30, torch.device("cpu"))["activations"]
        for n in (1, 2)
    )
    counts = memory.count(memory.Shape.of(spec, tiny_config(), 3, 30))
    trunk = counts.trunk
    # A pass reads 3 rows of 30 + 8 tokens, or 4 prompts of 30. Of 4 prompts with 29 shared tokens one device reads 4,
    # whose keys are leaves for others; each of two reads 2, beside leaves of all 4 and their gradient.
    alone = (trunk.all * 4 + sum(trunk.cache) * 4) * 29
    spread = (trunk.all * 2 + sum(trunk.cache) * (2 + 2 * 4)) * 29
    # Two hold a gradient of the head besides, which one adds in place: it keeps two more blocks of logits instead.
    head = counts.head - 2 * 4 * counts.vocabulary * 3 * 8
    assert one - two + head == alone // (3 * 38) - spread // (3 * 38) > head > 0
