"""An OpenAI-compatible server as `ductile.roles.Generators`.

Token ids go in and come out (`/v1/completions` with a list of ids as the prompt and `return_token_ids`, as vLLM and
`ductile inference` offer them): text would have to be tokenised again, and then log-probs would not be the tokens'.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from ductile.columns import Floats, TokenIds, Versions
from ductile.concurrency.deadline import said
from ductile.records import GenerateRequest, Generation, Manifest
from ductile.roles import Late, Refused, SlotLost

NUM_ATTEMPTS = 3
"""Attempts at a request when the server cannot be reached, or says that it is overloaded."""


class HttpGenerators:
    """`async with HttpGenerators("http://127.0.0.1:8000/v1") as generators:`"""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        capacity: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """timeout_s: of one response. capacity: requests in flight; a server says nothing of its own."""
        self.capacity = capacity
        self._base_url, self._timeout_s = base_url.rstrip("/"), timeout_s
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,  # a proxy between a run and its own server is never meant
        )
        self._model, self._version = "", 0

    async def __aenter__(self) -> "HttpGenerators":
        """Raises SlotLost when no server responds, Refused when it is no such server."""
        try:
            model = (await self._request("GET", "/models"))["data"][0]
            self._model, self._version = str(model["id"]), int(model.get("weight_version") or 0)
        except BaseException as error:
            await self._client.aclose()
            if not isinstance(error, KeyError | IndexError | TypeError):
                raise
            raise Refused(
                f"{self._base_url}/models does not list a model: is this an OpenAI-compatible server?"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises SlotLost, Late or Refused. Cancelling the call closes the connection, and so aborts the request."""
        sampling = request.sampling
        body = {
            "model": self._model,
            "prompt": list(request.prompt + request.generated),
            "max_tokens": sampling.max_tokens - len(request.generated),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": sampling.skip_special_tokens,
            "repetition_penalty": 1.0,  # else a server may take that of the model's generation_config.json
            "logprobs": 1,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        response = await self._request("POST", "/completions", body)
        token_ids, logprobs, finish_reason = _read(response, self._base_url)
        return Generation(
            request.id,
            request.generated + token_ids,
            request.logprobs + logprobs,
            request.versions + Versions.full(len(token_ids), self._version),
            finish_reason,
        )

    async def receive(self, manifest: Manifest) -> None:
        raise Refused(f"{self._base_url} keeps its own weights; it cannot receive version {manifest.version}")

    async def _request(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        url = self._base_url + route
        for attempt in range(1, NUM_ATTEMPTS + 1):
            last = attempt == NUM_ATTEMPTS
            try:
                response = await self._client.request(method, url, json=body)
            except httpx.TimeoutException:
                raise Late(f"{url} did not respond within {said(self._timeout_s)}") from None
            except httpx.TransportError as error:
                if last:
                    raise SlotLost(f"{url} cannot be reached: {error or type(error).__name__}") from error
            else:
                if response.status_code not in (429, 503) or last:
                    return _json(response, url)
            await asyncio.sleep(0.2 * 4**attempt)


def _json(response: httpx.Response, url: str) -> Any:
    if response.status_code != 200:
        raise Refused(f"{url} responded with {response.status_code}: {response.text[:500]}")
    try:
        return response.json()
    except ValueError:
        raise Refused(f"{url} did not respond in JSON: {response.text[:100]!r}") from None


def _read(response: Any, base_url: str) -> tuple[TokenIds, Floats, Any]:
    try:
        choice = response["choices"][0]
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(token_ids) == len(logprobs) and choice["finish_reason"] in ("stop", "length", "abort"):
            return TokenIds(token_ids), Floats(logprobs), choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise Refused(
        f"{base_url}/completions gave no token ids with log-probs; the server must understand `return_token_ids` and "
        "`logprobs`"
    )
