"""What a router reads in a request, where a session stays, and how a stream goes on."""

import json
from typing import Any

import pytest

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.sessions import RecentSessions, home_of
from ductile.fleet.router.partial_stream import PartialStream, StreamFailed, can_be_carried
from ductile.fleet.router.routed_request import CHAT, COMPLETIONS, TOKENS, RoutedRequest, read_request


def read(route: str, body: Any, **headers: str) -> RoutedRequest:
    return read_request(route, json.dumps(body).encode(), headers)


@pytest.mark.parametrize(
    ("route", "body", "num_prompts", "num_sequences", "num_prompt_tokens", "max_tokens"),
    [
        (COMPLETIONS, {"prompt": "12345678"}, 1, 1, 2, 16),
        (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 9}, 1, 1, 3, 9),
        (COMPLETIONS, {"prompt": [[5, 6], "abcd"], "n": 3, "max_tokens": 9}, 2, 6, 3, 9),
        (COMPLETIONS, {"prompt": 7, "n": "many", "max_tokens": -1}, 1, 1, 0, 16),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}]}, 1, 1, 108, None),
        (CHAT, {"messages": [], "max_completion_tokens": 4, "max_tokens": 8}, 1, 1, 0, 4),
        (TOKENS, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "n": 2}}, 1, 2, 2, 5),
    ],
)
def test_sizes(
    route: str, body: Any, num_prompts: int, num_sequences: int, num_prompt_tokens: int, max_tokens: int | None
) -> None:
    request = read(route, body)
    assert (request.num_prompts, request.num_sequences) == (num_prompts, num_sequences)
    assert (request.num_prompt_tokens, request.max_tokens) == (num_prompt_tokens, max_tokens)


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"user": "u"}, {}, "u"),
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k"),
        ({"user": "u", "prompt_cache_key": "k"}, {"x-session-id": "s"}, "s"),
        ({"user": 7}, {}, ""),
        ({}, {}, ""),
        ({"user": "u" * 999}, {}, "u" * 256),
    ],
)
def test_sessions(body: Any, headers: dict[str, str], session: str) -> None:
    assert read(COMPLETIONS, body, **headers).session == session


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": NaN}', b'"\\ud800"', b"[" * 5000])
def test_what_is_no_json_object_is_for_a_server_to_refuse(content: bytes) -> None:
    request = read_request(COMPLETIONS, content, {})
    assert (request.content, request.body, request.is_stream) == (content, {}, False)


def test_a_session_moves_only_from_or_to_a_server_that_comes_or_goes() -> None:
    three = [InstanceId(name) for name in ("a", "b", "c")]
    homes = {f"s{number}": home_of(f"s{number}", three) for number in range(300)}
    assert all(60 < list(homes.values()).count(each) < 140 for each in three)
    for session, home in homes.items():
        assert home_of(session, reversed(three)) == home
        left = home_of(session, three[:2])
        assert left == home or home == "c"


def test_only_the_latest_sessions_are_known() -> None:
    recent = RecentSessions(2)
    for session in ("one", "two", "one", "three"):
        recent.note(session, InstanceId(session[0]))
    assert [recent.of(session) for session in ("one", "two", "three", "")] == ["o", None, "t", None]


@pytest.mark.parametrize(
    ("route", "body", "is_carried"),
    [
        (COMPLETIONS, {"prompt": "x", "stream": True}, True),
        (COMPLETIONS, {"prompt": "x", "stream": False}, False),
        (COMPLETIONS, {"prompt": "x", "stream": True, "n": 2}, False),
        (COMPLETIONS, {"prompt": ["x", "y"], "stream": True}, False),
        (COMPLETIONS, {"prompt": "x", "stream": True, "echo": True}, False),
        (CHAT, {"messages": [], "stream": True}, True),
        (CHAT, {"messages": [], "stream": True, "tools": [{}]}, False),
        (CHAT, {"messages": [], "stream": True, "logprobs": True}, False),
    ],
)
def test_which_streams_another_server_can_go_on_with(route: str, body: Any, is_carried: bool) -> None:
    assert can_be_carried(read(route, body)) is is_carried


def chunk(text: str, ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "b",
        "created": 2,
        "choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}],
    } | more


def test_a_chat_goes_on_as_a_completion_of_its_tokens() -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5, "seed": 3, "user": "u"}
    partial = PartialStream(read(CHAT, asked), lambda: 100)
    route, body = partial.next_body()
    assert (route, json.loads(body)) == (CHAT, asked | {"return_token_ids": True})
    first = {"id": "a", "created": 1, "object": "chat.completion.chunk", "prompt_token_ids": [7, 8]}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    shown = partial.take(first | {"choices": [opening]})
    assert shown == {"id": "a", "created": 1, "object": "chat.completion.chunk", "choices": [opening]}
    partial.take(
        {"id": "a", "choices": [{"index": 0, "delta": {"content": "h"}, "token_ids": [1, 2], "finish_reason": None}]}
    )
    route, body = partial.next_body()
    assert route == COMPLETIONS
    going_on = {"prompt": [7, 8, 1, 2], "num_generated": 2, "max_tokens": 3, "seed": 3}
    assert json.loads(body) == {"stream": True, "return_token_ids": True, **going_on}
    shown = partial.take(chunk("i", [3], "stop", object="text_completion"))
    assert (shown["id"], shown["created"], shown["object"]) == ("a", 1, "chat.completion.chunk")
    assert shown["choices"] == [{"index": 0, "delta": {"content": "i"}, "finish_reason": "stop"}]
    assert (partial.finish_reason, partial.usage()["completion_tokens"]) == ("stop", 3)


def test_a_completion_that_goes_on_keeps_what_its_client_asked_for() -> None:
    asked = {"prompt": [7, 8, 9], "stream": True, "max_tokens": 4, "num_generated": 1, "return_token_ids": True}
    asked |= {"logprobs": 0, "stream_options": {"include_usage": True}}
    partial = PartialStream(read(COMPLETIONS, asked), lambda: 100)
    shown = partial.take(chunk("ab", [1], prompt_token_ids=[7, 8, 9]))
    assert (shown["prompt_token_ids"], shown["choices"][0]["token_ids"]) == ([7, 8, 9], [1])
    aborted = chunk("", [], "abort")
    assert partial.take(aborted)["choices"][0]["finish_reason"] is None
    assert partial.is_aborted
    _, body = partial.next_body()
    going_on = {"prompt": [7, 8, 9, 1], "num_generated": 2, "max_tokens": 3, "return_token_ids": True, "logprobs": 0}
    assert json.loads(body) == asked | going_on
    assert not partial.is_aborted
    second = chunk("c", [2], prompt_token_ids=[7, 8, 9, 1])
    second["choices"][0]["logprobs"] = {"text_offset": [0]}
    shown = partial.take(second)
    assert "prompt_token_ids" not in shown
    assert shown["choices"][0]["logprobs"] == {"text_offset": [2]}
    with pytest.raises(StreamFailed, match="device lost"):
        partial.take({"error": {"message": "device lost"}})
    (ended, usage) = partial.last_chunks()
    assert ended["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
