"""Training rows against transformers, over the chat templates that TRL ships, and SmolLM2's: the tokens of a row are
those that `apply_chat_template` makes of it, the trained ones its assistant masks, where a template has them."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ductile.orchestrator.commands.sft_data import tokenise
from ductile.tasks.chat_template import ChatTemplate
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer
from tests.nightly import examples

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDS = [
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<turn|>",
        "</s>",
    ),
    *("<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>", "<|eot|>", "<|eom|>"),
    *("<|user|>", "<|observation|>"),
]
"""Tokens with which one template or another ends a turn."""


def shipped():
    """Return TRL's templates. The package is read and not imported: it is installed without what it needs to run."""
    found = find_spec("trl")
    assert found is not None, "make setup installs trl"
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


TEMPLATES = {**shipped(), "smollm2": SMOLLM2}


def small_bpe():
    """Return a tokenizer of bytes and of what is frequent in templates: its tokens may reach across a turn's edges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=ENDS, show_progress=False)
    backend.train_from_iterator(
        ["the weather in Paris is sunny\n\n assistant user system" * 9, *TEMPLATES.values()], trainer
    )
    return backend


BACKEND = small_bpe()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
THEIRS = PreTrainedTokenizerFast(tokenizer_object=BACKEND, **SPECIAL)
EOS = [BACKEND.token_to_id(token) for token in ENDS]


@cache
def tokenizer_of(name):
    """Return ours with that template. To parse all of them takes long: none is, before a test asks for it."""
    return Tokenizer(THEIRS.backend_tokenizer, SPECIAL, EOS, ChatTemplate(TEMPLATES[name]))


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def call(**arguments):
    return {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": arguments}}


def result(text):
    return {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": text}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be short."}
THOUGHT = "<think>\neasy\n</think>\n\n4"

ROWS = {
    "plain": {"messages": [user("hi there"), assistant("Yo, man")]},
    "system": {"messages": [SYSTEM, user("hi there"), assistant("Yo, man")]},
    "several turns": {
        "messages": [user("a"), assistant("uno"), user("b"), assistant("dos"), user("c"), assistant("3")]
    },
    "thinking": {"messages": [user("2+2?"), assistant("4", reasoning_content="easy")]},
    "thinking, as gpt-oss": {"messages": [user("2+2?"), assistant("4", thinking="easy")]},
    "thinking in the content": {"messages": [user("2+2?"), assistant(THOUGHT), user("3+1?"), assistant(THOUGHT)]},
    "tools": {
        "messages": [
            user("Paris?"),
            assistant("", tool_calls=[call(city="Paris")]),
            result("sunny"),
            assistant("Sun."),
        ],
        "tools": [TOOL],
    },
    "tools that are not called": {"messages": [user("hi"), assistant("Yo")], "tools": [TOOL]},
    "a call at the end": {
        "messages": [user("Paris?"), assistant("", tool_calls=[call(city="Paris")])],
        "tools": [TOOL],
    },
    "words beside a call": {
        "messages": [SYSTEM, user("Paris?"), assistant("Let me see.", tool_calls=[call(city="Paris", days=3)])],
        "tools": [TOOL],
    },
    "ends with the user": {"messages": [user("a"), assistant("uno"), user("thanks")]},
}


def compare(name, row):
    """Compare a row's tokens with transformers'; return whether both have some."""
    template, where = TEMPLATES[name], "rows.jsonl:1"
    marks = re.search(r"\{%-?\s*generation", template) is not None
    try:
        theirs = THEIRS.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marks,
        )
    except Exception:  # whatever a template raises
        with pytest.raises(TaskError, match=rf"^{where}: "):
            tokenise(where, row, tokenizer_of(name))
        return False
    try:
        ours = tokenise(where, row, tokenizer_of(name))
    except TaskError as error:
        assert_left_out(str(error).removeprefix(f"{where}: the chat template leaves out "), row, template)
        return False
    assert ours.ids == theirs["input_ids"]
    if marks:
        assert ours.trained[1:] == list(map(bool, theirs["assistant_masks"][1:]))
    return True


def assert_left_out(sentence, row, template):
    """Assert that transformers does not render what the sentence says: another word there changes nothing."""
    found = re.match(r"(?:the )?(arguments of tool call|tool call|tool|thoughts|\w+)", sentence)
    place = re.search(r"of message (\d+)", sentence)
    part, messages, tools, variants = found[1], [dict(message) for message in row["messages"]], row.get("tools"), [[]]
    if part == "tool":
        assert tools
        tools = [{**TOOL, "function": {**TOOL["function"], "name": "qwertz"}}]
    else:
        message = messages[int(place[1]) - 1]
        if "call" in part:
            function = {"name": "weather", "arguments": {"qwertz": "qwertz"}}
            other = {**call(), "function": function if "arg" in part else {"name": "qwertz", "arguments": {}}}
            calls = message["tool_calls"]
            variants = [[*calls[:n], other, *calls[n + 1 :]] for n in range(len(calls))]
        else:
            variants = [message.get("tool_calls", [])]
            if part == "thoughts":
                message["content"] = message["content"].replace("</think>", "qwertz</think>")
            else:
                message[part] += "qwertz"
    texts = []
    for variant in variants:
        if variant:
            message["tool_calls"] = variant
        texts.append(THEIRS.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False))
    assert any("qwertz" not in text for text in texts)


def trained_text(name, row):
    tokens = tokenise("rows.jsonl:1", row, tokenizer_of(name))
    return [token for token, trained in zip(tokens.ids, tokens.trained, strict=True) if trained]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_are_rendered_as_by_transformers(name):
    compared = [case for case, row in ROWS.items() if compare(name, row)]
    if name.startswith(("idefics3", "llava_next", "smolvlm")):
        assert not compared, "templates of pictures want contents in parts"
    else:
        assert {"plain", "several turns"} <= {*compared}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.startswith(("idefics3", "llava", "smolvlm"))])
def test_the_assistant_s_words_are_trained_and_nobody_else_s(name):
    row = {"messages": [user("frage eins"), assistant("antwort uno"), user("frage zwei"), assistant("antwort dos")]}
    text = tokenizer_of(name).decode(trained_text(name, row), skip_special_tokens=False)
    assert re.search("antwort uno.*antwort dos", text, re.DOTALL)
    assert not re.search("frage|(?<!to=)user\n", text)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith(("gemma4", "diffusion_gemma"))])
def test_answers_of_tools_within_a_turn_are_not_trained(name):
    """Gemma 4's templates write a message's content behind the answers to its calls."""
    calls = assistant("Let me", tool_calls=[call(city="Rome")])
    row = {"messages": [user("rain?"), calls, result("sunny"), assistant("No.")], "tools": [TOOL]}
    if not compare(name, row):
        return
    text = tokenizer_of(name).decode(trained_text(name, row), skip_special_tokens=False)
    assert re.search("Rome.*Let me.*No\\.", text, re.DOTALL)
    assert "sunny" not in text


def test_words_that_begin_as_the_generation_prompt_ends_are_trained_whole():
    """DeepSeek-R1's prompt ends with `<think>`; a completion may begin with another tag."""
    row = {"messages": [user("a"), assistant("<answer>4</answer>")]}
    ours = tokenizer_of("deepseek_r1_distill")
    assert ours.decode(trained_text("deepseek_r1_distill", row), skip_special_tokens=False).startswith("<answer>4")


def test_the_end_of_an_earlier_turn_is_trained_whole():
    """gpt-oss ends a turn that others follow with a token that ends no generation."""
    row = {"messages": [user("a"), assistant("uno", thinking="hm"), user("b"), assistant("dos")]}
    eos = [token for token in EOS if token != BACKEND.token_to_id("<|end|>")]
    ours = Tokenizer(THEIRS.backend_tokenizer, SPECIAL, eos, ChatTemplate(TEMPLATES["gptoss"]))
    tokens = tokenise("rows.jsonl:1", row, ours)
    trained = [token for token, is_trained in zip(tokens.ids, tokens.trained, strict=True) if is_trained]
    text = ours.decode(trained, skip_special_tokens=False)
    assert "uno<|end|>" in text
    assert text.endswith("dos<|return|>")


def masked(trained):
    """Return the places of the tokens that are trained."""
    return {place for place, is_trained in enumerate(trained) if is_trained}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if f"{name}_training" in TEMPLATES])
def test_a_template_without_marks_trains_what_its_twin_marks(name):
    """TRL's twins mark a header or a line end besides; words and the token that ends a turn are in both. Gemma's calls
    end with the token that opens their answer, which its twin does not mark."""
    for row in ROWS.values():
        if "gemma" in name and "tool_calls" in str(row):
            continue
        try:
            ours, twin = (tokenise("rows.jsonl:1", row, tokenizer_of(each)) for each in (name, f"{name}_training"))
        except TaskError:
            continue
        if ours.ids == twin.ids:
            assert masked(ours.trained) <= masked(twin.trained)


words = st.one_of(
    st.sampled_from(
        [
            "hi",
            "4",
            "It is sunny.",
            " two\nlines \n",
            THOUGHT,
            "<think>",
            "a</think>b",
            "ü 日本 🙂",
            "{{ x }}",
            "assistant\n",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1"), max_size=12),
)
arguments = st.dictionaries(st.sampled_from(["city", "days", "a b"]), st.one_of(words, st.integers(), st.booleans()))


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    with_tools = draw(st.integers(0, 3)) == 0
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(words)))
        if with_tools and draw(st.booleans()):
            calls = [call(**draw(arguments)) for _ in range(draw(st.integers(1, 2)))]
            messages.append(assistant(draw(st.one_of(st.just(""), words)), tool_calls=calls))
            messages += [result(draw(words)) for _ in calls]
        fields = draw(st.sampled_from([(), (), (), ("reasoning_content",), ("thinking",), ("reasoning",)]))
        messages.append(assistant(draw(words), **{name: draw(words) for name in fields}))
    return {"messages": messages, **({"tools": [TOOL]} if with_tools else {})}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), deadline=None)
@given(row=conversations())
def test_random_conversations(name, row):
    compare(name, row)
