"""Chats as clients send them: what reaches the template, what comes back as a call, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from ductile.generator.engine import engine as engine_module
from ductile.generator.server.server import create_app
from ductile.tasks.tokenizer import Tokenizer
from tests.generator.conftest import Family
from tests.generator.test_server import events, local
from tests.tiny import IM_END

HERMES = (
    "{% if tools %}TOOLS:{{ tools | tojson }};{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}!{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""Shows tools and calls, and all roles."""
STRICT = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant', 'system'] %}{{ m.role + ':' + m.content + ';' }}"
    "{% elif m.role == 'tool' and m.name %}{% endif %}{% endfor %}"
)
"""Knows three roles, and fails without a content."""
TEXT_OF_ARGUMENTS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '=' + c.function.arguments }}{% endfor %};{% endfor %}"
)
"""As DeepSeek's: arguments are JSON."""
ITEMS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}({{ k }}={{ v }}){% endfor %}{% endfor %};{% endfor %}"
)

USER = {"role": "user", "content": "rain?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"c": "Rome"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def served(family: Family, folder: Path, template: str) -> TestClient:
    copytree(family.folder, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return local(create_app(family.engine(max_model_len=400), Tokenizer.from_folder(folder), "tiny"))


def prompt_of(client: TestClient, tokenizer: Tokenizer, **body: Any) -> str:
    """The prompt as the model sees it, or the error."""
    response = client.post("/v1/chat/completions", json={"max_tokens": 1, "return_token_ids": True} | body)
    if response.status_code != 200:
        assert response.status_code == 400
        return response.json()["error"]["message"]
    return tokenizer.decode(response.json()["prompt_token_ids"], False)


SEEN: list[tuple[str, list[Any], dict[str, Any], str]] = [
    (HERMES, [USER, CALLED], {}, '<tool_call>\n{"name": "weather", "arguments": {"c": "Rome"}}\n</tool_call>'),
    (ITEMS, [USER, CALLED], {}, "rain?;weather(c=Rome);"),
    (TEXT_OF_ARGUMENTS, [USER, CALLED], {}, 'rain?;weather={"c": "Rome"};'),
    (STRICT, [USER, {"role": "assistant", "content": "yes", "tool_calls": []}], {}, "user:rain?;assistant:yes;"),
    (STRICT, [{"role": "developer", "content": "Short."}, USER], {}, "system:Short.;user:rain?;"),
    (
        STRICT,
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        {},
        "user:ab;",
    ),
    (STRICT, [USER | {"name": "Ann", "refusal": None, "annotations": [], "audio": None}], {}, "user:rain?;"),
    (STRICT, [USER | {"type": "text"}], {"add_special_tokens": False}, "user:rain?;"),  # lm-eval; vLLM's default
    (STRICT, [USER], {"chat_template_kwargs": {"enable_thinking": False, "x": None}}, "user:rain?;"),
    (STRICT, [USER], {"chat_template_kwargs": {"x": 1}}, "the chat template does not read x, which chat_template"),
    (HERMES, [USER], {"reasoning_effort": "low"}, "low!<|im_start|>user:rain?"),
    (STRICT, [USER], {"reasoning_effort": "low", "verbosity": "high"}, "user:rain?;"),
    (HERMES, [USER], {"tools": [TOOL]}, 'TOOLS:[{"type": "function", "function": {"name": "weather"'),
    (HERMES, [USER], {"tools": [TOOL], "tool_choice": "none"}, "<|im_start|>user:rain?<|im_start|>assistant:"),
    (HERMES, [USER], {"tools": [], "tool_choice": None}, "<|im_start|>user:rain?<|im_start|>assistant:"),
    (
        HERMES,
        [USER, {"role": "assistant", "content": "It "}],
        {"continue_final_message": True},
        "user:rain?<|im_start|>assistant:It ",
    ),
    # What the template would leave out.
    (
        STRICT,
        [{"role": "tool", "content": "sunny", "tool_call_id": "1"}, USER],
        {},
        "leaves out the content of message 1, whose role is tool",
    ),
    (STRICT, [USER, CALLED | {"content": "yes"}], {}, "the chat template leaves out"),
    (STRICT, [USER], {"tools": [TOOL]}, "the chat template leaves out the tool weather"),
    (
        STRICT,
        [USER | {"weight": 2}],
        {},
        "messages.0 has a field weight that is a number",
    ),
    (
        STRICT,
        [USER, {"role": "assistant", "content": "no", "function_call": {"name": "f"}}],
        {},
        "messages.1 has a field function_call that is an object",
    ),
    (
        STRICT,
        [USER, {"role": "assistant", "content": "no", "refusal": "I will not"}],
        {},
        "the chat template leaves out the refusal of message 2, whose role is assistant",
    ),
    (
        STRICT,
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        {},
        "messages.0 has a part 2 of type",
    ),
    (STRICT, [{"role": "user", "content": 7}], {}, "messages.0 has a content that is a number, not text"),
    (STRICT, [{"role": "user"}], {}, "messages.0 has no content"),
    (STRICT, [USER], {"tool_choice": "required"}, 'tool_choice is "required"; it must be "auto" or "none"'),
    (STRICT, [USER], {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name is missing"),
    (STRICT, [USER], {"continue_final_message": True}, "the last message's role is user; it must be an assistant's"),
    (
        STRICT,
        [USER],
        {"continue_final_message": True, "add_generation_prompt": True},
        "are both true; keep one of them",
    ),
    (
        "{{ tools | tojson }}{{ messages[0] | tojson }}",
        [{"content": "hi", "role": "user"}],
        {"tools": [{"function": {"description": "d", "name": "f", "parameters": {}}, "type": "function"}]},
        '[{"function": {"description": "d", "name": "f", "parameters": {}}, "type": "function"}]'
        '{"content": "hi", "role": "user"}',
    ),
    ("{{ raise_exception('no!') }}", [USER], {}, "the chat template refuses the messages: no!"),
    ("{{ messages[0].content.nothing.at.all }}", [USER], {}, "the chat template refuses the messages: UndefinedError"),
]


@pytest.mark.parametrize(("template", "messages", "fields", "seen"), SEEN, ids=lambda value: str(value)[:40])
def test_what_a_model_sees_of_a_chat(
    qwen3: Family, tmp_path: Path, template: str, messages: list[Any], fields: dict[str, Any], seen: str
) -> None:
    with served(qwen3, tmp_path, template) as client:
        found = prompt_of(client, qwen3.tokenizer, messages=messages, **fields)
        assert seen in found
        assert str(tmp_path) not in found
        if fields.get("tool_choice") == "none" or ("continue_final_message" in fields and " " in seen[-1:]):
            assert found.endswith(seen)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "prediction": None, "logit_bias": {}, "modalities": ["text"]},
        {"reasoning_effort": "low", "verbosity": "low", "parallel_tool_calls": True},
        {"stream_options": None, "stop": None, "n": None, "seed": None, "logprobs": None, "top_logprobs": None},
        {"tools": None, "tool_choice": None, "response_format": {"type": "text"}, "echo": None, "suffix": None},
        {"audio": None, "web_search_options": None, "functions": None, "function_call": None, "a_field_to_come": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_does_not_change_a_response_is_taken(qwen3: Family, route: str, fields: dict[str, Any]) -> None:
    with local(create_app(qwen3.engine(), qwen3.tokenizer, "tiny")) as client:
        asked = {"prompt": "hi"} if route == "completions" else {"messages": [USER]}
        response = client.post(f"/v1/{route}", json={"max_tokens": 1} | asked | fields)
        assert response.status_code == 200, response.text


SAID = 'Well. <tool_call>\n{"name": "weather", "arguments": {"c": "Rome"}}\n</tool_call>'


@pytest.fixture
def saying(qwen3: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A server whose model calls a tool twice, and ends its turn."""
    script = [*qwen3.tokenizer.encode(SAID), *qwen3.tokenizer.encode(SAID[6:]), IM_END]

    def draw(logprobs: torch.Tensor, samplings: Any, streams: Any, positions: list[int]) -> Any:
        return torch.tensor([script[position] for position in positions]), torch.zeros(len(positions))

    monkeypatch.setattr(engine_module, "draw", draw)
    with served(qwen3, tmp_path, HERMES) as client:
        yield client


def test_calls_come_back_as_calls_whole_and_streamed(saying: TestClient) -> None:
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": 200}
    (choice,) = saying.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"c": "Rome"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    parts = [
        event["choices"][0] for event in events(saying.post("/v1/chat/completions", json=body | {"stream": True}).text)
    ]
    assert "".join(part["delta"]["content"] for part in parts).strip() == "Well."
    deltas = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in deltas] == [(at, calls[0]["function"]) for at in (0, 1)]
    assert parts[-1]["finish_reason"] == "tool_calls"
    # What has come back is understood when it is sent again.
    again = [USER, choice["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}]
    assert saying.post("/v1/chat/completions", json=body | {"messages": again, "max_tokens": 1}).status_code == 200


def test_one_call_where_more_are_not_wanted_and_text_without_tools(saying: TestClient) -> None:
    body = {"messages": [USER], "max_tokens": 200}
    (choice,) = saying.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SAID + SAID[6:], "stop")
    one = saying.post("/v1/chat/completions", json=body | {"tools": [TOOL], "parallel_tool_calls": False}).json()
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


def test_calls_in_an_unknown_form_stay_text_and_the_log_says_so_once(
    qwen3: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{{ tools | tojson }}" + ITEMS
    with served(qwen3, tmp_path, template) as client:
        for _ in range(2):
            body = {"messages": [USER], "tools": [TOOL], "max_tokens": 2}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
    assert caplog.text.count("the chat template writes calls of tools in no form that is known") == 1
