"""The routes of a router.

| route | what it is |
|---|---|
| POST /v1/completions, /v1/chat/completions, /inference/v1/generate | as one of the servers responds |
| GET /v1/models, /v1/models/{id} | as one of the servers responds |
| GET /health | 200 while there is a server to send a request to, 503 otherwise; with what is known of each |
| GET /liveness | 200 |
| GET /metrics | the router's own counts, for Prometheus |
| /fleet/state, /weights/..., /pause, /resume | 404: they are a server's own, and are asked of each server |
"""

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ductile.config.schema.http_server import HttpServerConfig
from ductile.fleet.router.request_router import NoServer, RequestRouter
from ductile.fleet.router.routed_request import CHAT, COMPLETIONS, TOKENS, read_request
from ductile.transport.http_server.client_gone import ClientGone, unless_gone
from ductile.transport.http_server.middleware import RequestGuard
from ductile.transport.http_server.openai_error import error

OWN_ROUTES = ("/fleet/state", "/weights/{rest:path}", "/kv/{rest:path}", "/pause", "/resume")
"""Routes of servers that are not a router's."""
READ_ASIDE_BYTES = 64 << 10
"""A body of more bytes is read in a thread."""


def create_router_app(router: RequestRouter, config: HttpServerConfig) -> Starlette:
    async def generate(http: Request) -> Response:
        body = bytes(http.scope["state"].pop("body"))
        path, headers = http.scope["path"], http.headers
        if len(body) > READ_ASIDE_BYTES:
            request = await asyncio.to_thread(read_request, path, body, headers)
        else:
            request = read_request(path, body, headers)
        del body
        if request.body.get("kv_transfer_params") is not None:
            message = "kv_transfer_params is what a router says to servers; leave it out"
            return JSONResponse(error(message, param="kv_transfer_params"), 400)
        try:
            return await unless_gone(http, router.respond(request))
        except ClientGone:
            return Response(status_code=499)
        except NoServer as none:
            return _unavailable(none)

    async def models(http: Request) -> Response:
        try:
            return await router.get(http.scope["path"])
        except NoServer as none:
            return _unavailable(none)

    async def health(http: Request) -> Response:
        is_well = bool(router.servers.serving)
        return JSONResponse({"status": "ok" if is_well else "no server", "servers": _shown(router)}, _status(is_well))

    async def liveness(http: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(http: Request) -> Response:
        return Response(router.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def not_here(http: Request) -> Response:
        message = (
            f"{http.scope['path'][:80]} is a route of each server, not of a router before them: ask the servers "
            "themselves (GET /health lists them)"
        )
        return JSONResponse(error(message), 404)

    async def refuse(http: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return JSONResponse(
            error(f"{http.method[:80]} {http.scope['path'][:80]}: {problem.detail}"), problem.status_code
        )

    app = Starlette(
        routes=[
            *(Route(path, generate, methods=["POST"]) for path in (COMPLETIONS, CHAT, TOKENS)),
            *(Route(path, models, methods=["GET"]) for path in ("/v1/models", "/v1/models/{id:path}")),
            Route("/health", health, methods=["GET"]),
            Route("/liveness", liveness, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            *(Route(path, not_here, methods=["GET", "POST", "DELETE"]) for path in OWN_ROUTES),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    app.add_middleware(RequestGuard, config=config, control=None, bucket_bytes=lambda: 0)
    return app


def _shown(router: RequestRouter) -> list[dict[str, Any]]:
    sets = {"prefill": router.prefill, "decode" if router.prefill else "any": router.servers}
    return [
        {"url": each.url, "role": role, "status": each.status, "reason": each.reason}
        for role, servers in sets.items()
        if servers is not None
        for each in servers.all.values()
    ]


def _status(is_well: bool) -> int:
    return 200 if is_well else 503


def _unavailable(none: NoServer) -> Response:
    return JSONResponse(error(str(none), "server_error"), 503, {"Retry-After": "1"})
