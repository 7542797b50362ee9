"""Between HTTP and the engine: request bodies become sequences, sequences become responses, whole or streamed."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ductile.columns import Floats, TokenIds, Versions
from ductile.config.reading.errors import show
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.kv_transfer import KVUnavailable, RequestKV
from ductile.generator.engine.limits import Overloaded, RequestRefused
from ductile.generator.server.choice import Asked, Choice
from ductile.generator.server.fleet_control import FleetControl
from ductile.generator.server.kv_params import RemoteKV
from ductile.generator.server.kv_sharing import KVFetcher, KVLeases
from ductile.generator.server.metrics import ServerMetrics
from ductile.generator.server.openai_api import ChatRequest, SamplingFields, TextRequest, TokenRequest
from ductile.generator.server.prompt_text import PromptEncoder
from ductile.generator.server.responses import Format, Json, usage
from ductile.generator.server.runner import Delta, EngineFailed, EngineRunner, RequestFailed
from ductile.kernels.device import peak_memory
from ductile.records import GenerateRequest, Sampling
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.tool_calls import FORMS, THINK, CallStream, ToolForm, form_of
from ductile.transport.http_server.client_gone import unless_gone
from ductile.transport.http_server.openai_error import error
from ductile.weights.live_weights import LiveWeights

LOG = logging.getLogger(__name__)

PREFILL_TOKENS = 2
"""Completion tokens of a prompt that is computed for another server: the first one is sampled, and room for the second
keeps the sequence until its keys and values have been taken."""

TOKEN_MAX_TOKENS = 16
"""The default of OpenAI's completions and of vLLM's `SamplingParams`."""


MAX_REPORTED = 2**21
"""Most likeliest tokens in a response, over all places of its sequences: each takes some two hundred bytes."""


class UnknownModel(Exception):
    """The request names a model that is not served."""


class Service:
    """Made in the loop that serves. Raises `UnknownModel`, `RequestRefused`, `Overloaded`, `RequestFailed`,
    `EngineFailed`, `ClientGone`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model_id: str,
        max_sequences: int,
        max_waiting_chars: int,
        on_failure: Callable[[EngineFailed], None],
        defaults: Mapping[str, float],
        stage_weights: bool = True,
    ) -> None:
        """max_waiting_chars: of large texts that wait to be tokenised. `on_failure` is called when the engine is
        dead. defaults: as `create_app`'s. Reads all weights once, for their digest."""
        self.model_id = model_id
        self.limits = engine.limits
        self.tokenizer = tokenizer
        self.created = int(time.time())
        live = LiveWeights({name: each.data for name, each in engine.weights()}, engine.version)
        self.runner = EngineRunner(engine, on_failure, live.current.digest())
        self.control = FleetControl(self.runner, live, stage_weights, self.model_id)
        self.metrics = ServerMetrics(engine.stats, lambda: peak_memory(engine.device).used_bytes)
        self._max_sequences, self._num_sequences = max_sequences, 0
        self.sampling_defaults = {name: value for name, value in defaults.items() if name != "max_new_tokens"}
        self.chat_max_tokens = None if "max_new_tokens" not in defaults else int(defaults["max_new_tokens"])
        """Most tokens of a chat's response that says none; None: as many as there is room for."""
        self._prompts = PromptEncoder(tokenizer, engine.limits, max_waiting_chars)
        self.kv_leases = KVLeases(engine.cache_bytes)
        self._fetcher = KVFetcher(engine)

    def call_streams(self, body: ChatRequest, prompt: str) -> Callable[[], CallStream] | None:
        """Return what tells calls from text, in the form of the chat template; None where nothing is to be called."""
        if not body.tools or body.tool_choice == "none" or self._tool_form is None:
            return None
        form, thinking = self._tool_form, prompt.rstrip().endswith(THINK)
        tools = [tool.model_dump() for tool in body.tools]
        return lambda: CallStream(form, tools, thinking)

    @cached_property
    def _tool_form(self) -> ToolForm | None:
        form = form_of(self.tokenizer.render_chat)
        if form is None:
            known = ", ".join(each.name for each in FORMS)
            LOG.warning(f"the chat template writes calls of tools in no form that is known ({known}): they stay text")
        return form

    def admit(self, num_prompts: int, n: int | None) -> None:
        """Raise `RequestRefused` or `Overloaded` for a request with more sequences than the server has room for."""
        num_sequences = num_prompts * (n or 1)
        if num_sequences > self._max_sequences:
            raise RequestRefused(
                "",
                f"{num_prompts} prompts and n = {n or 1} make {num_sequences} sequences; "
                f"server.max_sequences allows {self._max_sequences}",
            )
        self._refuse_overload(num_sequences)
        self.control.refuse_unable()

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, http: Request) -> list[list[int]]:
        return await unless_gone(http, self._prompts.encode(texts, add_special_tokens))

    async def complete_text(
        self,
        body: TextRequest,
        form: Format,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        http: Request,
    ) -> Response:
        """Complete texts. `max_tokens` is for a request that says none; None: as many as there is room for."""
        head = self.head(body.model, form.prefix)
        if asked.num_likeliest:  # a request that says no length gets one that it may have
            bound = MAX_REPORTED // (asked.num_likeliest * len(prompts) * (body.n or 1))
            max_tokens = bound if max_tokens is None else min(max_tokens, bound)
        requests = self.make_requests(head["id"], body, prompts, max_tokens, body.priority)
        if salt := body.cache_salt:
            requests = [replace(request, cache_salt=salt) for request in requests]
        if num_generated := asked.num_generated:
            requests = [_going_on(requests[0], num_generated, self.runner.engine.version)]
        _refuse_long_report(requests, asked)
        caches = await unless_gone(http, self._take_over(body, requests))
        choices = [Choice(index, request, self.tokenizer, asked) for index, request in enumerate(requests)]
        ids: Json = {"prompt_token_ids": list(prompts[0])} if body.return_token_ids and len(prompts) == 1 else {}
        if body.stream:
            deltas = self._deltas(requests, choices, each_step=True, caches=caches)
            # The first token comes before the status line, so that a refusal can still be a 400.
            first = await unless_gone(http, anext(deltas))
            chunks = _chunks(head | {"object": form.chunk_object}, ids, form, choices, first, deltas)
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            last_chunk = head | {"object": form.chunk_object, "choices": []} if with_usage else None
            return StreamingResponse(_events(chunks, last_chunk, prompts, choices), media_type="text/event-stream")
        await unless_gone(http, self._collect(requests, choices, caches))
        around = head | {"object": form.whole_object} | ids | {"usage": usage(prompts, choices)}
        return await asyncio.to_thread(_whole, around, form.whole, choices)

    async def complete_tokens(self, body: TokenRequest, http: Request) -> Response:
        head = self.head(body.model, "gen")
        sampling = body.sampling_params
        self.admit(1, sampling.n)
        requests = self.make_requests(head["id"], sampling, [body.token_ids], TOKEN_MAX_TOKENS, body.priority)
        choices = [Choice(index, request, self.tokenizer) for index, request in enumerate(requests)]
        await unless_gone(http, self._collect(requests, choices))

        def entry(choice: Choice) -> Json:
            content = [
                {"token": f"token_id:{token_id}", "logprob": logprob}
                for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
            ]
            return {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "weight_versions": choice.spans,
                "logprobs": None if sampling.logprobs is None else {"content": content},
                "finish_reason": choice.finish_reason,
            }

        around = {"request_id": head["id"], "prompt_logprobs": None, "incarnation": self.control.incarnation}
        return await asyncio.to_thread(_whole, around, entry, choices)

    def head(self, model: str | None, prefix: str) -> Json:
        if model is not None and model != self.model_id:
            raise UnknownModel(f"the model {show(model)} is not served here; this is {show(self.model_id)}")
        head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_id}
        return head | {"incarnation": self.control.incarnation}

    def make_requests(
        self,
        id: str,
        body: SamplingFields,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        priority: int | None,
    ) -> list[GenerateRequest]:
        """Return a request for each prompt and choice, in the order of the response's choices. `priority` is vLLM's:
        the lower goes first."""
        num_choices = body.n or 1
        requests: list[GenerateRequest] = []
        for number, prompt in enumerate(prompts):
            room = self.limits.room(len(prompt))
            default = room if max_tokens is None else min(max_tokens, room)
            sampling = body.sampling(max(1, default))
            window = self.limits.max_model_len - len(prompt)
            if 0 < window < sampling.max_tokens:
                raise RequestRefused(
                    id,
                    f"max_tokens is {sampling.max_tokens}, and the prompt has {len(prompt)} tokens; "
                    f"model.max_model_len {self.limits.max_model_len} leaves room for {window}",
                )
            try:
                shared = TokenIds(prompt)
            except ValueError:  # no vocabulary has ids of more than 32 bits
                raise RequestRefused(id, self.limits.unknown_token(prompt)) from None
            for choice in range(num_choices):
                # Each gets a seed of its own, or all would be the same.
                seeded = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice)
                group = f"{id}-{number}"
                requests.append(GenerateRequest(f"{group}-{choice}", shared, seeded, group, priority=-(priority or 0)))
        return requests

    async def prefill(
        self, body: TextRequest, prompts: Sequence[Sequence[int]], base_url: str, http: Request
    ) -> Response:
        """Compute a prompt, and keep its keys and values for the server that goes on with it. base_url: root of this
        server's routes, as the other one reaches it."""
        head, prompt = self.head(body.model, "kv"), prompts[0]
        remote: RemoteKV | None = None
        if len(prompts) == 1 and self.limits.room(len(prompt)) >= PREFILL_TOKENS:
            request = self.make_requests(head["id"], body, prompts, PREFILL_TOKENS, None)[0]
            request = replace(request, sampling=Sampling(0.0, max_tokens=PREFILL_TOKENS, ignore_eos=True))
            request = replace(request, priority=-(body.priority or 0), cache_salt=body.cache_salt or "")
            self._refuse_overload(1)
            self._num_sequences += 1
            try:
                cache = await unless_gone(http, self.runner.prefill(request))
            finally:
                self._num_sequences -= 1
            if cache is not None and cache.version == self.runner.engine.version:
                self.metrics.prompt_tokens.inc(len(prompt))
                remote = await self.kv_leases.keep(cache, prompt, self.runner.digest, base_url)
        if remote is not None:
            self.metrics.kv_transfers.labels("kept").inc()
        params = None if remote is None else {"do_remote_prefill": True, "remote": remote.model_dump()}
        return JSONResponse(head | {"object": "kv_transfer", "kv_transfer_params": params})

    async def _take_over(self, body: TextRequest, requests: Sequence[GenerateRequest]) -> list[RequestKV | None]:
        """Return what another server has computed of each request's prompt, which is the same."""
        params = body.kv_transfer_params
        if params is None or params.remote is None or len({request.group for request in requests}) > 1:
            return [None] * len(requests)
        try:
            cache = await self._fetcher.fetch(params.remote, requests[0], self.runner.digest)
        except KVUnavailable as why:
            LOG.warning("the prompt of request %s is computed again: the cache %s", requests[0].id, why)
            self.metrics.kv_transfers.labels("computed again").inc()
            return [None] * len(requests)
        self.metrics.kv_transfers.labels("taken").inc()
        return [cache] * len(requests)

    async def close(self) -> None:
        """End what is in flight with what it has."""
        self.control.close()
        await self.runner.stop()
        self.kv_leases.close()
        await self._fetcher.close()

    async def _deltas(
        self,
        requests: Sequence[GenerateRequest],
        choices: Sequence[Choice],
        each_step: bool,
        caches: Sequence[RequestKV | None] = (),
    ) -> AsyncGenerator[Delta]:
        """Yield as `EngineRunner.generate` does, counted and limited."""
        self._refuse_overload(len(requests))
        self._num_sequences += len(requests)
        started, first = time.monotonic(), True
        try:
            async with aclosing(
                self.runner.generate(requests, each_step, [choice.report for choice in choices], caches)
            ) as deltas:
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
        finally:
            self._num_sequences -= len(requests)

    def _refuse_overload(self, num_sequences: int) -> None:
        if self._num_sequences + num_sequences > self._max_sequences:
            raise Overloaded(
                f"{self._num_sequences} sequences are in the server, and server.max_sequences is "
                f"{self._max_sequences}: there is no room for {num_sequences} more now; try again later"
            )

    async def _collect(
        self,
        requests: Sequence[GenerateRequest],
        choices: Sequence[Choice],
        caches: Sequence[RequestKV | None] = (),
    ) -> None:
        async with aclosing(self._deltas(requests, choices, each_step=False, caches=caches)) as deltas:
            async for delta in deltas:
                choices[delta.index].push(delta)
                await asyncio.sleep(0)  # a step may end a thousand of them, and others are waiting


def _going_on(request: GenerateRequest, num_generated: int, version: int) -> GenerateRequest:
    """Return the request with so many tokens of its prompt as those that were generated before. What else was known of
    them stays with the client: nothing of them is in the response."""
    return replace(
        request,
        prompt=request.prompt[:-num_generated],
        generated=request.prompt[-num_generated:],
        logprobs=Floats([0.0] * num_generated),
        versions=Versions([version] * num_generated),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens + num_generated),
    )


def _refuse_long_report(requests: Sequence[GenerateRequest], asked: Asked) -> None:
    """Raise `RequestRefused` where the likeliest tokens may be too many."""
    places = sum(request.sampling.max_tokens + asked.echo * len(request.prompt) for request in requests)
    if places * (asked.num_likeliest or 0) > MAX_REPORTED:
        raise RequestRefused(
            "",
            f"{len(requests)} sequences have up to {places} tokens, and {asked.num_likeliest} likely ones each are "
            f"more than {MAX_REPORTED}; lower max_tokens, n, or the number of log-probs",
        )


def _whole(around: Json, entry: Callable[[Choice], Json], choices: Sequence[Choice]) -> Response:
    """Return a response's JSON, for a thread: with many choices it takes a while. One piece a choice, as none of them
    may hold the interpreter for long."""
    entries = ", ".join(json.dumps(entry(choice)) for choice in choices)
    return Response(f'{json.dumps(around)[:-1]}, "choices": [{entries}]}}', media_type="application/json")


async def _chunks(
    head: Json, ids: Json, form: Format, choices: Sequence[Choice], first: Delta, deltas: AsyncGenerator[Delta]
) -> AsyncGenerator[Json]:
    async with aclosing(deltas):
        opened: set[int] = set()
        delta: Delta | None = first
        while delta is not None:
            choice = choices[delta.index]
            # In a thread: an echo may have a long prompt's log-probs.
            opening = None if choice.index in opened else await asyncio.to_thread(form.opening, choice)
            opened.add(choice.index)
            for entry in (opening, form.piece(choice, choice.push(delta))):
                if entry is not None:
                    yield head | ids | {"choices": [entry]}
                    ids = {}
            delta = await anext(deltas, None)


async def _events(
    chunks: AsyncGenerator[Json], last_chunk: Json | None, prompts: Sequence[Sequence[int]], choices: Sequence[Choice]
) -> AsyncGenerator[str]:
    """Yield server-sent events. The status is sent by now, so a failure becomes an event."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _event(chunk)
            if last_chunk is not None:
                yield _event(last_chunk | {"usage": usage(prompts, choices)})
        except (EngineFailed, RequestFailed) as failure:
            yield _event(error(str(failure), "server_error"))
        except Exception as failure:
            LOG.exception("a streamed response cannot be written")
            yield _event(error(f"the response cannot be written: {type(failure).__name__}: {failure}", "server_error"))
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"
