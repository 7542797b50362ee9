"""The OpenAI-compatible HTTP server over one engine.

| route | what it is |
|---|---|
| GET /v1/models | the one model, with `max_model_len` |
| POST /v1/completions, /v1/chat/completions | text or token ids in, text and token ids out, streamed or whole |
| POST /inference/v1/generate | token ids in, token ids out |
| GET /health | 200 after the engine has done a step, 503 when it cannot |
| GET /liveness | 200 while the engine's thread lives |
| GET /metrics | Prometheus |

A client that goes away aborts its sequences. Errors have OpenAI's form. With an API key everything but `/health` and
`/liveness` asks for it.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ductile.generator.answers import Chat, Completion, Json, error
from ductile.generator.engine import Engine
from ductile.generator.limits import RequestRefused
from ductile.generator.openai_api import ChatRequest, CompletionRequest, TokenRequest
from ductile.generator.runner import EngineFailed, RequestFailed
from ductile.generator.service import TOKEN_MAX_TOKENS, ClientGone, Service, UnknownModel
from ductile.tasks.tokenizer import Tokenizer, TokenizerError


def create_app(
    engine: Engine, tokenizer: Tokenizer, model_id: str, api_key: str | None = None, health_deadline_s: float = 10.0
) -> FastAPI:
    """The engine belongs to the app from its start to its end: nobody else may touch it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        app.state.service = Service(engine, tokenizer, model_id)
        app.state.health_deadline_s = health_deadline_s
        app.state.service.runner.start()
        yield
        await app.state.service.runner.stop()

    def authorise(authorization: Annotated[str, Header()] = "") -> None:
        if api_key is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(401, "this server needs its API key: Authorization: Bearer <server.api_key>")

    app = FastAPI(title="ductile inference", lifespan=lifespan, openapi_url=None)
    app.include_router(_probes)
    app.include_router(_routes, dependencies=[Depends(authorise)])
    _translate_errors(app)
    return app


def _service(http: Request) -> Service:
    return http.app.state.service


Shared = Annotated[Service, Depends(_service)]

_probes = APIRouter()
_routes = APIRouter()


@_probes.get("/health")
async def health(service: Shared, http: Request) -> Json:
    await service.runner.probe(http.app.state.health_deadline_s)
    return {"status": "ok"}


@_probes.get("/liveness")
async def liveness(service: Shared) -> Json:
    service.runner.check_alive()
    return {"status": "ok"}


@_routes.get("/metrics")
async def metrics(service: Shared) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@_routes.get("/v1/models")
async def models(service: Shared) -> Json:
    model = {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "ductile",
        "root": service.model_id,
        "parent": None,
        "max_model_len": service.max_model_len,
        "weight_version": service.runner.stats.version,
    }
    return {"object": "list", "data": [model]}


@_routes.post("/v1/completions")
async def completions(body: CompletionRequest, service: Shared, http: Request) -> Response:
    prompts = await asyncio.to_thread(_prompts, body, service.tokenizer)
    form = Completion(body, service.tokenizer)
    return await service.answer_text(body, form, prompts, TOKEN_MAX_TOKENS, http)


@_routes.post("/v1/chat/completions")
async def chat(body: ChatRequest, service: Shared, http: Request) -> Response:
    messages = [message.for_template() for message in body.messages]
    prompt = await asyncio.to_thread(
        service.tokenizer.apply_chat_template,
        messages,
        body.add_generation_prompt is not False,
        **(body.chat_template_kwargs or {}),
    )
    form = Chat(body, service.tokenizer)
    return await service.answer_text(body, form, [prompt], service.max_model_len, http)


@_routes.post("/inference/v1/generate")
async def generate(body: TokenRequest, service: Shared, http: Request) -> Response:
    return await service.answer_tokens(body, http)


def _prompts(body: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    add_special_tokens = body.add_special_tokens is not False
    return [one if isinstance(one, list) else tokenizer.encode(one, add_special_tokens) for one in body.prompt]


def _translate_errors(app: FastAPI) -> None:
    """Whatever goes wrong is said in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def _(http: Request, problem: RequestValidationError) -> JSONResponse:
        first = problem.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse(error(f"the body is not JSON, from character {first['loc'][-1]} on"), 400)
        param = ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        return JSONResponse(error(f"{param}: {message}" if param else message, param=param or None), 400)

    @app.exception_handler(RequestRefused)
    async def _(http: Request, problem: RequestRefused) -> JSONResponse:
        return JSONResponse(error(problem.reason), 400)

    @app.exception_handler(TokenizerError)
    async def _(http: Request, problem: Exception) -> JSONResponse:
        return JSONResponse(error(str(problem)), 400)

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
        kind = "authentication_error" if problem.status_code == 401 else "invalid_request_error"
        return JSONResponse(error(f"{http.method} {http.url.path}: {problem.detail}", kind), problem.status_code)
