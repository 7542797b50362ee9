"""Between HTTP and the engine: request bodies become sequences, sequences become answers, whole or streamed."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ductile.generator.answers import Choice, Format, Json, error, usage
from ductile.generator.engine import Engine
from ductile.generator.metrics import ServerMetrics
from ductile.generator.openai_api import SamplingFields, TextRequest, TokenRequest
from ductile.generator.runner import Delta, EngineFailed, EngineRunner, RequestFailed
from ductile.records import GenerateRequest
from ductile.tasks.tokenizer import Tokenizer

T = TypeVar("T")

TOKEN_MAX_TOKENS = 16
"""The default of OpenAI's completions and of vLLM's `SamplingParams`."""


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


class UnknownModel(Exception):
    """The request names a model that is not served."""


class Service:
    """Made in the loop that serves. Raises `UnknownModel`, `RequestRefused`, `EngineFailed`, `ClientGone`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_id: str) -> None:
        self.model_id = model_id
        self.max_model_len = engine.config.model.max_model_len
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.runner = EngineRunner(engine)
        self.metrics = ServerMetrics(engine.stats)

    async def answer_text(
        self, body: TextRequest, form: Format, prompts: Sequence[Sequence[int]], max_tokens: int, http: Request
    ) -> Response:
        head = self._head(body.model, form.prefix)
        requests = make_requests(head["id"], body, prompts, max_tokens, body.priority)
        choices = [Choice(index, request, self.tokenizer) for index, request in enumerate(requests)]
        ids: Json = {"prompt_token_ids": list(prompts[0])} if body.return_token_ids and len(prompts) == 1 else {}
        if body.stream:
            deltas = self._deltas(requests, each_step=True)
            # The first token comes before the status line, so that a refusal can still be a 400.
            first = await unless_gone(http, anext(deltas))
            chunks = _chunks(head | {"object": form.chunk_object}, ids, form, choices, first, deltas)
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            closing = head | {"object": form.chunk_object, "choices": []} if with_usage else None
            return StreamingResponse(_events(chunks, closing, prompts, choices), media_type="text/event-stream")
        await unless_gone(http, self._collect(requests, choices))
        entries = [form.whole(choice) for choice in choices]
        body_out = head | {"object": form.whole_object} | ids | {"choices": entries, "usage": usage(prompts, choices)}
        return JSONResponse(body_out)

    async def answer_tokens(self, body: TokenRequest, http: Request) -> Response:
        head = self._head(body.model, "gen")
        sampling = body.sampling_params
        requests = make_requests(head["id"], sampling, [body.token_ids], TOKEN_MAX_TOKENS, body.priority)
        choices = [Choice(index, request, self.tokenizer) for index, request in enumerate(requests)]
        await unless_gone(http, self._collect(requests, choices))
        entries: list[Json] = []
        for choice in choices:
            content = [
                {"token": f"token_id:{token_id}", "logprob": logprob}
                for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
            ]
            entries.append(
                {
                    "index": choice.index,
                    "token_ids": choice.token_ids,
                    "logprobs": None if sampling.logprobs is None else {"content": content},
                    "finish_reason": choice.finish_reason,
                }
            )
        return JSONResponse({"request_id": head["id"], "choices": entries, "prompt_logprobs": None})

    def _head(self, model: str | None, prefix: str) -> Json:
        if model is not None and model != self.model_id:
            raise UnknownModel(f"the model {model!r} is not served here; this is {self.model_id!r}")
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_id}

    async def _deltas(self, requests: Sequence[GenerateRequest], each_step: bool) -> AsyncGenerator[Delta]:
        """`EngineRunner.generate`, counted."""
        started, first = time.monotonic(), True
        async with aclosing(self.runner.generate(requests, each_step)) as deltas:
            async for delta in deltas:
                if first:
                    self.metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))
                    if each_step:
                        self.metrics.first_token_s.observe(time.monotonic() - started)
                    first = False
                if delta.finish_reason:
                    self.metrics.finished.labels(delta.finish_reason).inc()
                    self.metrics.request_s.observe(time.monotonic() - started)
                yield delta

    async def _collect(self, requests: Sequence[GenerateRequest], choices: Sequence[Choice]) -> None:
        async with aclosing(self._deltas(requests, each_step=False)) as deltas:
            async for delta in deltas:
                choices[delta.index].push(delta)


def make_requests(
    id: str, body: SamplingFields, prompts: Sequence[Sequence[int]], max_tokens: int, priority: int | None
) -> list[GenerateRequest]:
    """One for each prompt and choice, in the order of the answer's choices. `priority` is vLLM's: lower goes first."""
    return [
        GenerateRequest(
            id=f"{id}-{number}-{choice}",
            prompt=tuple(prompt),
            sampling=body.sampling(max_tokens, choice),
            group=f"{id}-{number}",
            priority=-(priority or 0),
        )
        for number, prompt in enumerate(prompts)
        for choice in range(body.n or 1)
    ]


async def unless_gone(http: Request, work: "Coroutine[Any, Any, T]") -> T:
    """Do the work, or cancel it and raise `ClientGone` when the client goes away."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _chunks(
    head: Json, ids: Json, form: Format, choices: Sequence[Choice], first: Delta, deltas: AsyncGenerator[Delta]
) -> AsyncGenerator[Json]:
    async with aclosing(deltas):
        opened: set[int] = set()
        delta: Delta | None = first
        while delta is not None:
            choice = choices[delta.index]
            opening = None if choice.index in opened else form.opening(choice)
            opened.add(choice.index)
            if opening is not None:
                yield head | ids | {"choices": [opening]}
                ids = {}
            text = choice.push(delta)
            yield head | ids | {"choices": [form.piece(choice, text, delta)]}
            ids = {}
            delta = await anext(deltas, None)


async def _events(
    chunks: AsyncGenerator[Json], closing: Json | None, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]
) -> AsyncGenerator[str]:
    """Server-sent events. The status is sent by now, so a failure becomes an event."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _event(chunk)
            if closing is not None:
                yield _event(closing | {"usage": usage(prompts, choices)})
        except (EngineFailed, RequestFailed) as failure:
            yield _event(error(str(failure), "server_error"))
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"
