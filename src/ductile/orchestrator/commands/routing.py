"""The process of a router: before servers that it starts itself (`ductile inference`), or that are there already
(`ductile router`). It never imports torch."""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ductile.config.checks.serving_plan import non_cached_tokens, planned_servers, policy_of, router_of, router_port
from ductile.config.schema.http_server import HttpServerConfig
from ductile.config.schema.run import InferenceRunConfig, RouterRunConfig
from ductile.config.schema.secrets import secret_of
from ductile.config.server_address import root_of
from ductile.fleet.router.request_router import RequestRouter
from ductile.fleet.router.routed_servers import RoutedServers
from ductile.fleet.router.router_server import StopSignals, serve_router
from ductile.messages.control_token import token_of
from ductile.orchestrator.commands.server_processes import ServerNotStarted, ServerProcess
from ductile.transport.http_server.listener import listen, url_of
from ductile.transport.http_server.log_limit import log_to_stderr

LOG = logging.getLogger(__name__)
DONE, FAILED = 0, 1

C = TypeVar("C", bound=HttpServerConfig)


def with_key(config: C) -> C:
    """Return the settings with the key itself in the place of the variable that has it."""
    return config.model_copy(update={"api_key": secret_of(config.api_key, config.api_key_var), "api_key_var": None})


def route_between(config: RouterRunConfig) -> int:
    """Route between servers that are there already. Returns the exit code."""

    async def serve(listener: socket.socket) -> int:
        key_of = _key_of(config.server)
        servers = RoutedServers(config, config.policy, key_of, LOG.info)
        prefill = RoutedServers(config, config.policy, key_of, LOG.info) if config.prefill_urls else None
        for url in config.urls:
            servers.add(root_of(url))
        for url in config.prefill_urls:
            assert prefill is not None
            prefill.add(root_of(url))
        router = RequestRouter(servers, prefill, config.non_cached_tokens)
        with StopSignals() as stop:
            print(f"routing to {', '.join(config.urls)} on {url_of(listener, config.server)}", flush=True)
            await serve_router(router, config.server, listener, stop, _never)
        return DONE

    return _run("router", config.server, serve)


def serve_several(config: InferenceRunConfig) -> int:
    """Start the servers that the config asks for, and route between them. Returns the exit code."""
    asked = router_of(config)
    assert asked is not None
    server = config.server.model_copy(update={"port": router_port(config, asked)})

    async def serve(listener: socket.socket) -> int:
        policy = policy_of(asked)
        servers = RoutedServers(config, policy, _key_of(server), LOG.info)
        is_apart = config.deployment.type == "disaggregated"
        prefill = RoutedServers(config, policy, _key_of(server), LOG.info) if is_apart else None
        router = RequestRouter(servers, prefill, non_cached_tokens(asked))
        processes = [
            ServerProcess(config, planned, prefill if prefill and planned.role == "prefill" else servers, LOG.info)
            for planned in planned_servers(config)
        ]
        with StopSignals() as stop:
            tasks = [asyncio.create_task(process.keep()) for process in processes]
            announcing = asyncio.create_task(_announce(config, processes, url_of(listener, server)))
            try:
                await serve_router(router, server, listener, stop, lambda: _until_gone(tasks))
            finally:
                announcing.cancel()
                for process in processes:
                    process.leave()
                ended = await asyncio.gather(*tasks, announcing, return_exceptions=True)
            return (
                FAILED if any(isinstance(each, ServerNotStarted) for each in ended) or not stop.first.is_set() else DONE
            )

    return _run("inference", server, serve)


def _run(command: str, config: HttpServerConfig, serve: Callable[[socket.socket], Awaitable[int]]) -> int:
    log_to_stderr()
    try:
        listener = listen(config)
    except ValueError as error:
        print(f"ductile {command}: {error}", file=sys.stderr)
        return FAILED

    async def main() -> int:
        return await serve(listener)

    with listener:
        return asyncio.run(main())


async def _announce(config: InferenceRunConfig, processes: list[ServerProcess], url: str) -> None:
    """Say where the router is, once all servers are there."""
    for process in processes:
        await process.has_served.wait()
    for process in processes:
        print(f"a server is on {process.url}", flush=True)
    print(f"serving {config.model.name} on {url}", flush=True)


async def _until_gone(tasks: "list[asyncio.Task[None]]") -> None:
    """Return when a server cannot be started at all, or none is left that would be started again."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)


async def _never() -> None:
    await asyncio.Event().wait()


def _key_of(config: HttpServerConfig) -> Callable[[str], str | None]:
    """Return what gives the key of a server: the router's own, or, where there is none, the control token of a server
    of this user's on this machine."""
    return lambda url: config.api_key if config.api_key is not None else token_of(url)
