"""No file that a user points Cohort at runs as code: models, tokenizers, templates, data and checkpoints."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cohort.harness.policy.model import check_model, load_policy, load_tokenizer, save_model
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.run.checkpoint import Snapshot, latest_checkpoint, save_checkpoint
from cohort.tasks.gsm8k import GSM8K


class Payload:
    """An object whose unpickling makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path) -> Path:
    """A place that foreign code would make."""
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path) -> Path:
    save_model(tmp_path / "model", tiny_model(0), tiny_tokenizer())
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.attack("Code in a model folder")
def test_python_that_a_model_folder_names_does_not_run(model, mark):
    (model / "foreign.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    names = {"AutoConfig": "foreign.C", "AutoModelForCausalLM": "foreign.M", "AutoTokenizer": ["foreign.T", None]}
    change(model / "config.json", auto_map=names)
    change(model / "tokenizer_config.json", auto_map=names)
    load_tokenizer(str(model))
    load_policy(str(model), seed=0)
    assert not mark.exists()


@pytest.mark.attack("Code in a model folder")
def test_pickled_weights_are_refused(model, mark):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ValueError, match=r"has no \*\.safetensors weights; save it there"):
        check_model(str(model))
    with pytest.raises(OSError, match="safetensors"):
        load_policy(str(model), seed=0)
    assert not mark.exists()


@pytest.mark.attack("Code in a model folder")
def test_a_chat_template_reaches_nothing_but_its_messages(model, mark):
    tokenizer = load_tokenizer(str(model))
    for words in (
        "{{ cycler.__init__.__globals__.os.mkdir(%r) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}%.0s",
        "{{ messages.append(%r) }}",
    ):
        tokenizer.chat_template = words % str(mark)
        with pytest.raises(ValueError, match="SecurityError"):
            TextCodec(tokenizer)
    assert not mark.exists()


@pytest.mark.attack("Code in a data folder")
def test_a_loading_script_beside_the_data_does_not_run(tmp_path, mark):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    row = {"question": "What is 1+1?", "answer": "It is 2.\n#### 2"}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    assert [prompt.gold for prompt in GSM8K(path=str(folder)).prompts("test")] == ["2"]
    assert not mark.exists()


@pytest.mark.attack("Code in a checkpoint")
def test_a_checkpoint_with_an_object_in_it_does_not_build_it(tmp_path, mark):
    """Its hashes fit: they tell damage, not intent."""
    state = {"weights": Payload(mark)}
    facts = {"spec_digest": "abc", "inputs": {}, "progress": {"num_events": 0}}
    save_checkpoint(tmp_path / "checkpoints", Snapshot(1, tiny_model(0), tiny_tokenizer(), state, facts), keep=1)
    checkpoint = latest_checkpoint(tmp_path / "checkpoints", "abc")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        checkpoint.learner_state()
    assert not mark.exists()
    torch.load(checkpoint.folder / "learner.pt", weights_only=False)
    assert mark.exists()  # the payload is one
