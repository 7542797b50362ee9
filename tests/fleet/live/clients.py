"""Clients of a server that know nothing of its fleet: each has a thread and connections of its own, and streams."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx

from ductile.messages.updates import Digest

PROMPT = tuple(5 + (7 * place) % 90 for place in range(12))
Route = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass
class Told:
    """What a client was told of one request."""

    prompt: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    finish_reason: str = ""
    """"" where the response broke off."""
    failure: str = ""


def ask(
    url: str,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 64,
    route: Route = "/v1/completions",
    api_key: str | None = None,
    timeout_s: float = 20.0,
    told: Told | None = None,
    seed: int = 0,
) -> Told:
    """Stream one request to its end. told: is filled as tokens come."""
    told = told or Told(list(prompt))
    body = {
        "model": _model(url, api_key),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0 if route == "/v1/completions" else True,
    }
    if route == "/v1/completions":
        body["prompt"] = list(prompt)
    else:
        body["messages"] = [{"role": "user", "content": "".join(chr(32 + token - 5) for token in prompt)}]
    try:
        with httpx.stream("POST", url + route, json=body, headers=_key(api_key), timeout=timeout_s) as response:
            if response.status_code != 200:
                told.failure = f"{response.status_code}: {response.read().decode()}"
                return told
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "choices" not in piece:
                    told.failure = line
                    return told
                if piece.get("prompt_token_ids"):
                    told.prompt = piece["prompt_token_ids"]
                _take(told, piece["choices"][0] if piece["choices"] else {})
    except httpx.HTTPError as error:
        told.failure = f"{type(error).__name__}: {error}"
    return told


def _take(told: Told, choice: dict) -> None:
    told.prompt = choice.get("prompt_token_ids") or told.prompt
    told.token_ids += choice.get("token_ids") or []
    logprobs = choice.get("logprobs") or {}
    told.logprobs += logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or []]
    for version, digest, count in choice.get("weight_versions") or []:
        told.versions += [version] * count
        told.digests += [digest] * count
    told.finish_reason = choice.get("finish_reason") or told.finish_reason


def _model(url: str, api_key: str | None) -> str:
    return httpx.get(f"{url}/v1/models", headers=_key(api_key), timeout=10).json()["data"][0]["id"]


def _key(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Client:
    """Asks one request after the other, until `stop`."""

    def __init__(self, url: str, route: Route = "/v1/completions", max_tokens: int = 64) -> None:
        self.told: list[Told] = []
        self._url, self._route, self._max_tokens = url, route, max_tokens
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"client {route}", daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return sum(len(told.token_ids) for told in self.told)

    def stop(self) -> list[Told]:
        """Let the request that runs come to its end. Returns all."""
        self._ends.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "a response does not come to an end"
        return self.told

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            number += 1
            told = Told(PROMPT)
            self.told.append(told)
            ask(self._url, max_tokens=self._max_tokens, route=self._route, told=told, seed=number)
