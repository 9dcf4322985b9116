"""The warm start learns its demonstrations and is computed once for all who want the same one."""

import json
import logging
import math
import shutil
from unittest.mock import Mock

import pytest
import torch
from chats import chat_folder
from cohort.harness.data import Demonstration, InvalidRun
from cohort.harness.policy.sources import cold_start_key
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import cold_start
from cohort.harness.run.cold_start import fit_demonstrations, start_policy
from cohort.harness.settings.run import ColdStart
from cohort.tasks.arithmetic import Arithmetic
from factories import make_spec
from fakes import tiny_codec
from filelock import FileLock

SPEC = make_spec(cold_start={"steps": 3})


def test_short_demonstrations_are_not_padded_to_the_longest(monkeypatch):
    widths, codec, own = [], tiny_codec(), cold_start.token_logprobs
    monkeypatch.setattr(cold_start, "token_logprobs", lambda *given: (widths.append(given[1].shape[1]), own(*given))[1])
    # Tokens of prompt and completion, its end included: 2 + 9, 9 + 1, 3 + 2, 1 + 4; neither alone has this order.
    texts = [("=1", "1" * 8), ("1" * 9, ""), ("1" * 3, "1"), ("9", "111")]
    demonstrations = [Demonstration(*one) for one in texts]
    assert [len(codec.encode(p)) + len(codec.encode_completion(c)) for p, c in texts] == [11, 10, 5, 5]
    fit_demonstrations(tiny_model(0), codec, demonstrations, ColdStart(steps=1), device=torch.device("cpu"))
    assert widths == [5, 11]


def test_a_loss_of_the_shorter_half_that_is_not_finite_ends_the_run(monkeypatch):
    own = cold_start.token_logprobs
    lost = lambda *to: ((x := own(*to)[0]).masked_fill(x < 0, -math.inf) if to[1].shape[1] < 8 else own(*to)[0],)  # noqa: E731
    monkeypatch.setattr(cold_start, "token_logprobs", lost)
    demonstrations = [Demonstration("1+1=", "2"), Demonstration("11111+1=", "11112")]
    with pytest.raises(InvalidRun, match=r"loss is inf at step 0; lower cold_start\.learning_rate"):
        fit_demonstrations(tiny_model(0), tiny_codec(), demonstrations, ColdStart(steps=1), device=torch.device("cpu"))


def test_a_step_is_adamws_on_the_clipped_gradient_of_the_mean_over_all_completion_tokens(monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", made := Mock(side_effect=torch.optim.AdamW))
    # 32 are one batch, in whatever order; completions differ in length, so that a mean of rows would be another number
    demonstrations = [Demonstration(f"{a}+1=", "#" * (a % 3) + f"{a + 1}") for a in range(32)]
    policy, plain, codec = tiny_model(0).double(), tiny_model(0).double(), tiny_codec()
    settings, cpu, done = ColdStart(steps=2, learning_rate=0.01), torch.device("cpu"), []
    fit_demonstrations(policy, codec, demonstrations, settings, device=cpu, on_progress=lambda *n: done.append(n))
    assert done == [(1, 2), (2, 2)] and made.call_args.kwargs["fused"]  # faster
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
    for _ in range(2):
        nats = []
        for one in demonstrations:
            prompt, completion = list(codec.encode(one.prompt)), codec.encode_completion(one.completion)
            logits = plain(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            nats.append(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="none"))
        loss = torch.cat(nats).mean()
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0) > 2  # so that the bound matters
        optimizer.step()
    for one, other in zip(policy.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_who_waits_for_the_cold_start_of_another_process_says_so_and_may_stop(tmp_path):
    def stop(phase: str, done: int, total: int) -> None:
        raise InterruptedError(f"{phase} {done} {total}")

    folder = tmp_path / "cold-start" / cold_start_key(SPEC)
    folder.parent.mkdir()
    held = FileLock(folder.with_name(f"{folder.name}.lock"))
    with held, pytest.raises(InterruptedError, match="waiting for the shared cold start 0 0"):
        start_policy(SPEC, tmp_path, stop)


def test_the_key_knows_the_words_in_which_a_chat_model_is_asked(tmp_path, monkeypatch):
    specs = [SPEC, SPEC.model_copy(update={"model": str(chat_folder(tmp_path))})]
    before = [cold_start_key(spec) for spec in specs]
    monkeypatch.setattr(Arithmetic, "in_words", lambda task, text: f"Say {text}")
    assert [cold_start_key(spec) == key for spec, key in zip(specs, before, strict=True)] == [True, False]


def test_the_key_changes_with_what_the_result_depends_on_and_is_shared_by_arms():
    base = cold_start_key(SPEC)
    for changes in ({"cold_start.learning_rate": 1e-3}, {"cold_start.steps": 4}, {"task.max_operands": 4}):
        assert cold_start_key(make_spec(cold_start={"steps": 3}, **changes)) != base
    assert base == cold_start_key(SPEC.model_copy(update={"seed": 5, "rollouts_per_step": 64}))


def test_edited_data_get_a_cold_start_of_their_own(tmp_path):
    rows = [{"question": f"{a}+1=", "answer": f"{a}+1\n#### {a + 1}"} for a in range(30)]
    for split, part in (("train", rows[:25]), ("test", rows[25:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    spec = make_spec(task={"name": "gsm8k", "path": str(tmp_path)}, cold_start={"steps": 1})
    key, text = cold_start_key(spec), (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace('#### 1"', '#### 9"'))
    assert cold_start_key(spec) != key
    (tmp_path / "train.jsonl").write_text(text)
    assert cold_start_key(spec) == key


DAMAGE = {
    "config.json": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "model.safetensors": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "tokenizer.json": lambda file: file.unlink(),
    "manifest.json": lambda file: (file.unlink(), file.mkdir()),
    "adapter_model.safetensors": lambda file: shutil.copy(file.with_name("model.safetensors"), file),  # would be loaded
}


@pytest.mark.slow
@pytest.mark.attack("Torn or altered cold start in the cache")
def test_a_cold_start_that_is_torn_or_altered_in_any_file_is_made_again(tmp_path, caplog, record_property):
    spec = make_spec(cold_start={"steps": 1})
    told = []
    whole = start_policy(spec, tmp_path, lambda *progress: told.append(progress))[0]
    assert told == [("cold start", 1, 1)]
    (folder,) = (path for path in (tmp_path / "cold-start").iterdir() if path.is_dir())
    files = sorted(file.name for file in folder.iterdir())
    for name, damage in DAMAGE.items():
        caplog.clear()
        damage(folder / name)
        with caplog.at_level(logging.WARNING):
            again = start_policy(spec, tmp_path)[0]
        told = f"the cold start in '{folder}' is torn or altered, so it is made again"
        assert [record.getMessage() for record in caplog.records] == [told]
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
        assert sorted(file.name for file in folder.iterdir()) == files
    record_property("tried", len(DAMAGE))
