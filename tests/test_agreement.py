"""Before the first step engine and learner give the model's own log-probs, or the run ends; lengths that end refuse."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from architectures import PROMPTS, build_config, build_model, small_run
from cohort.harness.checks.preflight import check_length
from cohort.harness.data import InvalidRun
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.forward import backbone, keeps_keys_and_values
from cohort.harness.policy.library import lean_passes, missing
from cohort.harness.policy.model import length_limit
from cohort.harness.policy.tiny import tiny_config, tiny_model, tiny_tokenizer
from cohort.harness.run.guards.agreement import check_agreement
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from factories import FEW, make_spec
from fakes import MemoryLog, changed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class EngineThatIsOff(TransformersEngine):
    """States log-probs of a policy with 0.01 added to its weights."""

    def __init__(self, settings, policy, codec):
        super().__init__(settings, changed(tiny_model(0), lambda weights: weights + 0.01), codec)


class LearnerThatIsOff(Learner):
    """Adds `size` nats to every token, with prompts shared or with prompts read anew."""

    off_if_shared: bool
    size = 0.01

    def logprobs(self, model, batch):
        off = self.size if self.shares_prompts == self.off_if_shared else 0.0
        return super().logprobs(model, batch) + off * batch.completion_mask_BT


def save(folder, name, **changes):
    """A model folder with the tokenizer of `tiny`; without weights."""
    build_config(name, vocab_size=len(tiny_tokenizer()), **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def kept_and_gradients(model, context, autocast):
    """(bytes that a pass keeps for its gradients, operations of its products and of theirs, the gradients)."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept.update({} if storage.data_ptr() in own else {storage.data_ptr(): storage.nbytes()})
        return tensor

    model.zero_grad()
    tokens = torch.arange(2, 62).view(3, 20)
    with FlopCounterMode(display=False) as products, torch.autocast("cpu", enabled=False):
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
            states = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
        states.float().square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(kept.values()), products.get_total_flops(), gradients


@pytest.mark.parametrize(("name", "share"), [
    ("llama", 0.7), ("qwen3", 0.65), ("gemma2", 0.75), ("granite", 0.7), ("deepseek_v3", 0.85), ("phi3/longrope", 0.9),
    ("mixtral", 0.95), ("gpt2", 1),
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_lean_passes_keep_less_for_the_same_gradients_and_multiply_no_matrices_again(name, share, autocast):
    model = build_model(name)
    before, operations, expected = kept_and_gradients(model, nullcontext(), autocast)
    after, again, found = kept_and_gradients(model, lean_passes(model), autocast)
    assert after <= share * before
    assert again == operations
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    assert not any("forward" in vars(part) for part in model.modules())


class Made(TorchDispatchMode):
    """Notes the shapes of what operations return in new memory."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.shapes = {x.data_ptr() for x in known}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.data_ptr() not in self.known:
            self.shapes.add(found.shape)
        return found


@pytest.mark.parametrize("padding", [None, 3])
def test_the_gradient_of_an_embedding_is_added_where_rows_were_read_and_none_of_all_rows_is_made(padding, monkeypatch):
    monkeypatch.setattr("cohort.harness.policy.library.LARGE", 1)
    model, tokens = build_model("llama"), torch.tensor([[5, 3, 5, 7], [3, 5, 9, 9]])
    layer, found = model.get_input_embeddings(), []
    layer.padding_idx = padding
    for context in (nullcontext(), lean_passes(model)):
        layer.weight.grad = torch.arange(float(layer.weight.numel())).view_as(layer.weight) / 1000
        with context:
            states = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
        with Made(layer.weight, layer.weight.grad) as made:
            states.square().sum().backward()
        found.append((layer.weight.grad, layer.weight.shape in made.shapes))
    (expected, makes), (gradient, makes_too) = found
    assert torch.equal(gradient, expected) and gradient.abs().max() > 1
    assert makes and not makes_too
    for name, value in (("max_norm", 0.1), ("scale_grad_by_freq", True)):
        with monkeypatch.context() as unlike:
            unlike.setattr(layer, name, value)
            with lean_passes(model):
                assert "forward" not in vars(layer)  # but torch's own


def small_spec(**changes):
    return make_spec(**{**FEW, "steps": 2, "device": "cpu", **changes})


@pytest.mark.parametrize("changes", [
    {}, {"lora": {"rank": 4}}, {"gradient_checkpointing": True}, {"sampling": {"max_tokens": 4, "temperature": 0}},
    {"autocast": True}, {"sampling": {"top_p": 0.5, "stop": ["1"]}},
])  # fmt: skip
def test_a_sound_run_starts_and_no_random_state_is_touched(changes):
    run, noise, modes = small_run(tiny_model(0), **changes), [], []
    sample, logprobs = run.engine.sample, run.learner.logprobs
    run.learner.logprobs = lambda policy, batch: modes.append(policy.training) or logprobs(policy, batch)
    if "gradient_checkpointing" in changes:
        run.learner.policy.eval().gradient_checkpointing_enable()
    run.engine.sample = lambda *args, **keywords: noise.append(keywords) or sample(*args, **keywords)
    before = torch.random.get_rng_state()
    (difference,) = check_agreement(run, PROMPTS, 1).values()
    assert difference < (1.0 if "autocast" in changes else 1e-4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert run.learner.shares_prompts
    assert modes == ["gradient_checkpointing" in changes, False]  # rows read whole as in an update, which recomputes
    assert not run.learner.policy.training
    (call,) = noise
    assert call["seed"] == run.spec.seed and call["step"] >= 2**32  # of no step of a run
    assert call["sampling"].max_tokens == min(16, run.spec.max_tokens)


@pytest.mark.parametrize("size", [0.01, -0.01, float("nan")])
def test_a_learner_that_computes_something_else_or_no_numbers_ends_the_run(size):
    run = small_run(tiny_model(0))
    run.learner = LearnerThatIsOff(run.spec, run.learner.policy)
    run.learner.off_if_shared, run.learner.size = False, size
    with pytest.raises(InvalidRun, match=rf"the learner and the model's own forward pass differ by {abs(size)} nats"):
        check_agreement(run, PROMPTS, 0)


@pytest.mark.parametrize("size", [0.01, -0.01])
def test_shared_prompts_that_alone_are_off_are_given_up(size, caplog):
    run = small_run(tiny_model(0))
    run.learner = LearnerThatIsOff(run.spec, run.learner.policy)
    run.learner.off_if_shared, run.learner.size = True, size
    assert check_agreement(run, PROMPTS, 0)["mismatch/at_start"] < 1e-4
    assert not run.learner.shares_prompts
    assert "sharing them is 0.01 nats off" in caplog.text


def test_a_run_says_once_that_a_pass_which_takes_no_cache_is_slow_and_what_the_library_lacks(caplog, monkeypatch):
    model = build_model("llama")
    assert keeps_keys_and_values(model) and not missing()
    check_agreement(small_run(model), PROMPTS, 0)
    assert not caplog.records
    forward = model.forward
    model.forward = lambda input_ids, use_cache=False: forward(input_ids=input_ids, use_cache=use_cache)
    monkeypatch.delattr("transformers.modeling_layers.GradientCheckpointingLayer._can_checkpoint_with_cache")
    check_agreement(small_run(model), PROMPTS, 0)
    engine, shared, lacking = caplog.messages
    assert "reads the whole row again for every token of a llama" in engine
    assert shared.endswith("which is slower: a llama cannot share them")
    assert "lacks GradientCheckpointingLayer._can_checkpoint_with_cache, so" in lacking


def test_an_engine_may_differ_by_the_rounding_of_the_coarser_precision_unless_its_logprobs_are_exact(monkeypatch):
    run = small_run(tiny_model(0))
    sample = run.engine.sample

    def off(*args, **keywords):
        first, second, *others = sample(*args, **keywords)  # two completions each
        head, last = second.rollouts
        logprobs = [x - 0.05 * (place == 2) for place, x in enumerate(last.logprobs)]
        return [first, replace(second, rollouts=(head, replace(last, logprobs=tuple(logprobs)))), *others]

    monkeypatch.setattr(run.engine, "sample", off)
    words = (
        r"engine transformers .* differ by 0.05 nats \(at most {}\) .*, on token 2 of completion 3; "
        "use engine=vllm or another model"
    )
    for changes, bound in (({}, "0.0001"), ({"exact_logprobs": False, "precision": None}, "0.001")):
        for name, value in changes.items():
            monkeypatch.setattr(run.engine, name, value)
        with pytest.raises(InvalidRun, match=words.format(bound)):
            check_agreement(run, PROMPTS, 0)
    monkeypatch.setattr(run.engine, "precision", "tf32")
    assert check_agreement(run, PROMPTS, 0)["mismatch/at_start"] == pytest.approx(0.05, abs=1e-4)


def test_a_run_with_an_engine_that_is_off_is_invalid_before_its_first_evaluation(tmp_path, monkeypatch):
    log, spec = MemoryLog(), small_spec()
    monkeypatch.setattr("cohort.harness.run.build.plugins.load", lambda kind, name: EngineThatIsOff)
    result = train(spec, tmp_path / "run", log, cache=tmp_path)
    assert (result.state, log.events) == ("invalid", [])
    words = r"engine transformers and the model's own .* \(at most 0.0001\) before the first step, on token"
    assert re.search(words, str(result.reason))


@pytest.mark.slow
def test_a_model_with_recurrent_states_trains_and_its_slow_sampling_is_said(tmp_path, caplog):
    folder = tmp_path / "mamba"
    save(folder, "mamba")
    build_model("mamba", vocab_size=len(tiny_tokenizer())).save_pretrained(folder)
    log = MemoryLog()
    spec = small_spec(model=str(folder), sampling={"max_tokens": 6}, gates={"stuck_groups": None})
    assert train(spec, tmp_path / "run", log, cache=tmp_path).state == "complete"
    ((step, difference),) = log.history("mismatch/at_start")
    assert step == 0
    assert difference < 1e-4
    assert all(value < 1e-6 for _, value in log.history("mismatch/kl"))
    assert "reads the whole row again for every token of a mamba" in caplog.text


def test_lengths_end_where_angles_change_for_the_whole_text_or_positions_run_out():
    limits = {"llama": None, "llama/yarn": None, "llama/dynamic": 64, "phi3/longrope": 32, "gpt2": 64, "opt": 64,
              "gemma3_text": None, "bloom": None, "mpt": 64, "mamba": None}  # fmt: skip
    assert {name: length_limit(build_config(name)) for name in limits} == limits
    assert length_limit(tiny_config()) is None


def test_a_run_whose_texts_may_outgrow_the_model_is_refused_before_weights_load(tmp_path):
    model = save(tmp_path / "model", "llama/dynamic")
    spec = small_spec(model=model, sampling={"max_tokens": 63})
    with pytest.raises(ValueError, match=r"must fit into .* context limit of 64 tokens, got \d+ \+ 63; lower sampling"):
        train(spec, tmp_path / "run", MemoryLog(), cache=tmp_path)  # the folder has no weights
    check_length(small_spec(model=model, sampling={"max_tokens": 8}))
