"""Processes of a trial forked from one warm process: runs in one and in two of them, groups, hosts."""

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fake_vllm
import pytest
import torch
import torch.distributed as dist
from cohort.harness.data import InvalidRun
from cohort.harness.devices import group, ranks
from cohort.harness.devices.sharding import full, layers, shard, total_bytes
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.engines.vllm import VLLMEngine
from cohort.harness.policy import model
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import build as state
from cohort.harness.run import checkpoint, loop
from cohort.harness.run.checkpoint import Checkpoint
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import LoRA, parse_run
from fakes import MemoryLog, StopAfter, tiny_codec
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import Qwen2Config, Qwen2ForCausalLM

RUN = {
    "task": "arithmetic",
    "algorithm": {"name": "grpo", "group_size": 4},
    "rewards": {"repetition": {"weight": 1.0, "ngram": 1}},  # differs between completions of a weak policy
    "sampling": {"max_tokens": 8},
    "rollouts_per_step": 16,
    "seed": 1,  # rewards vary in both steps: without, the explained variance is a ratio of rounding errors
    "steps": 2,
    "evaluation": {"num_prompts": 3, "num_test_prompts": 3, "num_samples": 2},  # no even shares
    "checkpoints": {"rollouts_every": 1},
}
RESUMED = "resumed"
EVERY_STEP = {"steps": 3, "checkpoints": {"every": 1}}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["cohort.harness.run.loop", "peft", "torch.distributed.fsdp", "torch.distributed.tensor",
     "torch.distributed.launcher.api", "transformers.models.llama.modeling_llama",
     "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
)  # fmt: skip


def begun(target: Callable[..., None], *given: Any, output: Path | None = None) -> Any:
    """The process that does `target(*given)`; what it prints goes to `output`."""
    process = PROCESSES.Process(target=_begin, args=(target, given, output))
    process.start()
    return process


def _begin(target: Callable[..., None], given: tuple[Any, ...], output: Path | None) -> None:
    for stream in (1, 2) if output is not None else ():
        os.dup2(os.open(str(output), os.O_CREAT | os.O_APPEND | os.O_WRONLY), stream)
    os.environ["GLOO_SOCKET_IFNAME"] = group.loopback()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)  # who hangs says where, before `ends` gives up
    gc.freeze()  # every run collects, and nothing of a library is garbage
    target(*given)


def until(condition: Callable[[], object], *processes: Any) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and all(one.is_alive() or one.exitcode == 0 for one in processes)
        time.sleep(0.05)


def ends(*processes: Any) -> list[int]:
    """Their exit statuses."""
    for one in processes:
        one.join(120)
    return [one.exitcode for one in processes]


# Runs in one process and in two ---------------------------------------------------------------------------------------


def side_by_side(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Run all cases, what differs from `RUN`, in one process and in two; FOLDER/1 and FOLDER/2 get a folder for each
    with what the run left, and `log.json`: how it ended, and all that it logged but clocks.

    The run FOLDER/2/RESUMED is stopped after a step by the two, goes on in the one for another step, and ends in the
    two; FOLDER/1/RESUMED is the same run undisturbed.
    """
    for part in ("1", "2"):
        (folder / part).mkdir()
    both = [begun(run_rank, rank, folder, cases) for rank in range(2)]
    for name, changes in {**cases, RESUMED: {"steps": 3}}.items():
        run(folder / "1", name, changes)
    until((folder / "one's turn").exists, *both)
    run(folder / "2", RESUMED, {"steps": 3}, StopAfter(1))
    (folder / "two's turn").touch()
    assert ends(*both) == [0, 0]


def run(folder: Path, name: str, changes: dict[str, Any], should_stop: Callable[[], bool] = lambda: False) -> None:
    log = MemoryLog()
    log.holds = lambda *_: True  # what another process logged
    spec = parse_run({**RUN, **changes}, name)
    result = train(spec, folder / name, log, cache=folder / "cache", should_stop=should_stop)
    if ranks.rank() == 0:
        ended = {"state": result.state, "reason": result.reason, "threads": log.threads}
        document = {**ended, "events": log.without_clocks()}
        (folder / name / "log.json").write_text(json.dumps(document))


def refused(*_: Any) -> None:
    raise AssertionError("one process reads for all")


def run_rank(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    if rank:  # reads no weights and no moments
        state.start_policy = Checkpoint.policy_weights = Checkpoint.learner_state = refused  # pyright: ignore
    run(folder / "2", RESUMED, {"steps": 3}, StopAfter(1))
    if rank == 0:  # which has written the checkpoint
        (folder / "one's turn").touch()
    for name, changes in cases.items():
        run(folder / "2", name, changes)
    until((folder / "two's turn").exists)
    run(folder / "2", RESUMED, {"steps": 3})


def attempt(
    rank: int, size: int, folder: Path, name: str, changes: dict[str, Any], steps: int | None = None, meeting: str = ""
) -> None:
    """One of `size` processes that run FOLDER/NAME, or continue it, to its end or for so many steps. What the last ones
    read they write again to FOLDER/NAME/again-SIZE."""
    if size > 1:
        dist.init_process_group("gloo", f"file://{folder}/{name}-{size}-{steps}{meeting}", rank=rank, world_size=size)
    if (folder / name / "checkpoints").is_dir() and not meeting:
        log, spec = MemoryLog(), parse_run({**RUN, **changes}, name)
        log.holds = lambda *_: True
        read, step = state.prepare(spec, folder / name, log, folder / "cache", lambda: False)  # pyright: ignore
        read.directory = folder / name / f"again-{size}"
        read.save(step)
        read.close()
    run(folder, name, changes, (lambda: False) if steps is None else StopAfter(steps))


def deadly_attempt(rank: int, folder: Path, name: str, number: int) -> None:
    """One of two processes that run FOLDER/NAME, each of which dies once at every place that writes a checkpoint."""
    os.environ["KILLS"] = str(folder / "kills" / str(rank))
    import kill_points

    for module, function in ((checkpoint, "write_hashed"), (model, "write_hashed"), (ranks, "joined_rows")):
        setattr(module, function, kill_points._deadly(function, getattr(module, function)))
    attempt(rank, 2, folder, name, EVERY_STEP, meeting=f"-{number}")


def gathers(rank: int, folder: Path) -> None:
    """Shard a model with and without autocast's gathers in bfloat16; FOLDER/gathers.json gets the bytes that both
    gathered in a pass and its backward pass, those of all layers, and which of log-probs and gradients differ; then how
    far a vLLM of this rank is from the weights, in steps of bfloat16, and whether it compares them."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    config = {"vocab_size": 65, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "pad_token_id": 0}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens, gather = torch.randint(1, 64, (4, 12)), dist.all_gather_single
    found, counted = [], [0, 0]
    for autocast in (False, True):

        def counting(output: Any, *given: Any, place: int = int(autocast), **named: Any) -> Any:
            counted[place] += output.nbytes
            return gather(output, *given, **named)

        dist.all_gather_single = counting  # pyright: ignore
        torch.manual_seed(0)
        policy = Qwen2ForCausalLM(Qwen2Config(**config))
        size = total_bytes(p for layer in layers(policy) for p in layer.parameters())
        shard(policy, torch.device("cpu"), autocast=autocast)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = token_logprobs(policy, tokens, torch.ones(4, 12).bool().triu(1), 1.0)
        logprobs.sum().backward()
        gradients = {name: p.grad.to_local() for name, p in policy.named_parameters()}  # pyright: ignore
        found.append({"log-probs": logprobs.detach(), **gradients})
    if rank == 0:
        different = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
        (folder / "gathers.json").write_text(json.dumps([*counted, size, different]))
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch, folder / f"vllm-{rank}")
        engine = VLLMEngine(VLLMEngine.Settings(dtype="bfloat16", max_model_len=32), policy, tiny_codec())
    theirs = engine.llm.model.state_dict()
    steps = [
        float(((theirs[name].float() - (whole := full(value))).abs() / (whole.abs() / 128 + 1e-30)).max())
        for name, value in policy.state_dict().items()
    ]
    (folder / f"vllm-{rank}.json").write_text(json.dumps([max(steps), engine.verifies_weights]))


def gradients(rank: int, size: int, folder: Path) -> None:
    """One of `size` processes that find the gradients of PPO on rows of 3 prompts in float64: of all weights or of
    adapters, activations computed again or not; a process alone reads rows whole. FOLDER/SIZE.pt gets for each case
    all gradients in one vector, and of each process the tokens that the policy's last layer reads in an update."""
    from test_learner import make_spec, shared_prompts

    if size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name in ("all", "all, again", "adapter, again"):
        policy, read = tiny_model(0).double(), []
        if "adapter" in name:
            add_adapter(policy, LoRA(rank=2), seed=1)
            torch.manual_seed(0)
            for parameter in policy.double().parameters():
                parameter.data += 0.01 * torch.randn(parameter.shape)
        if "again" in name and size > 1:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inside: Any = layers(policy)[1].input_layernorm  # which is computed again, hooks of a layer perhaps not
        inside.register_forward_pre_hook(lambda _, given, read=read: read.append(given[0].shape[:2].numel()))
        spec, batch = make_spec("ppo", tokens_per_microbatch=20), shared_prompts()
        learner = Learner(spec, policy)
        learner.optimizers, learner.shares_prompts = {}, size > 1
        credited = spec.algorithm.advantages(learner.annotate(batch))
        read.clear()
        weights = spec.algorithm.loss_weights(batch.completion_mask_BT)
        learner._optimizer_step(credited.replace(loss_weight_BT=weights), first=True)
        trained = [p for part in (policy, learner.critic.backbone) for p in part.parameters() if p.requires_grad]
        found[name] = (torch.cat([full(p.grad).flatten() for p in trained]), ranks.gathered(read, ranks.apart()))
    if rank == 0:
        torch.save(found, folder / f"{size}.pt")


# A group whose trials end in several ways -----------------------------------------------------------------------------

ENDS = ("well", "follower fails", "follower fails oddly", "follower is invalid", "first fails", "first stops alone",
        "well", "other files", "follower dies")  # fmt: skip


def execute(spec: Any, directory: Path, log: Any, *, cache: Path, should_stop: Any) -> Any:
    how, first = ENDS[spec.seed], ranks.rank() == 0
    assert ranks.summed(torch.ones(1)) == 2
    if how == "first stops alone" and first:
        return SimpleNamespace(state="stopped")
    if how == "first fails" and first:
        raise KeyError("own")
    if how == "other files":
        ranks.check_alike(directory, rank=ranks.rank())
    if not first and how == "follower fails":
        raise SpecError("bad data")
    if not first and how == "follower fails oddly":
        print(1 / 0)
    if not first and how == "follower is invalid":
        return SimpleNamespace(state="invalid", reason="all rewards are equal")
    if not first and how == "follower dies":
        os._exit(9)
    dist.barrier()  # for which the other waits
    return SimpleNamespace(state="complete")


def group_of_two(rank: int, folder: Path, port: int) -> None:
    """The first writes how each trial ended to FOLDER/ends.json; the store is at the port."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group._own = one = group.RankGroup(store, rank, 2, 2, "secret")
    group.LEAVE_SECONDS = 1
    one.meet()
    if rank:
        return one.follow(execute)
    found = []
    for seed, how in enumerate(ENDS):
        spec = parse_run({**RUN, "device": "cpu", "devices": 2, "seed": seed}, "test")
        try:
            found.append([how, group.lead(execute, spec, folder, None, cache=folder, should_stop=None).state])
        except (Exception, InvalidRun) as error:
            found.append([how, type(error).__name__, str(error)])
    (folder / "ends.json").write_text(json.dumps(found))


# Groups in which one raises ------------------------------------------------------------------------------------------

STALE = InvalidRun("stale weights")
BROKEN = {
    "follower": {1: torch.OutOfMemoryError("too long")}, "first": {0: KeyError("own")}, "stale": {1: STALE},
    "both": {0: STALE, 1: STALE}, "device": {},
}  # fmt: skip
PLACES = {"update": (Learner, "update"), "evaluation": (loop, "evaluate_run"), "checkpoint": (state, "save_checkpoint"),
          "closing": (TransformersEngine, "close")}  # fmt: skip


def group_of_gloo(rank: int, folder: Path, port: int, place: str) -> None:
    """One of two that train until the first one raises at the place."""
    owner, name = PLACES[place]
    if rank == 0:
        setattr(owner, name, Mock(side_effect=KeyError("own")))
        say = group.RankGroup.tell  # the other sees the last message some time before it hears that this one ends
        group.RankGroup.tell = lambda one, job: (say(one, job), time.sleep(5 * group.POLL_SECONDS))[0]
    group.LEAVE_SECONDS = 600
    _trained(rank, folder, port, place)


def group_of_nccl(rank: int, folder: Path, port: int, how: str) -> None:
    """One of two that train until the update of some of them fails, in a group that ends as NCCL does: together."""
    store, errors = dist.TCPStore("127.0.0.1", port, is_master=False), BROKEN[how]

    def together(*_: Any) -> None:
        turn = store.add("ends", 1)
        until(lambda: store.add("ends", 0) >= turn + turn % 2)

    def update(learner: Learner, *given: Any) -> Any:
        if rank in errors:
            raise errors[rank]
        return learned(learner, *given)

    learned, Learner.update = Learner.update, update
    state.Run.close, dist.destroy_process_group = (lambda run: together()), together  # pyright: ignore
    group.LEAVE_SECONDS, group.BACKENDS = 1, {"cpu": "cpu:gloo"}
    if how == "device" and rank:
        group.resolve_device = Mock(side_effect=SpecError("no GPU"))
    _trained(rank, folder, port, how)


def _trained(rank: int, folder: Path, port: int, name: str) -> None:
    """FOLDER/NAME.json gets whether the first one was stuck, whether the group lives on, and how the run ended."""

    def note(end: Callable[[], Any], is_stuck: bool) -> None:
        try:
            words = [end().state]
        except Exception as error:
            words = [type(error).__name__, str(error)]
        (folder / f"{name}.json").write_text(json.dumps([is_stuck, not one.is_broken, *words]))

    group._own = one = group.RankGroup(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 2, 2, "secret")
    one.meet()
    if rank:
        return one.follow(train)
    spec = parse_run({**RUN, "device": "cpu", "devices": 2, "steps": 1}, name)
    named = {"cache": folder / "cache", "should_stop": lambda: False, "when_stuck": lambda tell: note(tell, True)}
    note(lambda: group.lead(train, spec, folder / name, MemoryLog(), **named), False)
    one.end()


# The command, its agent and the ranks ---------------------------------------------------------------------------------


def command(*words: str) -> None:
    """What `cohort WORDS` does; the agent that it becomes forks its processes instead of starting pythons."""
    from cohort.harness.cli.app import main

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork would raise an error instead

    def again(config: Any, python: str) -> Callable[..., Any]:
        assert python == sys.executable
        return elastic_launch(replace(config, start_method="fork"), lambda *given: command(*given[3:]))

    api.elastic_launch = again  # pyright: ignore
    sys.argv = ["cohort", *words]
    main()


# A host ---------------------------------------------------------------------------------------------------------------


def torchrun(port: int, runs: Path, restarts: int, environment: dict[str, str]) -> None:
    """What `torchrun --nnodes 2 ... -m cohort study work two` does, with one process of the worker."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torch's agent does not tell it to a host that is new
    os.environ |= environment
    config = LaunchConfig(
        2, 2, 1, run_id="two", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_backend="c10d",
        rdzv_configs={"keep_alive_interval": 1, "keep_alive_max_attempt": 2},  # seconds; --rdzv-conf of torchrun
        local_addr="127.0.0.1", start_method="fork", max_restarts=restarts,
    )  # fmt: skip
    elastic_launch(config, work)(runs)


def work(runs: Path) -> None:
    from cohort.harness.study.worker import worker_main

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork would raise an error instead
    group.LEAVE_SECONDS = 2
    worker_main("two", runs)
    own = group.enter()
    if own is not None and own.rank == 0:
        own.end()  # else at the exit of a process that is no fork
