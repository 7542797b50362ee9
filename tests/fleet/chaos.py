"""Seeded faults in a run of three servers and two train ranks, one after the other, while it generates and publishes.

    python -m tests.fleet.chaos --faults 200 --seed 1       last line: "200 passed"
    python -m tests.fleet.chaos --faults 1 --seed 137       the fault of this seed alone

Each fault has a seed of its own (the first one's is `--seed`, and so on), which decides its kind, its victim and its
moment. All along requests are under way at all servers; none may be lost or come twice, nothing may hang, and what the
servers sample from is always a version of the trainer's (the invariants of `tests.fleet.live.rig`).
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

import torch

from tests import warm
from tests.fleet.live.reference import Versions
from tests.fleet.live.rig import BUCKET_S, NAMES, Rig
from tests.full_disk import fill, small_disk
from tests.tiny import make_hf_model, make_model_folder

KINDS = ("kill", "stop", "hang", "slow", "wrong weights", "lost acknowledgement", "full disk", "port reused")
POINTS = ("prepare", "bucket-first", "bucket-mid", "bucket-last", "verify", "commit", "commit-reply", "resume")
FOUND_S, CONSISTENT_S = 2.0, 2.0
FAULT_S = 40.0


class Chaos:
    def __init__(self, rig: Rig, disk: Path | None) -> None:
        self.rig, self.disk = rig, disk
        self.found_s: dict[str, list[float]] = defaultdict(list)
        """Seconds from a fault until its victim was out, by kind."""
        self.consistent_s: list[float] = []
        """Seconds from a death in mid-update until all others had the version."""
        self.slow_condemned = 0

    async def fault(self, seed: int) -> str:
        """Returns what was done."""
        choice = random.Random(seed)
        kind, name, point = choice.choice(KINDS), choice.choice(NAMES), choice.choice(POINTS)
        during = choice.random() < 0.6
        what = f"{kind}, {name}, {point if during else 'at any time'}"
        rig = self.rig
        for _ in range(12):
            rig.ask(choice.randint(10, 80))
        await asyncio.sleep(choice.random() * 0.2)
        match kind:
            case "kill" | "stop":
                await self._end(kind, name, point if during else "")
            case "hang":
                await self._hang(name)
            case "slow":
                await self._slow(name, choice.choice(("prepare", "bucket-mid", "verify", "commit", "state")))
            case "wrong weights":
                await self._wrong(name)
            case "lost acknowledgement":
                await self._lost(name, choice.choice(("commit-reply", "prepare", "verify", "resume")))
            case "full disk":
                await self._full(name)
            case "port reused":
                await self._reused(name, point if during else "")
        return what

    async def _end(self, kind: str, name: str, point: str) -> None:
        rig, server = self.rig, self.rig.servers[name]
        incarnation, publishing = rig.health(name).incarnation, None
        if point:
            server.fault(point, "hold")
            publishing = rig.publishing()
            await rig.until(lambda: server.reached(point) or publishing.done(), 6.0, f"{point} is reached")
        began_s = time.monotonic()
        server.kill() if kind == "kill" else server.stop()
        self.found_s[kind].append(await rig.taken_out(name, incarnation, 6.0))
        if publishing is not None:
            await publishing
            await rig.ready(*(other for other in NAMES if other != name))
            if kind == "kill":
                self.consistent_s.append(time.monotonic() - began_s)

    async def _hang(self, name: str) -> None:
        rig = self.rig
        incarnation = rig.health(name).incarnation
        rig.servers[name].fault("wedge", "on")
        for _ in range(6):  # what it had may be done by now, and an engine that has nothing to do is not known to hang
            rig.ask(20)
        self.found_s["hang"].append(await rig.taken_out(name, incarnation, 8.0))

    async def _slow(self, name: str, point: str) -> None:
        rig = self.rig
        rig.servers[name].fault("slow", "0.01")
        rig.servers[name].fault(point, f"late {BUCKET_S * 0.5}")
        result = await rig.publish()
        self.slow_condemned += bool({"dead", "stale"} & {*rig.left(name)})
        assert result is not None
        assert rig.health(name).instance in result.committed, f"it was slow, and was left out: {result.outcomes}"

    async def _wrong(self, name: str) -> None:
        rig = self.rig
        rig.servers[name].fault("wrong-bytes", "on")
        result = await rig.publish()
        assert result is not None
        outcome = {each.instance: each for each in result.outcomes}[rig.health(name).instance]
        assert outcome.outcome == "stale", outcome
        assert not rig.health(name).is_serving

    async def _lost(self, name: str, point: str) -> None:
        rig = self.rig
        rig.servers[name].fault(point, "drop")
        result = await rig.publish()
        assert result is not None
        await rig.ready(*(other for other in NAMES if other != name))

    async def _full(self, name: str) -> None:
        rig = self.rig
        if self.disk is None:
            rig.servers[name].fault("no-room", "on")
            await rig.publish()
            return
        await rig.finished()
        async with rig.fleet_with(broadcast="filesystem"):
            await rig.publish()
            ballast = fill(self.disk)
            publishing = rig.publishing()
            await rig.until(lambda: "stale" in rig.left(name) or publishing.done(), 6.0, "the disk is full")
            ballast.unlink()  # a run waits for that, and ends where it waits in vain
            await publishing
            await rig.ready(*NAMES)
            await rig.finished()
        await rig.publish()

    async def _reused(self, name: str, point: str) -> None:
        """Another process, with the folder's weights, answers at the address within milliseconds."""
        rig, server = self.rig, self.rig.servers[name]
        publishing = None
        if point:
            server.fault(point, "hold")
            publishing = rig.publishing()
            await rig.until(lambda: server.reached(point) or publishing.done(), 6.0, f"{point} is reached")
        incarnation = rig.health(name).incarnation
        server.restart()
        self.found_s["port reused"].append(await rig.taken_out(name, incarnation, 6.0))
        if publishing is not None:
            await publishing

    def report(self) -> list[str]:
        """Print what was measured. Returns what is not as it must be."""
        wrong = []
        print(f"\n{'fault':<22}{'faults':>7}{'median s':>10}{'longest s':>11}")
        for kind, seconds in sorted(self.found_s.items()):
            print(f"{kind:<22}{len(seconds):>7}{sorted(seconds)[len(seconds) // 2]:>10.2f}{max(seconds):>11.2f}")
            if kind in ("kill", "stop", "hang") and max(seconds) >= FOUND_S:
                wrong.append(f"{kind} was found after {max(seconds):.2f} s, and {FOUND_S:g} s is the most")
        if self.consistent_s:
            seconds = self.consistent_s
            median = sorted(seconds)[len(seconds) // 2]
            print(
                f"{'death in mid-update':<22}{len(seconds):>7}{median:>10.2f}{max(seconds):>11.2f}   until consistent"
            )
            if max(seconds) >= CONSISTENT_S:
                wrong.append(f"the others were consistent {max(seconds):.2f} s after a death in mid-update")
        print(f"slow servers that were condemned: {self.slow_condemned}")
        return wrong + ([f"{self.slow_condemned} slow servers were condemned"] if self.slow_condemned else [])


def run(num_faults: int, first_seed: int) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    torch.set_num_threads(1)
    subprocess.Popen = warm.Popen
    num_passed, failed = 0, []
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        model = make_model_folder(folder / "model")
        truth = Versions(make_hf_model())
        truth.add(0, model)
        rig = Rig(model, truth, folder / "rig")
        weights = folder / "rig" / "run" / "weights"
        weights.parent.mkdir(parents=True)
        disk = small_disk(weights, 4 << 20)
        try:
            chaos = Chaos(rig, disk.__enter__())
        except BaseException:  # mounting is not permitted here
            disk, chaos = None, Chaos(rig, None)
        rig.open(*NAMES)
        try:
            for seed in range(first_seed, first_seed + num_faults):
                began_s = time.monotonic()
                try:
                    done = []

                    async def story(seed: int = seed, done: list[str] = done) -> None:
                        async with asyncio.timeout(FAULT_S):
                            done.append(await chaos.fault(seed))

                    rig.run(story())
                    num_passed += 1
                    print(f"seed {seed}: {done[0]}: {time.monotonic() - began_s:.1f} s", flush=True)
                except Exception as error:
                    failed.append(seed)
                    print(f"seed {seed} FAILED: {''.join(traceback.format_exception(error))[-1500:]}", flush=True)
        finally:
            rig.close()
            if disk is not None:
                disk.__exit__(None, None, None)
    wrong = chaos.report()
    for sentence in wrong:
        print(sentence)
    if failed:
        print(f"seeds that failed: {', '.join(map(str, failed))}")
        print(f"{len(failed)} failed, {num_passed} passed")
    else:
        print(f"{num_passed} passed")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(run(options.faults, options.seed))
