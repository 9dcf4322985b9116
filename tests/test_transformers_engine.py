"""The transformers engine against a plain loop without cache, and its sampling against the exact distribution."""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohort.harness.base.tensors import pad_left
from cohort.harness.data import Prompt, Sampling
from cohort.harness.engines import _decoding
from cohort.harness.engines._decoding import LibraryDecoder, _draw, uniforms
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy import library
from cohort.harness.policy.library import packed_products
from cohort.harness.policy.tiny import tiny_model
from fakes import tiny_codec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-"])]


def make_engine(seed=0, **settings):
    return TransformersEngine(TransformersEngine.Settings(**settings), tiny_model(seed), tiny_codec())


def test_cached_decoding_equals_a_plain_loop_over_the_whole_prefix():
    engine, sampling = make_engine(), Sampling(max_tokens=10, temperature=0.9)
    groups = engine.generate(PROMPTS, 2, sampling, seed=3, step=5)
    noise = torch.from_numpy(uniforms(3, 5, [p.id for p in PROMPTS], 2, 10)).view(3, 2, 10)
    for i, group in enumerate(groups):
        for k, rollout in enumerate(group.rollouts):
            ids = engine.codec.encode(group.prompt.text)
            for t, (token, logprob) in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
                with torch.no_grad():
                    logits = engine.policy(input_ids=torch.tensor([ids])).logits[:, -1].float()
                chosen, expected = _draw(logits, sampling, noise[i, k, t : t + 1])
                assert chosen.item() == token
                assert logprob == pytest.approx(expected.item(), abs=1e-5)
                ids = [*ids, token]


def test_without_end_tokens_every_completion_reaches_its_limit():
    engine = make_engine()
    with torch.no_grad():
        engine.policy.get_input_embeddings().weight[1] = engine.policy.get_input_embeddings().weight.mean(0) * 40
    engine.end_ids = []
    groups = engine.generate(PROMPTS, 4, Sampling(max_tokens=20), seed=0, step=0)
    assert {len(r.token_ids) for g in groups for r in g.rollouts} == {20}
    assert {r.finish_reason for g in groups for r in g.rollouts} == {"length"}


def test_chunks_of_the_decode_batch_do_not_change_the_rollouts():
    sampling = Sampling(max_tokens=8)
    engine, told = make_engine(), []
    engine.note_tokens = told.append
    whole = engine.generate(PROMPTS, 4, sampling, seed=0, step=0)
    assert sum(told) == sum(len(r.token_ids) - 1 for g in whole for r in g.rollouts)  # all but each row's last
    chunked = make_engine(max_batch_rows=4).generate(PROMPTS, 4, sampling, seed=0, step=0)
    assert [[r.token_ids for r in g.rollouts] for g in whole] == [[r.token_ids for r in g.rollouts] for g in chunked]


def test_draws_from_a_large_vocabulary_are_the_first_tokens_whose_cumulative_probability_exceeds_the_noise():
    logits = 3 * torch.randn(200, 3001, generator=torch.Generator().manual_seed(0))
    noise = torch.from_numpy(np.random.default_rng(0).random(200))
    noise[:2] = torch.tensor([0, 1 - 2**-53])
    cumulative = logits.log_softmax(-1).exp().double().cumsum(-1)
    expected = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0].clamp(max=3000)
    chosen, logprobs = _draw(logits, Sampling(), noise)
    assert chosen.tolist() == expected.tolist()
    assert torch.equal(logprobs, logits.log_softmax(-1)[range(200), expected])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_decoder_writes_keys_in_place_and_reads_shared_ones_without_repeating_them(autocast):
    """Query heads share keys; prompts differ in length, and rows leave."""
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=40, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval()
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [10, 11], [10, 11]]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        decoder = LibraryDecoder(model, 12)
        decoder.prefill(*pad_left([rows[0], rows[2]]))
        decoder.expand(2)
        place = decoder.cache.layers[1].keys.data_ptr()
        for token in (20, 21, 22):
            if token == 22:
                decoder.select(torch.tensor([0, 3]))
                rows = [rows[0], rows[3]]
            rows = [[*row, token + i] for i, row in enumerate(rows)]
            logits = decoder.step(torch.tensor([row[-1] for row in rows]))
        assert decoder.cache.layers[1].keys.data_ptr() == place
        assert decoder.cache.layers[1].keys.dtype == (torch.bfloat16 if autocast else torch.float32)
        assert model.config._attn_implementation == "sdpa"
        for row, found in zip(rows, logits, strict=True):
            expected = model(input_ids=torch.tensor([row])).logits[0, -1].float()
            assert torch.allclose(found, expected, atol=5e-2 if autocast else 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_packed_products_are_the_layers_own_by_copies_of_their_weights(autocast):
    if autocast and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no products in bfloat16: the layers' own are taken")
    layers, given = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 8, bias=False)), torch.randn(5, 24)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = layers(given)
        with packed_products(layers):
            layers[0].weight.zero_()  # nobody reads it here
            torch.testing.assert_close(layers(given), expected)
        torch.testing.assert_close(layers(given), layers[1](layers[0].bias.expand(5, -1)))


class Watch(TorchDispatchMode):
    """Notes the threads of each operation, and what each product of matrices reads."""

    def __init__(self):
        super().__init__()
        self.threads, self.products = defaultdict(set), []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.threads[function._opname].add(torch.get_num_threads())
        self.products += [tuple(given[1].shape)] if function._opname == "bmm" else []
        return function(*given, **(named or {}))


def test_a_step_of_decoding_takes_several_threads_for_products_of_matrices_alone():
    config = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=4, num_key_value_heads=2))
    decoder, before, tokens = LibraryDecoder(model, 8), torch.get_num_threads(), torch.tensor([[5, 6, 7]])
    torch.set_num_threads(2)
    try:
        with torch.no_grad(), packed_products(model):
            decoder.prefill(tokens, torch.ones(1, 3, dtype=torch.bool))
            with Watch() as watch:
                decoder.step(tokens[0, :1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [watch.threads[name] for name in ("bmm", "_linear_pointwise")] == [{2}, {2}]
    assert all(watch.threads[name] == {1} for name in ("mul", "add", "silu", "pow", "_softmax"))


@pytest.mark.parametrize(("dtype", "mask", "capacity", "read"), [
    (torch.bfloat16, None, 8, 8), (torch.bfloat16, "some", 8, 8), (torch.bfloat16, "some", 20, 20),
    (torch.bfloat16, "some", 21, 5), (torch.bfloat16, "added", 8, 5), (torch.float32, "some", 8, 5),
])  # fmt: skip
def test_a_token_attends_with_the_room_that_its_cache_has_for_more_where_products_would_copy_the_keys(
    dtype, mask, capacity, read
):
    noise = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, capacity, 4, generator=noise).to(dtype) for _ in range(2))
    keys[..., 5:, :], values[..., 5:, :] = torch.nan, 0  # of what is not written yet
    query = torch.randn(3, 6, 1, 4, generator=noise).to(dtype)
    known = torch.tensor([[True] * 5, [False, False, True, True, True], [True] * 5])[:, None, None]
    given = {None: None, "some": known, "added": torch.where(known, 0.25, -torch.inf).to(dtype)}[mask]
    expected, _ = library._attend(nn.Module(), query, keys[:, :, :5].clone(), values[:, :, :5].clone(), given)
    with Watch() as watch:
        found, _ = library._attend(nn.Module(), query, keys[:, :, :5], values[:, :, :5], given)
    assert watch.products == [(6, 4, read), (6, read, 4)]
    torch.testing.assert_close(found, expected)
    by_hand = torch.softmax(query.float().view(3, 2, 3, 4) @ keys[:, :, :5].float().transpose(2, 3) / 2
                            + (0 if mask is None else torch.where(known, 0.0, -torch.inf)), -1)  # fmt: skip
    torch.testing.assert_close(found.float().view(3, 2, 3, 4), by_hand @ values[:, :, :5].float(), atol=3e-2, rtol=0)


def test_without_onednn_no_product_is_packed(monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)  # a Mac's torch has none of the operations
    layer = nn.Linear(4, 2)
    with packed_products(layer):
        assert "forward" not in vars(layer)


def test_sampling_packs_the_products_of_models_without_a_path_of_their_own(monkeypatch):
    packed = []
    monkeypatch.setattr(library, "packed_products", lambda model: packed.append(model) or nullcontext())
    config = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for model in (tiny_model(0), LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=4, num_key_value_heads=2))):
        engine = TransformersEngine(TransformersEngine.Settings(), model, tiny_codec())
        engine.generate(PROMPTS, 1, Sampling(max_tokens=2), seed=0, step=0)
    assert packed == [model]


def test_the_beginning_that_all_prompts_share_is_read_once(monkeypatch):
    """Equal samples, whether prompts are read whole or after their common beginning; one is a beginning of another."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=40)).eval()
    engine = TransformersEngine(TransformersEngine.Settings(), model, tiny_codec())
    prompts = [Prompt(f"p{i}", "1+2=3" * 8 + text, "0") for i, text in enumerate(["4", "4+5", "4+5+6=", "7-"])]
    read, found = [], []
    model.register_forward_pre_hook(lambda _, args, named: read.append(named["input_ids"].numel()), with_kwargs=True)
    for least in (121, 120):
        monkeypatch.setattr(_decoding, "SAVED", least)
        found.append(engine.generate(prompts, 3, Sampling(max_tokens=8), seed=0, step=0))
    first = read.index(40)
    assert read[0] == 4 * 46 and read[first + 1] == 4 * 6
    rows, others = ([r for g in groups for r in g.rollouts] for groups in found)
    assert [r.token_ids for r in rows] == [r.token_ids for r in others]
    for row, other in zip(rows, others, strict=True):
        assert row.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    engine.generate([prompts[0]] * 4, 1, Sampling(max_tokens=1), seed=0, step=0)
    assert read[-2:] == [40, 4 * 1]  # of equal prompts all but the last token


def test_draws_follow_the_tempered_distribution_and_keep_to_tokens_that_can_be_drawn():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    noise = torch.from_numpy(np.random.default_rng(0).random(20000))
    chosen, _ = _draw(logits.expand(20000, 3), Sampling(temperature=0.5), noise)
    expected = np.array([0.25, 0.09, 0.04]) / 0.38  # p^(1/T), normalised
    # three standard errors of a proportion of 20000 draws are at most 0.0106
    assert np.bincount(chosen, minlength=3) / 20000 == pytest.approx(expected, abs=0.0106)
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]])).expand(1000, 4)
    assert set(_draw(logits, Sampling(top_p=0.6), noise[:1000])[0].tolist()) == {1, 3}  # 0.5 alone is below 0.6
    assert set(_draw(logits, Sampling(top_p=0.4), noise[:1000])[0].tolist()) == {1}
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])  # without probability
    for value in (0.0, 0.5, 1 - 2**-53):
        assert _draw(logits, Sampling(), torch.tensor([value], dtype=torch.float64))[0].item() == 1
    assert _draw(torch.tensor([[0.0, 2.0, 1.0]]), Sampling(temperature=0), torch.tensor([0.99]))[0].item() == 1


def test_noise_is_uniform_and_every_part_of_its_key_matters_and_nothing_else():
    wide, narrow = uniforms(0, 3, ["a", "b"], 4, 50), uniforms(0, 3, ["b"], 2, 10)
    assert (wide[4:6, :10] == narrow).all()  # whatever the other rows and the length that is asked for
    base = uniforms(0, 0, ["a", "b"], 4, 50)
    assert base.shape == (8, 50)
    values = uniforms(0, 0, [str(i) for i in range(100)], 8, 25).ravel()
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert chi2 < 43.8  # 99.9 % point of chi-squared with 19 degrees of freedom
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.025  # 3.5 / sqrt(20000)
    for key in ((1, 0, ["a", "b"]), (0, 1, ["a", "b"]), (0, 0, ["c", "d"])):
        assert not (base == uniforms(*key, 4, 50)).any()
    assert len(np.unique(base)) == base.size
    assert not (uniforms(1, 0, ["a"], 4, 50) == uniforms(0, 1, ["a"], 4, 50)).any()  # seed and step do not add up


def test_a_stop_text_ends_a_completion_and_stays_in_it():
    engine = make_engine()
    prompts = [Prompt(f"p{i}", f"{i}+1=", "0") for i in range(4)]
    free = engine.generate(prompts, 4, Sampling(max_tokens=20), seed=0, step=0)
    whole = [r for g in free for r in g.rollouts]
    texts = [r.text for r in whole]
    stop = max({text[5:7] for text in texts if len(text) > 8}, key=lambda two: sum(two in text for text in texts))
    stopped = engine.generate(prompts, 4, Sampling(max_tokens=20, stop=(stop, "\0never")), seed=0, step=0)
    reached = 0
    for before, after in zip(whole, (r for g in stopped for r in g.rollouts), strict=True):
        cut = before.text.find(stop)
        if cut < 0:
            assert replace(after, logprobs=before.logprobs) == before
            # Rows that stop leave the batch, and a product over fewer rows may round its last bit otherwise.
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
            continue
        reached += 1
        assert after.text == before.text[: cut + len(stop)]
        assert after.finish_reason == "stop"
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert len(after.logprobs) == len(after.token_ids)
    assert 0 < reached < 16
