"""The process that serves: what `ductile inference` becomes, or, with `--bench`, starts and asks."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ductile.config.checks.on_disk import read_spec
from ductile.config.reading.dump import to_table
from ductile.config.schema.bench import InferenceBenchConfig, load_of, own_server
from ductile.config.schema.run import InferenceRunConfig
from ductile.deaths import ending
from ductile.orchestrator.commands.bench import written
from ductile.orchestrator.commands.serving_bench import ServingBench, run_rounds
from ductile.roles import Failure, Late, Refused, SlotLost

START_S = 1800.0
"""Seconds that a server has to load its model."""
LEAVE_S = 10.0
"""Seconds that a server has to end once it is told to."""
DONE, FAILED = 0, 1


def become_server(config: InferenceRunConfig) -> int:
    """Replace this process by the server, so that signals and the exit code are the server's own."""
    os.execv(sys.executable, server_command(in_memory(config.model_dump_json())))


def bench_server(config: InferenceRunConfig, bench: InferenceBenchConfig) -> int:
    """Returns the exit code. A server that does not start says itself why."""
    alone = config.model_copy(update={"bench": None, "server": own_server(config.server)})
    try:
        with _server(alone) as url:
            found = asyncio.run(_bench(config, bench, url))
    except Failure as error:
        if said := str(error):
            print(f"ductile inference: {said}", file=sys.stderr)
        return FAILED
    shown = written(found.figures(), found.table(), bench.output_json)
    Console(soft_wrap=True, highlight=False, markup=False).print(shown)
    return DONE


async def _bench(config: InferenceRunConfig, bench: InferenceBenchConfig, url: str) -> ServingBench:
    load, spec = load_of(bench, config), read_spec(config.model.name)
    if spec is None:
        raise Refused(f"the config.json of {config.model.name} cannot be read any more")
    found = ServingBench(load, bench, to_table(config))
    async for each in run_rounds(url, load, spec.vocab_size, bench.steps):
        print(f"Round {each.number} of {bench.steps}: {each.tokens_per_s:,.0f} tokens/s generated.", flush=True)
        found.add(each)
    return found


@contextmanager
def _server(config: InferenceRunConfig) -> Iterator[str]:
    """The address of a server that lives as long as this, and never longer than this process.

    Raises SlotLost, without words where the server has said why it cannot start, and Late.
    """
    fd = in_memory(config.model_dump_json())
    words = [*server_command(fd), str(os.getpid())]
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, pass_fds=(fd,))
    finally:
        os.close(fd)
    try:
        assert process.stdout is not None
        with process.stdout as said:
            if not select.select([said], [], [], START_S)[0]:
                raise Late(f"the server did not load its model within {START_S:g} s")
            if not (line := said.readline()):
                process.wait(LEAVE_S)
                raise SlotLost("")
            yield line.split()[-1]
    except Failure as error:
        if (code := process.poll()) is None or code >= 0:
            raise
        raise SlotLost(f"the server {ending(code)}") from error
    finally:
        process.terminate()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server_command(fd: int) -> list[str]:
    """Return the command of a server whose config is in this file."""
    return [sys.executable, "-P", "-m", "ductile.generator.server.serve", f"/proc/self/fd/{fd}"]


def in_memory(config: str) -> int:
    """Return a config in JSON, which may hold a key, as a file that is in memory only."""
    fd = os.memfd_create("ductile-inference-config", 0)
    with open(os.dup(fd), "w", encoding="utf-8") as file:
        file.write(config)
    return fd
