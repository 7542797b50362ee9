"""Calls of tools: what a chat template writes is read back, whole and as it comes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.tasks.chat_template import ChatTemplate
from ductile.tasks.tool_calls import FORMS, CallStream, ToolCall, ToolForm, form_of, split_calls
from tests.tasks.test_templates import shipped

BY_NAME = {form.name: form for form in FORMS}
LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% set f = c.function %}CALL{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ARGUMENTS = "{{ f.arguments | tojson }}"
EACH = "{% for k, v in f.arguments.items() %}EACH{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
TEMPLATES = {
    "JSON in a tag (Hermes, Qwen)": '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": ARGUMENTS}\n</tool_call>',
    "function and parameter tags (Qwen3-Coder)": "<tool_call>\n<function={{ f.name }}>\n"
    + EACH.replace("EACH", "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n")
    + "</function>\n</tool_call>",
    "tags for keys and values (GLM)": "\n<tool_call>{{ f.name }}\n"
    + EACH.replace("EACH", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n")
    + "</tool_call>",
    "invoke tags (MiniMax, DeepSeek-V3.2)": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
    + EACH.replace("EACH", '<parameter name="{{ k }}">' + VALUE + "</parameter>\n")
    + "</invoke>\n</minimax:tool_call>",
    "a list behind [TOOL_CALLS] (Mistral)": '[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": ARGUMENTS, '
    '"id": "{{ c.id }}"}]',
    "names behind [TOOL_CALLS] (Mistral)": "[TOOL_CALLS]{{ f.name }}[ARGS]ARGUMENTS",
    "DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ f.name }}:0<|tool_call_argument_begin|>"
    "ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>",
    "messages to functions (gpt-oss)": " to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "ARGUMENTS<|call|>",
    "calls in Python (LFM2)": "<|tool_call_start|>[{{ f.name }}("
    + EACH.replace("EACH", "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}")
    + ")]<|tool_call_end|>",
    "JSON alone (Llama 3)": '{"name": "{{ f.name }}", "parameters": ARGUMENTS}',
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {}, "at": {}}}},
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(LOOP.replace("CALL", TEMPLATES[name].replace("ARGUMENTS", ARGUMENTS)))


def rendered(name: str, calls: list[ToolCall], content: str = "") -> str:
    """What the template writes for these calls, without the end of the turn."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": "abcdefghi", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ],
    }
    whole = template(name).render(messages=[message], add_generation_prompt=False)
    return whole.removeprefix("<|assistant|>").removesuffix("<|end|>")


def streamed(form: ToolForm, text: str, size: int, thinking: bool = False) -> tuple[str, list[ToolCall]]:
    stream, shown, calls = CallStream(form, [TOOL], thinking), "", list[ToolCall]()
    for start in range(0, len(text), size):
        more, found = stream.push(text[start : start + size], last=start + size >= len(text))
        shown, calls = shown + more, calls + found
    return shown, calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_s_form_is_found_by_a_trial(name: str) -> None:
    def render(messages: Any, add_generation_prompt: bool, **variables: Any) -> str:
        return template(name).render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)

    assert form_of(render) is BY_NAME[name]


TRL = {
    "JSON in a tag (Hermes, Qwen)": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "function and parameter tags (Qwen3-Coder)": "qwen3_5_think qwen3_5_nothink qwen3_8 nemotron_3_nano",
    "tags for keys and values (GLM)": "glm4moe",
    "invoke tags (MiniMax, DeepSeek-V3.2)": "muse_glimmer",
    "DeepSeek": "deepseekv3 deepseek_r1_distill",
    "messages to functions (gpt-oss)": "gptoss",
    "calls in Python (LFM2)": "lfm2_2_5 lfm2_v2",
    "Gemma": "gemma4 gemma4_v5 diffusion_gemma",
    "JSON alone (Llama 3)": "llama3_1 llama3_2",
}
"""Templates that TRL ships, by the form that their models learn."""


@pytest.mark.parametrize(("name", "model"), [(name, model) for name in TRL for model in TRL[name].split()])
def test_the_forms_of_templates_that_models_have(name: str, model: str) -> None:
    shown = ChatTemplate(shipped()[model])

    def render(messages: Any, add_generation_prompt: bool, **variables: Any) -> str:
        given = {"documents": None, "bos_token": "<s>", "eos_token": "</s>", **variables}
        return shown.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)

    assert form_of(render) is BY_NAME[name]


def test_a_template_without_calls_or_of_another_form_has_none() -> None:
    for text in (LOOP.replace("CALL", ""), LOOP.replace("CALL", "<{{ f.name }}>"), "{{ raise_exception('no') }}"):
        shown = ChatTemplate(text)
        assert form_of(lambda m, g, **v: shown.render(messages=m, add_generation_prompt=g, **v)) is None  # noqa: B023


PLAIN = st.text("ab é日\"'{}<>/\\,:", max_size=8)
VALUES = st.recursive(
    st.integers(-9, 9) | st.booleans() | st.none() | PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
)
CALLS = st.builds(
    lambda city, days, at: ToolCall("weather", {"city": city, "days": days, "at": at}),
    PLAIN.filter(lambda text: text.strip("\n") == text),
    st.integers(),
    VALUES.filter(lambda value: not isinstance(value, str)),
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(call=CALLS, size=st.integers(1, 40))
def test_what_a_template_writes_is_read_back_whole_and_streamed(name: str, call: ToolCall, size: int) -> None:
    text = rendered(name, [call])
    assert split_calls(BY_NAME[name], text, [TOOL])[1] == [call]
    shown, calls = streamed(BY_NAME[name], text, size)
    assert (shown.strip(), calls) == ("", [call])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "Llama" not in name and "gpt-oss" not in name])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_words_before_calls_are_content_and_several_calls_stay_in_order(name: str, size: int) -> None:
    calls = [ToolCall("weather", {"city": "Rome"}), ToolCall("weather", {"city": "Oslo", "days": 2})]
    shown, found = streamed(BY_NAME[name], "a < b [and] so. " + rendered(name, calls), size)
    assert (shown.strip(), found) == ("a < b [and] so.", calls)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_no_call_stays_content(name: str, size: int) -> None:
    whole = rendered(name, [ToolCall("weather", {"city": "Rome"})])
    for text in ("no call", "{not: json}", "a [list] {", whole[: len(whole) // 2]):
        shown, calls = streamed(BY_NAME[name], text, size)
        assert (shown, calls) == (text, [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_in_thoughts_is_none(size: int) -> None:
    form = BY_NAME["JSON in a tag (Hermes, Qwen)"]
    call = rendered("JSON in a tag (Hermes, Qwen)", [ToolCall("weather", {"city": "Rome"})])
    for thoughts, opened in ((f"<think>maybe {call}</think>", False), (f"maybe {call}</think>", True)):
        shown, calls = streamed(form, thoughts + call, size, opened)
        assert (shown.strip(), len(calls)) == (thoughts, 1)
    assert streamed(form, f"maybe {call}", size, thinking=True) == (f"maybe {call}", [])


def test_values_have_the_types_of_the_tool() -> None:
    form = BY_NAME["function and parameter tags (Qwen3-Coder)"]
    text = "<function=weather><parameter=city>\n12\n</parameter><parameter=days>\n12\n</parameter></function>"
    assert split_calls(form, text, [TOOL])[1] == [ToolCall("weather", {"city": "12", "days": 12})]
    assert json.dumps(split_calls(form, text, [])[1][0].arguments) == '{"city": 12, "days": 12}'


HERMES, LLAMA, LFM2 = "JSON in a tag (Hermes, Qwen)", "JSON alone (Llama 3)", "calls in Python (LFM2)"
CALLED = rendered(HERMES, [ToolCall("weather", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{CALLED}\n\nI asked it.\n\nWait:\n\n- one\n", "\n\nI asked it.\n\nWait:\n\n- one"),
        (f"So.\n\n{CALLED}\n{CALLED}\n", "So."),
        ("No call.\n\nNone.\n", "No call.\n\nNone.\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_whitespace_is_left_out_before_calls_and_behind_the_last_only(text: str, shown: str, size: int) -> None:
    assert streamed(BY_NAME[HERMES], text, size)[0] == shown


SAID = [
    "Wait: ",
    "\n\n",
    " ",
    "{",
    "}",
    ";",
    '{"name": "x"}',
    "<think>",
    "</think>",
    "</tool_call>",
    "<tool_call>",
    "<",
]
SAID += ["<|start|>assistant", "<|channel|>", "final<|message|>", " to=functions.", "<|tool_call_end|>", "[TOOL_CALLS]"]


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_the_pieces_in_which_a_text_comes_mean_nothing(name: str, data: st.DataObject) -> None:
    calls = [rendered(name, [ToolCall("weather", {"city": city})]) for city in ("Rome", "</tool_call>", "a; {b")]
    parts = st.sampled_from([*SAID, *calls, calls[0][: len(calls[0]) // 2]])
    text = "".join(data.draw(st.lists(parts, max_size=7)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    stream, shown, found = CallStream(BY_NAME[name], [TOOL], False), "", list[ToolCall]()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more, new = stream.push(text[start:end], last=False)
        shown, found = shown + more, found + new
    more, new = stream.push("", last=True)
    assert (shown + more, found + new) == CallStream(BY_NAME[name], [TOOL], False).push(text, last=True)
    if "<think>" not in text and "</think>" not in text:
        assert found + new == split_calls(BY_NAME[name], text, [TOOL])[1]


@pytest.mark.parametrize(
    "value",
    ["{[1]: 2}", "{1, 2}", "1j", 'b"x"', "...", "{1: 2}", "{**{}}", "1e999", "-x", "f''", "{(1, [2]): 3}", "[*[1]]"],
)
def test_a_call_in_python_has_the_values_of_json_only(value: str) -> None:
    text = f"<|tool_call_start|>[f(a={value})]<|tool_call_end|>"
    assert streamed(BY_NAME[LFM2], text, 3) == (text, [])


def test_a_call_in_python_has_all_values_of_json() -> None:
    value = {"a": [1, -2.5, None, True, "x"], "b": {}}
    text = f"<|tool_call_start|>[f(a={value}, b={json.dumps(value)})]<|tool_call_end|>"
    assert streamed(BY_NAME[LFM2], text, 3) == ("", [ToolCall("f", {"a": value, "b": value})])


def test_numbers_that_json_does_not_have_are_no_arguments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'
    assert streamed(BY_NAME[HERMES], text, 3) == (text, [])


@pytest.mark.parametrize("said", ["In C: int main() {", "for (;;) { x; {y", "See `{a}`;\n{b", '; {"na"'])
def test_braces_in_a_text_hold_nothing_back_where_a_call_is_json_alone(said: str) -> None:
    assert CallStream(BY_NAME[LLAMA], [TOOL], False).push(said, last=False) == (said, [])


@pytest.mark.parametrize("size", [1, 1000])
def test_several_calls_of_json_alone(size: int) -> None:
    call = '{"name": "f", "parameters": {"a": "; {"}}'
    for text in (f"{call}; {call}", f"<|python_tag|>{call};{call};\n"):
        assert streamed(BY_NAME[LLAMA], text, size) == ("", [ToolCall("f", {"a": "; {"})] * 2)
