"""What a policy reads and where its completions end: chat templates, good and hostile, and plain text."""

import pytest
import torch
from chats import SHORT, chat_folder, chat_model, chat_tokenizer
from cohort.harness.checks.preflight import check_runs
from cohort.harness.data import Demonstration, Prompt, PromptFormat, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.sources import cold_start_key
from cohort.harness.policy.text import TextCodec, codec_of, load_codec
from cohort.harness.policy.tiny import tiny_tokenizer
from cohort.harness.run.cold_start import fit_demonstrations, start_policy
from cohort.harness.run.grading import grade
from cohort.harness.run.loop import train
from cohort.harness.settings.run import ColdStart
from factories import make_spec
from fakes import MemoryLog
from tokenizers.processors import TemplateProcessing


def shown(tokenizer, text="1+1=", **settings):
    codec = TextCodec(tokenizer, PromptFormat(**settings))
    return codec.decode(codec.encode(text))


def test_a_prompt_is_a_chat_where_there_is_a_template_and_plain_where_not_or_where_told():
    asked = "<|im_start|>user:1+1=<|im_end|><|im_start|>assistant:"
    assert shown(chat_tokenizer()) == shown(chat_tokenizer(), format="chat") == asked
    assert shown(chat_tokenizer(), format="plain") == "1+1="
    assert shown(tiny_tokenizer()) == "1+1="


def test_a_system_message_and_arguments_reach_the_template():
    template = SHORT + "{% if enable_thinking is false %}<|im_start|>{{ depth + 1 }}{% endif %}"
    arguments = {"enable_thinking": False, "depth": 2, "share": 0.5, "word": "high"}
    assert repr(make_spec(prompt={"template_arguments": arguments}).prompt.template_arguments) == repr(arguments)
    text = shown(chat_tokenizer(template), system="Be brief.", template_arguments=arguments)
    assert text == "<|im_start|>system:Be brief.<|im_end|><|im_start|>user:1+1=<|im_end|><|im_start|>3"


ASKED = "Question: 1+1?\nReason step by step; end with #### and the number."


@pytest.mark.parametrize(
    ("task", "text", "asked"),
    [
        ({"name": "arithmetic"}, "7-1=", "Compute 7-1. End with #### and the number."),
        ({"name": "arithmetic", "answer_format": "boxed"}, "7-1=", "Compute 7-1. End with the number in \\boxed{}."),
        ({"name": "gsm8k", "path": "x"}, f"{ASKED}\nAnswer:\n", ASKED.removeprefix("Question: ")),
        ({"name": "gsm8k", "path": "x", "shots": 1}, f"{ASKED}\nAnswer:\n2\n\n{ASKED}\nAnswer:\n", None),
        ({"name": "gsm8k", "path": "x", "template": "Q: {question}\nA:"}, "Q: 1+1?\nA:", None),
    ],
)
def test_a_chat_is_asked_in_words_and_a_plain_prompt_as_ever(task, text, asked, monkeypatch):
    monkeypatch.setattr("cohort.harness.policy.text.load_tokenizer", lambda name: chat_tokenizer())
    asked, codecs = asked or text, {}
    for form in ("chat", "plain"):
        changes = {"task": task, "prompt": {"format": form}, "evaluation": {"tests": ["math500", "arithmetic"]}}
        codecs[form] = codec_of(make_spec(**changes))
    whole = TextCodec(chat_tokenizer())
    assert codecs["chat"].in_words(text) == asked and codecs["chat"].encode(text) == whole.encode(asked)
    assert codecs["plain"].decode(codecs["plain"].encode(text)) == shown(chat_tokenizer(), text, format="plain")


@pytest.mark.parametrize("wish", [{"format": "chat"}, {"system": ""}, {"template_arguments": {"deep": True}}])
def test_a_model_without_template_is_refused_before_anything_loads(wish, tmp_path):
    with pytest.raises(ValueError, match="need a chat template, which the tokenizer of 'tiny' lacks; leave them out"):
        check_runs([make_spec(prompt=wish)], tmp_path)
    with pytest.raises(ValueError, match="need a chat template"):
        train(make_spec(prompt=wish), tmp_path, MemoryLog(), cache=tmp_path)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "strftime_now"])
def test_an_argument_that_no_template_would_get_is_refused(name):
    with pytest.raises(ValueError, match=f"must be names that are free for a template, got {name}"):
        shown(chat_tokenizer(), template_arguments={name: "x"})


def test_the_date_of_a_template_is_the_same_every_day_and_the_beginning_of_a_sequence_is_not_doubled():
    template = "{{ strftime_now('%d %b %Y') }}" + SHORT
    assert shown(chat_tokenizer(template)) == "26 Jul 2024<|im_start|>user:1+1=<|im_end|>"
    tokenizer = chat_tokenizer("{{ bos_token }}" + SHORT)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begun = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begun
    assert shown(tokenizer) == "<s><|im_start|>user:1+1=<|im_end|>"
    assert shown(tokenizer, format="plain") == "<s>1+1="
    assert shown(tokenizer, "<s>1+1=", format="plain") == "<s>1+1="


@pytest.mark.parametrize("form", ["chat", "plain"])
def test_the_end_of_turn_ends_a_completion_of_every_prompt(form):
    tokenizer = chat_tokenizer()
    codec = TextCodec(tokenizer, PromptFormat(format=form))
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert codec.end_ids() == ends
    assert codec.encode_completion("2")[-1] == {"chat": ends[1], "plain": ends[0]}[form]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% for m in messages %}Q:{{ m.content }}~{% endfor %}"]
)
def test_a_template_without_an_end_of_turn_leaves_the_end_of_sequence(template):
    codec = TextCodec(chat_tokenizer(template))  # the tokenizer writes ~ as any character
    assert codec.end_ids() == [codec.tokenizer.eos_token_id]
    assert codec.encode_completion("2")[-1] == codec.tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize(("form", "special"), [("chat", True), ("chat", False), ("plain", True)])
def test_a_grader_never_reads_past_the_end_of_turn(form, special):
    tokenizer = chat_tokenizer(special=special)
    policy, codec = chat_model(tokenizer), TextCodec(tokenizer, PromptFormat(format=form))
    run_on = "#### 2<|im_end|><|im_start|>user:2+1=<|im_end|><|im_start|>assistant:#### 3"
    fit_demonstrations(policy, codec, [Demonstration("1+1=", run_on)], ColdStart(steps=25), device=torch.device("cpu"))
    prompt, sampling = Prompt("p", "1+1=", "2"), Sampling(temperature=0, max_tokens=80)
    endless = TransformersEngine(TransformersEngine.Settings(), policy, codec)
    endless.end_ids = []
    (group,) = endless.generate([prompt], 1, sampling, seed=0, step=0)
    assert "#### 3" in group.rollouts[0].text  # the policy would run on
    engine = TransformersEngine(TransformersEngine.Settings(), policy, codec)
    (group,) = engine.generate([prompt], 1, sampling, seed=0, step=0)
    assert (group.rollouts[0].text, group.rollouts[0].finish_reason) == ("#### 2", "stop")
    assert group.rollouts[0].token_ids[-1] == codec.turn_end
    (graded,) = grade(make_spec().task, [group], 80)
    assert (graded.answers, graded.correct) == (("2",), (True,))


def test_prompt_settings_are_part_of_the_cold_start(tmp_path):
    model = chat_folder(tmp_path / "model")
    settings = [{}, {"format": "plain"}, {"system": "Be brief."}, {"template_arguments": {"deep": True}}]
    assert len({cold_start_key(make_spec(model=model, prompt=prompt)) for prompt in settings}) == len(settings)


HOSTILE = {
    "code": "{{ cycler.__init__.__globals__.os.mkdir('x') }}", "a name that is not there": "{{ nothing.deeper }}",
    "no template": "{% for m in messages %}", "a refusal": "{{ raise_exception('not with me\nor you') }}",
    "a refused system message": "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + SHORT,
    "arithmetic": "{{ 1 / 0 }}", "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a wrong type": "{{ messages + 1 }}", "an answer": "{% if messages|length > 2 %}{{ 1 / 0 }}{% endif %}" + SHORT,
    "nothing said": "Hello.", "no system message": "{{ messages[-1].content }}",
    "several": {"one": SHORT, "other": SHORT},
}  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.attack("A hostile or broken chat template")
def test_a_template_that_cannot_be_used_is_one_error_before_weights_load(template, tmp_path):
    model = chat_folder(tmp_path / "model", template)
    spec = make_spec(model=model, prompt={"system": "Be brief."}, steps=1, cold_start={"steps": 1})
    message = (
        rf"the chat template of '{model}' (fails \(\w+: .+\)|leaves out .+); correct it or set prompt\.format=plain$"
    )
    with pytest.raises(ValueError, match=message) as refused:
        check_runs([spec], tmp_path)
    assert "\n" not in str(refused.value)
    for file in ("model.safetensors", "manifest.json"):
        (tmp_path / "model" / file).unlink()  # nobody reads the weights
    for use in (lambda: train(spec, tmp_path, MemoryLog(), cache=tmp_path), lambda: start_policy(spec, tmp_path)):
        with pytest.raises(ValueError, match=message):
            use()
    plain = load_codec(model, PromptFormat(format="plain"))
    assert plain.decode(plain.encode("1+1=")) == "1+1="
