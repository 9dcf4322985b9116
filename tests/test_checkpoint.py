"""A checkpoint is complete or ignored, loads with transformers, and never feeds another run."""

import io
import json
import shutil
import threading
from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from cohort.harness.base.files import partial_folder, sha256
from cohort.harness.base.inputs import InputsChanged, expecting
from cohort.harness.devices import ranks
from cohort.harness.devices.ranks import without_storage
from cohort.harness.devices.sharding import copied
from cohort.harness.policy.model import write_safetensors
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.events import EVENTS, event_line, read_events
from cohort.harness.record.run import CHECKPOINTS
from cohort.harness.run import build as state
from cohort.harness.run import checkpoint as checkpoints
from cohort.harness.run.build import prepare
from cohort.harness.run.checkpoint import Snapshot, Writer, fork_run, latest_checkpoint, save_checkpoint
from cohort.harness.run.step import train_step
from factories import make_spec
from fakes import MemoryLog, assert_same_weights
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def save(folder, step, seed=0, keep=2, digest="abc", **facts):
    progress = {"totals": {"rollouts": step}, "num_events": 0}
    facts = {"spec_digest": digest, "inputs": {}, "progress": progress, **facts}
    learner = {"policy": {"step": torch.tensor(step)}}
    save_checkpoint(folder, Snapshot(step, tiny_model(seed), tiny_tokenizer(), learner, facts), keep)


def test_a_saved_run_comes_back_bit_for_bit(tmp_path, monkeypatch):
    save(tmp_path, 7, seed=3)
    checkpoint, read = latest_checkpoint(tmp_path, "abc"), Mock(side_effect=torch.load)
    assert checkpoint.step == 7
    monkeypatch.setattr(torch, "load", read)
    assert checkpoint.progress == {"totals": {"rollouts": 7}, "num_events": 0}
    assert checkpoint.learner_state()["policy"]["step"].item() == 7
    # a GPU may have written it; no object of it is built; and it may be larger than the memory
    assert read.call_args.kwargs == {"map_location": "cpu", "weights_only": True, "mmap": True}
    policy = tiny_model(0)
    policy.load_state_dict(checkpoint.policy_weights(policy))
    assert_same_weights(tiny_model(3).state_dict(), policy.state_dict())
    folder = tmp_path / "step-00000007" / "policy"  # which transformers loads
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight, tiny_model(3).lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder)("1+1=")["input_ids"] == tiny_tokenizer()("1+1=")["input_ids"]
    saved = load((folder / "model.safetensors").read_bytes())
    for name, part in (("model", dict([saved.popitem()])), ("more", saved)):  # a large one is in several files
        save_file(part, folder / f"{name}.safetensors")
    assert_same_weights(policy.state_dict(), checkpoint.policy_weights(policy))


def test_only_the_newest_checkpoints_are_kept_and_those_of_other_settings_are_refused(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    with pytest.raises(ValueError, match="other settings"):
        latest_checkpoint(tmp_path, "def")


def flip_the_last_byte(data):
    return data[:-1] + bytes([data[-1] ^ 255])


@pytest.mark.parametrize(("file", "damage", "steps"), [
    ("learner.pt", lambda data: data[:-1], (1, 2)), ("state.json", lambda data: data[:-1], (1, 2)),
    ("policy/model.safetensors", flip_the_last_byte, (1, 2)), ("policy/model.safetensors", flip_the_last_byte, (2,)),
])  # fmt: skip
@pytest.mark.attack("A torn or altered checkpoint")
def test_a_torn_or_garbled_checkpoint_is_named_and_passed_over(tmp_path, file, damage, steps, caplog):
    for step in steps:
        save(tmp_path, step)
    damaged = tmp_path / "step-00000002" / file
    damaged.write_bytes(damage(damaged.read_bytes()))
    checkpoint = latest_checkpoint(tmp_path, "abc")
    assert (checkpoint and checkpoint.step) == (1 if 1 in steps else None)
    instead = "continues from step 1" if 1 in steps else "starts again from the beginning"
    told = f"a checkpoint must be as it was saved, but '{damaged}' is torn, altered or missing; the run {instead}"
    assert [record.message for record in caplog.records] == [told]
    if file.startswith("policy"):  # as an evaluation reads it
        words = rf"is torn or altered: .*'{damaged}' is torn, altered or missing\); make it or"
        with pytest.raises(ValueError, match=words):
            model_sources(str(damaged.parent))


def test_a_checkpoint_of_other_inputs_is_refused(tmp_path):
    save(tmp_path, 1, inputs={"model m": {"weights": "0" * 64}})
    with expecting({"model m": {"weights": "1" * 64}}), pytest.raises(InputsChanged, match="'weights' of model m"):
        latest_checkpoint(tmp_path, "abc")


@pytest.mark.parametrize(
    ("rank", "group", "named"), [(0, "g", "learner.pt"), (1, "g", "1-learner.pt"), (1, None, "learner.pt")]
)
def test_each_process_of_a_group_writes_its_part_and_the_first_publishes_all(rank, group, named, tmp_path, monkeypatch):
    told, known, folder = [], [], tmp_path / "step-00000001"
    own, written = checkpoints.save_model, checkpoints.write_manifest
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "gathered", lambda value, group: (told.append((value, group)), [value])[1])
    monkeypatch.setattr(checkpoints, "save_model", lambda *given: (told.append(given[-1]), own(*given[:-1], None))[1])
    noted = lambda *given, **facts: (known.append(facts["known"]), written(*given, **facts))[1]  # noqa: E731
    monkeypatch.setattr(checkpoints, "write_manifest", noted)
    is_part = rank == 1 and group is not None
    if is_part:
        (folder := partial_folder(folder)).mkdir()  # the first process makes it
    facts = {"spec_digest": "abc", "inputs": {}, "progress": {}}
    save_checkpoint(tmp_path, Snapshot(1, tiny_model(0), tiny_tokenizer(), {}, facts), 2, group)
    first, (hashes, _), last, *_ = told
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    assert (first, last, [*hashes]) == ((None, group), group, [named])
    assert hashes[named] == sha256(files[named])
    assert ("state.json" in files) is not is_part and [tmp_path / folder.name] == [*tmp_path.iterdir()]
    read = [] if is_part else [files.keys() - {"state.json", "policy/manifest.json"}]
    assert [{*one} for one in known] == read  # and none of them is read again for its hash


@pytest.mark.attack("A torn or altered checkpoint")
def test_a_checkpoint_whose_events_are_lost_is_named(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    checkpoint = latest_checkpoint(tmp_path, "abc", holds=lambda step, num_events: step < 2)
    assert checkpoint and checkpoint.step == 1
    assert f"events.jsonl lacks events of '{tmp_path / 'step-00000002'}'; the run continues from step 1" in caplog.text


def test_a_fork_goes_on_from_the_newest_checkpoint_that_trains_with_the_past_until_then(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    parent, spec = (make_spec(algorithm={"name": "grpo", "kl_beta": beta}) for beta in (0.1, 0.2))
    assert fork_run(source, target, spec, parent) == (0, [])
    for step in (1, 2, 3):
        save(source / CHECKPOINTS, step, keep=3, is_last=step == 3)  # the last is without optimisers
    names = ((2, "a"), (2, "b"), (3, "c"))
    files = [{"type": "kept", "step": n, "file": f"rollouts/{x}.jsonl", "sha256": x} for n, x in names]
    past = [{"type": "metrics", "step": 1, "values": {}}, *files[:2]]
    (source / EVENTS).write_text("".join(map(event_line, [{"type": "start"}, *past, files[2]])))
    (source / "rollouts").mkdir()
    for name in ("a", "b", "c"):
        (source / f"rollouts/{name}.jsonl").write_text(name)
    fitted = f"{CHECKPOINTS}/0001-model-own"  # by a stage
    (source / fitted).mkdir()
    (source / fitted / "weights").write_text("fitted")
    monkeypatch.setattr(checkpoints, "write_manifest", written := Mock(side_effect=checkpoints.write_manifest))
    assert fork_run(source, target, spec, parent) == (2, [])
    state = json.loads((source / CHECKPOINTS / "step-00000002/state.json").read_text())
    assert written.call_args.kwargs["known"] == state["files"]  # none is read again for its hash
    assert (target / fitted / "weights").read_text() == "fitted"
    checkpoint = latest_checkpoint(target / CHECKPOINTS, spec.digest())
    assert checkpoint and checkpoint.learner_state()["policy"]["step"].item() == 2
    assert checkpoint.progress == {"totals": {"rollouts": 2}, "num_events": 0, "kl_beta": 0.2}
    assert read_events(target / EVENTS) == past
    assert {file.name: file.read_text() for file in (target / "rollouts").iterdir()} == {"a.jsonl": "a", "b.jsonl": "b"}

    def removed(folder, *_, **__):
        shutil.rmtree(folder)
        raise FileNotFoundError(folder)

    with monkeypatch.context() as full:
        full.setattr(shutil, "copytree", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            fork_run(source, tmp_path / "full", parent, parent)
    copies, copytree = iter([removed]), shutil.copytree
    monkeypatch.setattr(shutil, "copytree", lambda *args, **keywords: next(copies, copytree)(*args, **keywords))
    assert fork_run(source, tmp_path / "other", parent, parent) == (1, [])  # its run removes the oldest meanwhile
    checkpoint = latest_checkpoint(tmp_path / "other" / CHECKPOINTS, parent.digest())
    assert checkpoint and checkpoint.progress == {"totals": {"rollouts": 1}, "num_events": 0}


def test_tensors_are_written_as_safetensors_reads_them():
    weights = {"odd": torch.tensor([True, False, True]), "number": torch.tensor(3), "turned": torch.randn(2, 3).T,
               "half": torch.randn(3, 5).bfloat16(), "none": torch.zeros(0, 4)}  # fmt: skip
    stream = io.BytesIO()
    write_safetensors(weights, stream)
    assert_same_weights(weights, load(stream.getvalue()))


def test_one_checkpoint_is_written_at_a_time_and_its_error_is_raised_by_whatever_asks_next():
    writer, done = Writer(), []

    def fail(_):
        done.append(len(done))
        raise OSError(28, "No space left on device")

    writer.begin(lambda: None, lambda _: done.append(len(done)))
    writer.begin(lambda: None, fail)  # after the end of the first
    with pytest.raises(OSError, match="No space left"):
        writer.begin(lambda: None, lambda _: done.append(9))
    writer.check(wait=True)  # it is told once
    writer.begin(lambda: fail(None), lambda _: done.append(9))
    assert writer.copied.wait(60)  # a copy that fails holds nobody up
    with pytest.raises(OSError, match="No space left"):
        writer.check(wait=True)
    assert done == [0, 1, 2]


def test_a_writer_waits_for_the_checkpoint_before_and_a_run_for_no_more_than_the_copy(monkeypatch):
    writer, done, may_end = Writer(), [], threading.Event()

    def write(copies):
        may_end.wait(60)  # only if the run waits for it, which it must not
        done.append(copies)

    writer.begin(lambda: "copies", write)
    assert writer.copied.wait(60) and not done
    assert (writer._thread.name, writer._thread.daemon) == ("checkpoint", True)  # it holds up no end of the process
    monkeypatch.setattr(writer._thread, "join", lambda join=writer._thread.join: (may_end.set(), join()))
    writer.check()  # waits for nothing
    assert not done
    writer.begin(lambda: done.append("copied"), lambda _: None)  # lets the first one end by waiting for it
    writer.check(wait=True)
    assert done == ["copies", "copied"]


def test_a_gpus_checkpoint_is_copied_on_a_stream_of_its_own_after_the_work_that_is_under_way(monkeypatch):
    told = []

    class Stream(str):
        def wait_stream(self, other):
            told.append(f"{self} waits for {other}")

        def synchronize(self):
            told.append(f"waited for {self}")

    class OnGpu(torch.Tensor):
        is_cuda = True

        def to(self, device, *, copy, non_blocking):
            told.append(f"{device} on {current[0]}, {copy=}, {non_blocking=}")  # which makes torch pin the memory
            return torch.zeros(3)

    @contextmanager
    def on(stream):
        current.insert(0, stream)
        yield
        del current[0]

    current = [Stream("the run's")]
    fakes = {"is_initialized": lambda: True, "Stream": lambda: Stream("its own"), "stream": on,
             "current_stream": lambda: current[0]}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    writer, weights = Writer(), {"weight": torch.ones(3).as_subclass(OnGpu), "count": torch.ones(1)}
    writer.begin(lambda: copied(weights), lambda copies: told.append([int(one.sum()) for one in copies.values()]))
    writer.check(wait=True)
    copy = "cpu on its own, copy=True, non_blocking=True"
    assert told == ["its own waits for the run's", copy, "waited for its own", [0, 1]]


@pytest.mark.parametrize("changes", [{}, {"staleness": 1}])
def test_a_checkpoint_that_is_copied_while_the_run_samples_has_the_state_before_the_next_update(
    tmp_path, changes, monkeypatch
):
    log, order, begun, copier = MemoryLog(), [], threading.Event(), []
    varied = {"repetition": {"weight": 1.0, "ngram": 1}}  # a reward that differs between completions of a weak policy
    run, _ = prepare(make_spec(rollouts_per_step=16, rewards=varied, **changes), tmp_path, log, tmp_path, lambda: False)
    prompts = run.spec.task.prompts("train")
    train_step(run, prompts, 0)
    begin_step = run.learner.begin_step
    policy, moments = deepcopy([run.learner.policy.state_dict(), run.learner.state()["policy"]["state"]])

    def slowly(tree, **how):
        copier.append(threading.current_thread())
        if begun.wait(0.2):  # without the wait for the copies an update would begin now
            order.append("too late")
        order.append("copied")
        return copied(tree, **how)

    def noted_step(step):
        begun.set()
        order.append("changes")
        return begin_step(step)

    run.learner.begin_step = noted_step
    monkeypatch.setattr(state, "copied", slowly)
    run.save(1)
    train_step(run, prompts, 1)
    run.close()
    assert order == ["copied", "copied", "changes"]  # weights, moments
    assert threading.current_thread() not in copier
    saved = latest_checkpoint(tmp_path / CHECKPOINTS, run.spec.digest())
    assert_same_weights(policy, saved.policy_weights(run.learner.policy))
    for place, own in saved.learner_state()["policy"]["state"].items():
        assert_same_weights(moments[place], own)
    assert not torch.equal(policy["lm_head.weight"], run.learner.policy.state_dict()["lm_head.weight"])


def test_a_process_that_does_not_read_gets_a_models_shape_its_ties_and_its_buffers():
    policy = tiny_model(0)
    empty = without_storage(policy)
    assert all(p.is_meta for p in empty.parameters()) and empty.lm_head.weight is empty.model.embed_tokens.weight
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in policy.named_parameters()}
    assert_same_weights(dict(policy.named_buffers()), dict(empty.named_buffers()))
    tree = without_storage({"moments": [{"step": torch.tensor(3.0), "mean": torch.ones(2)}]})["moments"][0]
    assert tree["step"] == 3 and tree["mean"].is_meta
