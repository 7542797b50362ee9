"""The OpenAI-compatible HTTP server over one engine.

| route | what it is |
|---|---|
| GET /v1/models, /v1/models/{id} | the one model, with `max_model_len` |
| POST /v1/completions, /v1/chat/completions | text or token ids in, text and token ids out, streamed or whole |
| POST /inference/v1/generate | token ids in, token ids out |
| GET /health | 200 after the engine has done a step, 503 when it cannot |
| GET /liveness | 200 while the engine's thread lives |
| GET /metrics | Prometheus |
| GET, DELETE /kv/{lease} | keys and values of a prompt, for another server (`ductile.generator.server.kv_sharing`) |
| /fleet/state, /weights/..., /pause, /resume | see `ductile.generator.server.fleet_routes` |

A client that goes away aborts its sequences. Errors have OpenAI's form. Who may come in, and with how much, is asked by
the middleware (`ductile.transport.http_server.middleware`), before a body is read.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from ductile.config.reading.errors import show
from ductile.config.schema.inference import ServerConfig
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.limits import Overloaded, RequestRefused
from ductile.generator.server.chat_prompt import render_prompt
from ductile.generator.server.choice import Asked
from ductile.generator.server.fleet_routes import fleet_routes, translate_fleet_errors
from ductile.generator.server.kv_sharing import pieces_of
from ductile.generator.server.openai_api import ChatRequest, CompletionRequest, TextRequest, TokenRequest
from ductile.generator.server.request_body import BadBody, read_body
from ductile.generator.server.responses import Chat, Json, TextCompletion
from ductile.generator.server.runner import EngineFailed, RequestFailed
from ductile.generator.server.service import TOKEN_MAX_TOKENS, Service, UnknownModel
from ductile.messages.control_token import ControlToken
from ductile.tasks.tokenizer import ChatRefused, Tokenizer, TokenizerError
from ductile.transport.http_server.client_gone import ClientGone
from ductile.transport.http_server.middleware import BODIES_AT_ONCE, Refusal, RequestGuard, check_control
from ductile.transport.http_server.openai_error import error


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    model_name: str,
    config: ServerConfig | None = None,
    on_failure: Callable[[EngineFailed], None] = lambda failure: None,
    health_deadline_s: float = 10.0,
    defaults: Mapping[str, float] | None = None,
    control: ControlToken | None = None,
) -> FastAPI:
    """Return the server's routes. The engine belongs to the app from its start to its end: no other code may touch it.
    `on_failure` is called when it is dead: by then every client has been told, and nothing but a new process can help.
    `defaults` are the values of the model's generation_config.json that count for requests which say nothing of them.
    control: for the control routes, where there is no API key; by default nobody has it."""
    config = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        model_id = config.served_model_name or model_name
        max_waiting_chars = BODIES_AT_ONCE * config.max_body_bytes
        app.state.service = Service(
            engine,
            tokenizer,
            model_id,
            config.max_sequences,
            max_waiting_chars,
            on_failure,
            defaults or {},
            config.stage_weights,
        )
        app.state.health_deadline_s = health_deadline_s
        app.state.service.runner.start()
        yield
        await app.state.service.close()

    control = control or ControlToken()

    def check_router(http: Request, body: TextRequest) -> None:
        """Raise `Refusal` where somebody says who computes a prompt and may not control the server, which would fetch
        from any address."""
        if body.kv_transfer_params is not None:
            check_control(http.headers, config, control)

    app = FastAPI(title="ductile inference", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.include_router(_routes)
    app.include_router(fleet_routes)
    app.state.check_router = check_router
    most_bytes = partial(most_bucket_bytes, app)
    app.add_middleware(RequestGuard, config=config, control=control, bucket_bytes=most_bytes)
    _translate_errors(app)
    translate_fleet_errors(app)
    return app


def most_bucket_bytes(app: FastAPI) -> int:
    """Return the bytes of the largest bucket of the last update; 0 before any."""
    return app.state.service.control.receiver.most_bucket_bytes


async def _service(http: Request) -> Service:
    return http.app.state.service


SharedService = Annotated[Service, Depends(_service)]

_routes = APIRouter()


@_routes.get("/health")
async def health(service: SharedService, http: Request) -> Json:
    await service.runner.probe(http.app.state.health_deadline_s)
    state = service.control.state()
    return {"status": "ok", "incarnation": state.incarnation, "weight_version": state.version, "digest": state.digest}


@_routes.get("/liveness")
async def liveness(service: SharedService) -> Json:
    service.runner.check_alive()
    return {"status": "ok"}


@_routes.get("/metrics")
async def metrics(service: SharedService) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@_routes.get("/v1/models")
async def models(service: SharedService) -> Json:
    return {"object": "list", "data": [_model(service)]}


@_routes.get("/v1/models/{id:path}")
async def model(id: str, service: SharedService) -> Json:
    service.head(id, "")
    return _model(service)


def _model(service: Service) -> Json:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "ductile",
        "root": service.model_id,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "weight_version": service.runner.engine.version,
        "weight_digest": service.runner.digest,
        "incarnation": service.control.incarnation,
    }


@_routes.post("/v1/completions")
async def completions(service: SharedService, http: Request) -> Response:
    body = read_body(CompletionRequest, _take_body(http)).with_defaults(service.sampling_defaults)
    http.app.state.check_router(http, body)
    service.admit(len(body.prompt), body.n)
    texts = [one for one in body.prompt if isinstance(one, str)]
    encoded = iter(await service.encode(texts, body.add_special_tokens is not False, http))
    prompts = [next(encoded) if isinstance(one, str) else one for one in body.prompt]
    if _is_prefill(body):
        return await service.prefill(body, prompts, _root(http), http)
    # A response may take minutes: what is not needed any more goes.
    body, texts = body.model_copy(update={"prompt": []}), []
    form = TextCompletion(body, service.tokenizer)
    asked = Asked(body.logprobs, bool(body.echo), body.only_echo, body.num_generated or 0)
    return await service.complete_text(body, form, asked, prompts, TOKEN_MAX_TOKENS, http)


@_routes.post("/v1/chat/completions")
async def chat(service: SharedService, http: Request) -> Response:
    body = read_body(ChatRequest, _take_body(http)).with_defaults(service.sampling_defaults)
    http.app.state.check_router(http, body)
    service.admit(1, body.n)
    if len(body.messages) > service.limits.max_model_len:  # each has a token at least, and rendering takes its time
        raise RequestRefused("", service.limits.too_long(f"at least {len(body.messages)}"))
    text = await asyncio.to_thread(render_prompt, service.tokenizer, body)
    calls = service.call_streams(body, text) if body.tools else None
    # The template writes the special tokens, so none are added.
    prompts = await service.encode([text], add_special_tokens=False, http=http)
    if _is_prefill(body):
        return await service.prefill(body, prompts, _root(http), http)
    # A response may take minutes: what is not needed any more goes.
    body, text = body.model_copy(update={"messages": [], "tools": None, "chat_template_kwargs": None}), ""
    num_likeliest = (body.top_logprobs or 0) if body.logprobs else None
    asked = Asked(num_likeliest, calls=calls, one_call=body.parallel_tool_calls is False)
    form = Chat(body, service.tokenizer)
    return await service.complete_text(body, form, asked, prompts, service.chat_max_tokens, http)


@_routes.post("/inference/v1/generate")
async def generate(service: SharedService, http: Request) -> Response:
    return await service.complete_tokens(read_body(TokenRequest, _take_body(http)), http)


@_routes.get("/kv/{lease}")
async def give_kv(lease: str, service: SharedService) -> Response:
    if (segment := service.kv_leases.find(lease)) is None:
        return JSONResponse(error("there is no such lease, or it is over"), 404)
    headers = {"Content-Length": str(segment.num_bytes)}
    return StreamingResponse(pieces_of(segment), headers=headers, media_type="application/octet-stream")


@_routes.delete("/kv/{lease}")
async def forget_kv(lease: str, service: SharedService) -> Json:
    service.kv_leases.forget(lease)
    return {}


def _is_prefill(body: TextRequest) -> bool:
    return body.kv_transfer_params is not None and body.kv_transfer_params.do_remote_decode


def _root(http: Request) -> str:
    return str(http.base_url).rstrip("/")


def _take_body(http: Request) -> bytearray:
    """Return the body that the middleware has read; no other code keeps it."""
    return http.scope["state"].pop("body")


def _translate_errors(app: FastAPI) -> None:
    """Have whatever goes wrong said in OpenAI's form."""

    @app.exception_handler(Refusal)
    async def _(http: Request, problem: Refusal) -> Response:
        return problem.response

    @app.exception_handler(BadBody)
    async def _(http: Request, problem: BadBody) -> JSONResponse:
        return JSONResponse(error(str(problem), param=problem.param), 400)

    @app.exception_handler(RequestRefused)
    async def _(http: Request, problem: RequestRefused) -> JSONResponse:
        return JSONResponse(error(problem.reason), 400)

    @app.exception_handler(ChatRefused)
    async def _(http: Request, problem: ChatRefused) -> JSONResponse:
        return JSONResponse(error(problem.reason[:1000], param="messages"), 400)

    @app.exception_handler(TokenizerError)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(str(problem)[:1000]), 400)

    @app.exception_handler(Overloaded)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(str(problem), "server_error"), 503, {"Retry-After": "1"})

    @app.exception_handler(UnknownModel)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(str(problem), "not_found_error", "model", "model_not_found"), 404)

    @app.exception_handler(EngineFailed)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(str(problem), "server_error"), 503)

    @app.exception_handler(RequestFailed)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(f"this request failed: {problem}", "server_error"), 500)

    @app.exception_handler(ClientGone)
    async def _(http: Request, problem: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def _(http: Request, problem: HTTPException) -> JSONResponse:
        message = f"{http.method[:80]} {show(http.scope['path'])[1:-1]}: {problem.detail}"
        return JSONResponse(error(message), problem.status_code, problem.headers)

    @app.exception_handler(Exception)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        """Let the traceback go to the log."""
        return JSONResponse(error("the server failed at this request; its log says why", "server_error"), 500)
