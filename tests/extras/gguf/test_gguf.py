"""A GGUF file is a model: converted once, with the values and the prompts that transformers reads in it."""

from pathlib import Path

import gguf
import pytest
import torch
from cohort.harness.base.files import sha256
from cohort.harness.base.inputs import digested
from cohort.harness.data import PromptFormat
from cohort.harness.extras.gguf import models
from cohort.harness.policy.model import check_model, load_policy
from cohort.harness.policy.sources import folder_of, model_sources
from cohort.harness.policy.text import load_codec

MODELS = Path(__file__).parents[3] / "models"  # of `make smollm2`
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *map(str, range(11)), *"+-*=", "\u0120", "\u010a"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
WIDTH, LAYERS, Q8 = 32, 2, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/cohort/models"


@pytest.fixture
def file(tmp_path):
    """A Llama of 2 layers, its matrices quantised to 8 bits."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 64), (writer.add_embedding_length, WIDTH), (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 2), (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4), (writer.add_vocab_size, len(TOKENS)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_token_list, TOKENS), (writer.add_token_merges, ["1 0"]),
        (writer.add_token_types, [1] + [3] * 2 + [1] * (len(TOKENS) - 3)), (writer.add_chat_template, TEMPLATE),
        (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0),
    ):  # fmt: skip
        add(value)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    layer = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
    layer |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_down": (WIDTH, 64)}
    layer |= dict.fromkeys(("ffn_gate", "ffn_up"), (64, WIDTH))
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    draw = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        kind, value = (None, Q8)[len(shape) == 2], torch.randn(shape, generator=draw).numpy()
        value = value if kind is None else gguf.quants.quantize(value, kind)
        writer.add_tensor(f"{name}.weight", value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def check_equal(name, file):
    """The model `name` has the weights, logits and prompts that transformers itself reads in the GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    theirs, ours = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32), load_policy(name, seed=0)
    codec, tokenizer = load_codec(name, PromptFormat()), AutoTokenizer.from_pretrained(**place)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], add_generation_prompt=True)["input_ids"]
    assert codec.encode("1+2=") == tuple(ids)
    with torch.no_grad():
        assert torch.equal(ours(torch.tensor([ids])).logits, theirs.eval()(torch.tensor([ids])).logits)


def test_a_gguf_file_or_a_folder_with_one_is_a_model_that_is_converted_once(file, cache, monkeypatch):
    check_model(str(file))
    check_equal(str(file), file)
    assert digested(model_sources(str(file))) == {f"model {file}": {file.name: sha256(file)}}
    row = gguf.GGUFReader(file).tensors[0]
    embeddings = load_policy(str(file.parent), seed=0).get_input_embeddings().weight  # the folder
    assert torch.equal(embeddings, torch.from_numpy(gguf.quants.dequantize(row.data, row.tensor_type)))
    monkeypatch.setattr(models, "convert", None)  # called again, it would fail
    assert folder_of(str(file)) == folder_of(str(file.parent)) == next(cache.glob("*[!k]"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("none.gguf", None, "got no file there"), ("a.gguf", b"PK", "got another file"), ("", b"GGUF", "one GGUF file"),
     ("a-00001-of-00002.gguf", b"GGUF", "llama-gguf-split"), ("a.gguf", b"GGUF", r"pip install 'cohort-rl\[gguf\]'")],
)  # fmt: skip
def test_a_gguf_that_cannot_be_read_is_refused_with_the_way_on(tmp_path, monkeypatch, name, content, message):
    if content is not None:
        (tmp_path / (name or "b.gguf")).write_bytes(content)
    if not name:
        (tmp_path / "c.gguf").write_bytes(content)
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=message):
        check_model(str(tmp_path / name))


@pytest.mark.slow
@pytest.mark.skipif(
    not (MODELS / "smollm2.gguf").exists(), reason="the model is not here; `make test-real` makes it and runs this"
)
@pytest.mark.parametrize("name", ["smollm2", "smollm2.gguf"])
def test_the_converted_folder_of_smollm2_equals_its_gguf(name):
    check_equal(str(MODELS / name), MODELS / "smollm2.gguf")
