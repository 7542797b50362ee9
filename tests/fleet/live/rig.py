"""The whole path with real processes: two train ranks, servers, and between them what `ductile rl` has between them.

    rig = Rig(model, folder); rig.open("a", "b", "c")
    rig.run(story)          a coroutine, from a fleet in which all is well; then `Rig.wrong` must have nothing to say
    rig.close()             and nothing is left

Servers and ranks are kept from test to test; what a test has killed comes again before the next one. Deadlines are
half a second to a second, so that a test of what hangs takes two.

Invariants, asserted by `Rig.wrong` after every test:

    I1  every token is of the version that it names, which was published, and which that process had committed
    I2  what a server that serves samples from has the digest of the trainer's weights
    I3  no rank and no update waits longer than the deadlines that it was given
    I4  nothing is left: no process, thread, file, shared memory
    I5  all ranks have had the same commands and the same collectives
    I6  every request has ended, once, or failed with a reason
    I7  epochs and versions never go back
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.config.schema.run import RLConfig
from ductile.core.instances.health import ServerHealth
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.updates.update_parties import UpdateResult
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.servers import Servers as RunServers
from ductile.records import GenerateRequest, Generation, Sampling
from ductile.roles import Failure
from ductile.transport.deadlines import Deadlines
from tests.cluster.processes import processes_with
from tests.fleet.live import ranks
from tests.fleet.live.clients import PROMPT
from tests.fleet.live.reference import Versions
from tests.fleet.live.servers import MARK, Servers
from tests.fleet.live.trainers import Trainers
from tests.fleet.live.watcher import Watcher

NAMES = ("a", "b", "c")
STORY_S = 40.0
BUCKET_S, UPDATE_S, PROBE_S = 0.7, 4.0, 0.5
PATIENCE_S = 6.0
INFERENCE = {
    "health_check_interval_seconds": 0.1,
    "probe_timeout_seconds": PROBE_S,
    "health_check_failure_threshold": 3,
    "progress_timeout_seconds": 1.0,
    "topology_change_cooldown_seconds": 0.0,
    "min_healthy_servers": 1,
    "drain_timeout_seconds": 5.0,
    "max_rejoins": 10_000,
    "flap_limit": 10_000,
    "update_bucket_timeout_seconds": BUCKET_S,
    "update_total_timeout_seconds": UPDATE_S,
    "update_max_attempts": 3,
    "bucket_bytes": 8192,
    "pipeline_slots": 2,
    "max_num_seqs": 16,
}
SILENT_S = 3 * 0.1 + PROBE_S
"""Longest time until a server that falls silent is taken out, by the keys above."""


@dataclass
class Asked:
    """A request of the rig's, and the version that was live when it began."""

    request: GenerateRequest
    live: int
    task: "asyncio.Task[Generation]"
    is_trial: bool


class Rig:
    def __init__(self, model: Path, truth: Versions, folder: Path) -> None:
        self.model, self.truth, self.folder = model, truth, folder
        self.mark = f"rig-{folder.name}-{os.getpid()}"
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "servers")
        self.runner = asyncio.Runner()
        self.servers = Servers(model, folder / "servers", self.mark)
        self.trainers = Trainers(model, folder / "trainers")
        self.watcher = Watcher()
        self.version = 0
        """Newest version that was published, or was tried to."""
        self.live = 0
        """Version that the run has last made live."""
        self.asked: list[Asked] = []
        self.results: list[UpdateResult] = []
        self.changes: list[tuple[float, str, str, str]] = []
        """When, server, state and reason of each change that the fleet told of."""
        self._aborted: set[int] = set()
        self._num_asked = 0
        self._epochs: list[int] = []
        self._slowest_s = 0.0

    # -- Life -------------------------------------------------------------------------------------------------------

    def open(self, *names: str, **inference: Any) -> None:
        self.servers.start(*names)
        self.names = names
        self.runner.run(self._open(inference))
        self.watcher.start()

    async def _open(self, inference: dict[str, Any]) -> None:
        await self.trainers.start()
        await self.open_fleet(**inference)
        await self.publish()

    async def open_fleet(self, *urls: str, **inference: Any) -> None:
        """The run's servers, with these keys of [inference]. urls: by default of all servers of the rig."""
        self.urls = urls or tuple(self.servers[name].url for name in self.names)
        broadcast = inference.pop("broadcast", None)
        config = self.config(self.urls, broadcast, **inference)
        deadlines = Deadlines.same(PATIENCE_S)
        self._epochs = []
        self.trainer = self.trainers.new_remote()
        self.generators = RemoteGenerators(None, (), 16, 16, deadlines)
        fleet = RunRoles(self.trainer, self.generators, None, {})
        self.record = Recorder(self.folder / "run")
        self.run_servers = RunServers(config, fleet, self.record, self.folder / "run", asyncio.Event())
        self.fleet = self.run_servers._fleet
        self.fleet.on_change.add(self._on_change)
        self.run_servers._pool.on_updated.add(self._on_updated)
        await self.run_servers.__aenter__()

    async def close_fleet(self) -> None:
        await self.run_servers.__aexit__(None, None, None)
        self.record.close()

    @asynccontextmanager
    async def fleet_with(self, *urls: str, **inference: Any):
        """Another fleet over the same servers, with other keys of [inference]. Its first version is the next one."""
        await self.close_fleet()
        try:
            await self.open_fleet(*urls, **inference)
            try:
                yield self.fleet
            finally:
                await self.close_fleet()
        finally:
            await self.open_fleet()

    def config(self, urls: tuple[str, ...], broadcast: str | None = None, **inference: Any) -> RLConfig:
        return RLConfig.model_validate(
            {
                "model": {"name": str(self.model)},
                "seq_len": 64,
                "max_steps": 1,
                "output_dir": str(self.folder / "run"),
                "cluster": {"device": "cpu", "patience_timeout_s": PATIENCE_S, "command_timeout_s": 20.0},
                "orchestrator": {
                    "batch_size": 8,
                    "rollouts_per_example": 4,
                    "task": {"type": "import", "import_path": "tests.end_to_end.letters.Letters"},
                    "client": {"base_url": list(urls), "timeout_s": 3.0},
                },
                "trainer": {"weight_broadcast": {"type": broadcast}} if broadcast else {},
                "inference": {"model": {"max_model_len": 64}} | INFERENCE | inference,
            }
        )

    def close(self) -> None:
        self.watcher.stop()
        self.runner.run(self.close_fleet())
        left = self.segments()
        self.runner.run(self.trainers.stop())
        self.runner.close()
        self.servers.close()
        assert not left, f"shared memory is left: {left}"
        processes = processes_with(f"{MARK}={self.mark}")
        assert not processes, f"processes are left: {processes}"
        assert [thread.name for thread in threading.enumerate() if thread.name == "watcher"] == []

    def run(self, story: Coroutine[Any, Any, None], heal: bool = True) -> None:
        self.runner.run(self._run(story, heal))

    async def _run(self, story: Coroutine[Any, Any, None], heal: bool) -> None:
        try:
            if heal:
                await asyncio.wait_for(self.heal(), STORY_S)
            self._begin()
            await asyncio.wait_for(story, STORY_S)
        finally:
            story.close()
            self.clear()
        wrong = await self.wrong()
        assert not wrong, "\n".join(wrong)

    def _begin(self) -> None:
        self.asked, self.results, self.changes, self._epochs = [], [], [], []
        self._slowest_s = 0.0
        self.trainers.skip_trace()
        self._segments = self.segments()

    def clear(self) -> None:
        """Take back all faults; what is stopped goes on."""
        for server in self.servers.all.values():
            server.clear()
            if server.runs:
                server.cont()
        ranks.disarm(self.trainers.points)
        for slot in self.trainers.slots:
            with suppress(ProcessLookupError, KeyError):
                self.trainers.cont_rank(slot)

    async def heal(self) -> None:
        """All servers of the rig serve the live version, and the trainer trains."""
        self.clear()
        if self.trainers.is_lost:
            await self.trainers.begin()
            await self.close_fleet()
            await self.open_fleet()
            await self.publish()
        for name in self.names:
            server = self.servers[name]
            if not server.runs:
                server.kill()
                server.start()
            self.fleet.register_server(server.url)
        try:
            await self.ready(*self.names, within_s=2.0)
        except AssertionError:  # such as where the trainer has gone on from a version that nobody has
            await self.publish()
            await self.ready(*self.names, within_s=8.0)
        for name in [name for name in self.servers.all if name not in self.names]:
            self.servers.remove(self.servers[name])

    # -- What the run does ------------------------------------------------------------------------------------------

    async def publish(self, step: bool = True) -> UpdateResult | None:
        """An optimizer step, and its weights for all servers, as the run's publisher does it. Returns what became of
        them at the servers; None where there was none."""
        if step:
            await self.trainers.step()
        self.version += 1
        version, num_results = self.version, len(self.results)
        self.truth.add(version, await self.trainers.export())
        began_s = time.monotonic()
        manifest = await self.trainer.publish(version)
        try:
            await self.generators.receive(manifest)
            self.live = version
        except BaseException:
            self._aborted.add(version)
            raise
        finally:
            await self.trainer.withdraw(version)
            self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
        return self.results[-1] if len(self.results) > num_results else None

    def ask(
        self, max_tokens: int = 48, prompt: tuple[int, ...] = PROMPT, is_trial: bool = False
    ) -> "asyncio.Task[Generation]":
        """A request of the run's, to whichever server. is_trial: the rig's own, so that one on trial gets one."""
        self._num_asked += 1
        sampling = Sampling(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=self._num_asked)
        request = GenerateRequest(f"request-{self._num_asked}", prompt, sampling)
        task = asyncio.create_task(self.generators.generate(request))
        self.asked.append(Asked(request, self.live, task, is_trial))
        return task

    async def finished(self, within_s: float = 20.0) -> list[Generation]:
        """Every request so far has ended; those of the test that have not failed."""
        if self.asked:
            await asyncio.wait([asked.task for asked in self.asked], timeout=within_s)
        tasks = [asked.task for asked in self.asked if not asked.is_trial]
        return [task.result() for task in tasks if task.done() and task.exception() is None]

    # -- What is seen -----------------------------------------------------------------------------------------------

    def _on_change(self, before: ServerHealth | None, after: ServerHealth, epoch: int) -> None:
        self.changes.append((time.monotonic(), after.address, after.status, after.reason))
        self._epochs.append(epoch)

    def _on_updated(self, result: UpdateResult) -> None:
        self.results.append(result)

    def health(self, name: str) -> ServerHealth | None:
        """What the fleet thinks of the server, also of one that is dead."""
        url = self.servers[name].url
        found = [server for server in self.fleet.state.servers.values() if server.address == url]
        return found[-1] if found else None

    def status(self, name: str) -> str:
        found = self.health(name)
        return found.status if found else ""

    async def until(self, happened: Callable[[], object], within_s: float = 8.0, what: str = "") -> float:
        """Return the seconds that it took."""
        began_s = time.monotonic()
        while not happened():
            told = [(f"{at - began_s:+.2f}", url[-5:], status, why) for at, url, status, why in self.changes[-6:]]
            assert time.monotonic() - began_s < within_s, f"for {within_s:g} s it did not happen: {what} {told}"
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    async def ready(self, *names: str, within_s: float = 8.0) -> float:
        """The servers serve the live version. One that is on trial has a request to prove itself, as in a run."""

        def are_ready() -> bool:
            found = [self.health(name) for name in names]
            if any(each and each.on_trial for each in found) and not self._is_trying():
                self.ask(4, is_trial=True)
            return all(
                each and each.status == "ready" and each.version == self.live and self._has(name, each)
                for name, each in zip(names, found, strict=True)
            )

        return await self.until(are_ready, within_s, f"{names} are ready, but {[self.status(name) for name in names]}")

    def _is_trying(self) -> bool:
        return any(asked.is_trial and not asked.task.done() for asked in self.asked)

    def _has(self, name: str, health: ServerHealth) -> bool:
        """The pool gives requests to the server, and it is the process that runs now."""
        there = any(each.id == health.instance for each in self.generators.instances)
        return there and health.incarnation == self.servers[name].state().incarnation

    async def dead(self, name: str, within_s: float = 4.0) -> float:
        """The fleet has taken the server out. Returns the seconds since now."""
        url = self.servers[name].url
        return await self.until(lambda: self.fleet.state.at(url) is None, within_s, f"{name} is taken out")

    async def taken_out(self, name: str, incarnation: str, within_s: float) -> float:
        """The fleet gives nothing more to this process of the server. Returns the seconds since now."""

        def is_out() -> bool:
            found = self.health(name)
            return found is None or found.incarnation != incarnation or not found.is_serving

        return await self.until(is_out, within_s, f"{name} is taken out")

    def publishing(self) -> "asyncio.Task[UpdateResult | None]":
        return asyncio.create_task(self.publish())

    def left(self, name: str) -> list[str]:
        """The states in which the fleet saw the server, since the story began."""
        return [status for _, url, status, _ in self.changes if url == self.servers[name].url]

    def segments(self) -> list[str]:
        """Shared memory of weights that a rank, a server or nobody has open or mapped, but for the one ring that a rank
        keeps for the next update."""
        names = "ductile-weights", "ductile-buckets"
        found = [f"nobody: {each.name}" for each in Path("/dev/shm").iterdir() if each.name.startswith(names)]
        pids = {f"rank {slot}": process.pid for slot, process in self.trainers.cluster.processes.items()}
        pids |= {name: server.pid for name, server in self.servers.all.items() if server.runs}
        for who, pid in pids.items():
            open_files, mapped = list[str](), list[str]()
            with suppress(OSError):
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        open_files.append(os.readlink(file))
                mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            if who.startswith("rank ") and sum(names[1] in target for target in mapped) <= 1:
                names_here = names[:1]
            else:
                names_here = names
            found += [f"{who}: {target}" for target in open_files if any(name in target for name in names_here)]
            found += [f"{who} maps {target}" for target in mapped if any(name in target for name in names_here)]
        return sorted(found)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.folder / "run" / "events.jsonl") if row["kind"] == kind]

    # -- Invariants -------------------------------------------------------------------------------------------------

    async def wrong(self) -> list[str]:
        """Return a sentence for everything that must never be; see the module."""
        await self.finished(10.0)
        return [
            *self._wrong_tokens(),
            *await self._wrong_weights(),
            *self._too_slow(),
            *await self._left_over(),
            *self._ranks_apart(),
            *self._lost_requests(),
            *self._gone_back(),
        ]

    def _wrong_tokens(self) -> list[str]:
        found = []
        for asked in self.asked:
            if not asked.task.done() or asked.task.cancelled() or asked.task.exception():
                continue
            done = asked.task.result()
            versions = [*done.versions]
            why = self.truth.why_not(asked.request.prompt, [*done.token_ids], [*done.logprobs], versions)
            if why:
                found.append(f"I1: {asked.request.id}: {why}")
            if wrong := {*versions} & self._aborted:
                found.append(f"I1: {asked.request.id} has tokens of {wrong}, which nobody committed")
            if versions and min(versions) < asked.live - 1:
                found.append(f"I1: {asked.request.id} began at {asked.live}, and has tokens of {min(versions)}")
        return found

    async def _wrong_weights(self) -> list[str]:
        found = []
        for name, server in self.servers.all.items():
            health = self.health(name)
            if health is None or health.status != "ready" or not server.runs:
                continue
            with suppress(AssertionError):  # it may be stopped in this moment by nobody: `clear` has been called
                version, digest = await asyncio.to_thread(lambda server=server: server.live)
                if (version, digest) != (health.version, self.truth.digests.get(version)):
                    found.append(
                        f"I2: {name} is ready with version {health.version}, and samples from {version} "
                        f"({digest}, and the trainer's is {self.truth.digests.get(version)})"
                    )
        return found

    def _too_slow(self) -> list[str]:
        most_s = INFERENCE["update_max_attempts"] * UPDATE_S + PATIENCE_S
        slow = [f"I3: an update took {self._slowest_s:.1f} s"] if self._slowest_s > most_s else []
        return slow + [
            f"I3: slot {slot} was at {command} for {seconds:.1f} s"
            for slot, command, seconds in self.trainers.durations()
            if seconds > UPDATE_S + 2.0
        ]

    async def _left_over(self) -> list[str]:
        """What is under way may take a moment to end."""
        with suppress(AssertionError):
            await self.until(lambda: set(self.segments()) <= set(self._segments) and not self._busy(), 3.0)
        left = [each for each in self.segments() if each not in self._segments]
        found = [f"I4: shared memory is left: {left}"] if left else []
        return found + [f"I4: {what}" for what in self._busy()]

    def _busy(self) -> list[str]:
        found = [f"requests are still known: {self.generators.unfinished()}"] if self.generators.unfinished() else []
        for name, server in self.servers.all.items():
            if server.runs and self.status(name) == "ready":
                state = server.state()
                if state.num_running or state.num_waiting:
                    found.append(f"{name} still generates {state.num_running}+{state.num_waiting} requests of nobody")
                if state.paused:
                    found.append(f"{name} is still paused")
        return found

    def _ranks_apart(self) -> list[str]:
        traces = self.trainers.traces()
        living = {slot: lines for slot, lines in traces.items() if slot not in self.trainers.cluster.mailbox.lost}
        if len({tuple(lines) for lines in living.values()}) <= 1:
            return []
        return [f"I5: slot {slot}: {Counter(lines)} {lines[-8:]}" for slot, lines in living.items()]

    def _lost_requests(self) -> list[str]:
        found = []
        for asked in self.asked:
            name, task = asked.request.id, asked.task
            if not task.done():
                found.append(f"I6: {name} has neither ended nor failed")
                task.cancel()
            elif not task.cancelled() and (error := task.exception()):
                if not isinstance(error, Failure) or len(str(error)) < 10:
                    found.append(f"I6: {name} failed with {error!r}")
            elif not task.cancelled():
                done = task.result()
                if len(done.token_ids) != asked.request.sampling.max_tokens or done.id != name:
                    found.append(f"I6: {name} has {len(done.token_ids)} tokens, {done.finish_reason}")
        return found

    def _gone_back(self) -> list[str]:
        found = [f"I7: {why}" for why in self.watcher.violations(self.truth.digests)]
        if self._epochs != sorted(self._epochs):
            found.append(f"I7: epochs of the fleet: {self._epochs}")
        return found
