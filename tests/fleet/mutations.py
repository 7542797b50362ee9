"""Each of the 16 defects that an elastic fleet was once built with, put back: a test must fail for each.

    python -m tests.fleet.mutations            all of them; the last line is "16 caught, 0 survived"
    python -m tests.fleet.mutations 7 14       these

A defect is an edit of a copy of the sources, and the name of the tests that are to notice. The edit's text must be
found in the sources exactly once, so a defect that no longer applies is told, and counts as one that survived. Tests
that cannot be collected do not catch anything: they must have run, and failed. Where pytest itself was ended, or ran no
test, the defect was neither caught nor did it survive: it is "not run", and the whole is no success.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    """In src/ductile."""
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Defect:
    number: int
    """As in the list that they come from."""
    what: str
    edits: tuple[Edit, ...]
    tests: str
    """What pytest is given: "tests/fleet/live/test_x.py::test_y", or several."""


ROWS, SERVERS, SYNTHETIC = (f"tests/fleet/live/test_{name}.py::" for name in ("rows", "servers", "synthetic"))
JOINS = f"{ROWS}test_a_server_joins_and_all_ranks_do_the_same"
VERSIONS = f"{ROWS}test_versions_reach_all_servers"

DEFECTS = (
    Defect(
        1,
        "a version is sent by the first rank alone",
        (
            Edit(
                "fleet/trainer/remote_trainer.py",
                "begun = await self._all(BeginUpdate(update), UpdateBegun)\n",
                "begun = await ask_each(self._mailbox, {self.layout.first: BeginUpdate(update)}, 5.0, UpdateBegun)\n"
                "                return [begun[self.layout.first].offer]\n",
            ),
        ),
        VERSIONS,
    ),
    Defect(
        2,
        "each rank has its own list of receivers",
        (
            Edit(
                "trainer/train_role.py",
                '        trainer = self._live\n        assert self._instance is not None, "it has a trainer"\n'
                "        return self._outgoing.begin(update,",
                "        import msgspec\n\n        mine = update.receivers[self._assignment.slot :]\n"
                "        update = msgspec.structs.replace(update, receivers=mine)\n"
                '        trainer = self._live\n        assert self._instance is not None, "it has a trainer"\n'
                "        return self._outgoing.begin(update,",
            ),
        ),
        VERSIONS,
    ),
    Defect(
        3,
        "who waits for the cooldown is a target already",
        (
            Edit(
                "fleet/servers/shortage.py",
                'waiting = ("stale", "warming", "joining") if lacks else ("stale", "warming")',
                'waiting = ("stale", "warming", "joining")',
            ),
        ),
        f"{ROWS}test_joins_within_the_cooldown_are_one_change",
    ),
    Defect(
        4,
        "the recorded list is overwritten before it is compared",
        (
            Edit(
                "fleet/servers/shared_state.py",
                "self._untold.append((before, after))",
                "self._untold.append((after, after))",
            ),
        ),
        JOINS,
    ),
    Defect(
        5,
        "a version goes to every receiver that there was, or to none, and not to those that are left",
        (
            Edit(
                "weights/carriers/control.py",
                "self._take(instance, message)\n"
                "        except ConnectionEnded as error:\n"
                '            self.drop(instance, f"{instance} {error}")\n',
                "self._take(instance, message)\n        except ConnectionEnded as error:\n            raise\n",
            ),
        ),
        "tests/weights/test_carriers.py::test_a_receiver_that_dies_or_hangs_is_dropped_and_the_others_get_everything",
    ),
    Defect(
        6,
        "the object that trainers are given lacks the methods",
        (Edit("fleet/elastic_fleet.py", "def consume_group_rebuild_request(", "def consume_group_rebuild_request_("),),
        f"{ROWS}test_a_rebuild_that_was_asked_for_is_not_forgotten",
    ),
    Defect(
        7,
        "what was made for an update is never let go of",
        (
            Edit(
                "weights/carriers/shared_memory.py",
                "        if kept is not None and (kept.num_slots",
                "        if kept is not None and not num_slots and (kept.num_slots",
            ),
            Edit(
                "weights/carriers/shared_memory.py",
                "            kept.close()\n        return SlotRing(",
                "            KEPT.append(kept)\n        return SlotRing(",
            ),
            Edit(
                "weights/carriers/shared_memory.py", "class RingMemory:\n", "KEPT: list = []\n\n\nclass RingMemory:\n"
            ),
        ),
        VERSIONS,
    ),
    Defect(
        8,
        "the ranks' end is waited for first, and nobody watches",
        (
            Edit(
                "fleet/updates/update_attempt.py",
                "while self._remaining and not sending.done():",
                "await asyncio.wait([sending])\n            while not sending.done():",
            ),
            Edit(
                "fleet/updates/update_attempt.py",
                "await self._senders.leave_out(update.update_id, name, self.short[name].reason)",
                "pass",
            ),
            Edit(
                "weights/sender.py",
                "audience = Audience(channels, update.bucket_timeout_s)",
                "audience = Audience(channels, 7200.0)",
            ),
        ),
        f"{ROWS}test_a_receiver_that_hangs_costs_a_bucket_timeout_and_no_more",
    ),
    Defect(
        9,
        "servers are probed one after the other",
        (
            Edit(
                "fleet/servers/monitor.py",
                "self._room = asyncio.Semaphore(MOST_PROBES)",
                "self._room = asyncio.Semaphore(1)",
            ),
        ),
        f"{ROWS}test_a_server_that_answers_slowly_delays_no_other",
    ),
    Defect(
        10,
        "the list is read, changed and written outside the lock",
        (
            Edit(
                "fleet/servers/shared_state.py",
                "        with self._lock:\n            before = self._now\n",
                "        if True:\n            before = self._now\n",
            ),
        ),
        f"{SYNTHETIC}test_eight_threads_change_the_roster_and_nothing_is_lost",
    ),
    Defect(
        11,
        "a pause stops nobody but who asked for it",
        (
            Edit(
                "generator/server/pause_gate.py",
                "await self._runner.pause(message.mode, message.lease_s)",
                "await asyncio.sleep(0)",
            ),
        ),
        f"{SERVERS}test_a_pause_ends_with_its_lease",
    ),
    Defect(
        12,
        "the lock of the trainer is kept after an exception",
        (
            Edit(
                "fleet/trainer/remote_trainer.py",
                "            self.check()\n            yield\n        finally:\n            self._turn.release()\n",
                "            self.check()\n            yield\n        except BaseException:\n            raise\n"
                "        else:\n            self._turn.release()\n",
            ),
        ),
        f"{ROWS}test_a_rank_that_refuses_once_is_asked_again",
    ),
    Defect(
        13,
        "a folder has the name of its version, and a second one of it fails",
        (
            Edit(
                "weights/carriers/disk.py",
                'return Path(update.folder) / f"{PREFIX}{update.update_id}" / sender',
                'return Path(update.folder) / f"kept-{update.version}" / sender',
            ),
            Edit("weights/carriers/disk.py", "            shutil.rmtree(self._folder, ignore_errors=True)\n", ""),
        ),
        f"{ROWS}test_two_servers_that_join_by_disk_get_the_same_version",
    ),
    Defect(
        14,
        "another process on the same port is taken for the one before",
        (
            Edit("core/instances/health.py", "if reply.incarnation != self.incarnation:", "if not reply.incarnation:"),
            Edit(
                "fleet/servers/server_port.py",
                "if self.incarnation and incarnation != self.incarnation:",
                "if self.incarnation and not incarnation:",
            ),
            Edit(
                "fleet/servers/server_port.py",
                "if not self._is_trusted(span.version, span.digest):",
                "if not span.digest:",
            ),
        ),
        f"{ROWS}test_tokens_of_base_weights_are_never_taken",
    ),
    Defect(
        15,
        "a request stays with its server, also when that is gone",
        (
            Edit(
                "fleet/requests/generators.py",
                "                    self._begin_again(entry, error)\n",
                "                    if not isinstance(error, NotTaken):\n                        raise\n"
                "                    self._begin_again(entry, error)\n",
            ),
        ),
        f"{ROWS}test_requests_of_a_killed_server_go_on_elsewhere",
    ),
    Defect(
        16,
        "a server is a mock: it says what is expected, and has other weights",
        (
            Edit(
                "weights/staged_weights.py",
                "swap(self._new.tensors, self.version)",
                "swap(self._live.current.tensors, self.version)",
            ),
        ),
        VERSIONS,
    ),
)


def put_back(defect: Defect, sources: Path) -> None:
    """Raises ValueError where the sources do not have the text that is edited, or have it more than once."""
    for edit in defect.edits:
        file = sources / "ductile" / edit.file
        text = file.read_text()
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{edit.file} has the text {count} times: {edit.old!r}")
        file.write_text(text.replace(edit.old, edit.new))


class Verdict(StrEnum):
    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    NOT_RUN = "not run"


def verdict_of(returncode: int, stdout: str, stderr: str) -> tuple[Verdict, str]:
    """What a run of pytest says of a defect, and the line that shows it."""
    lines = stdout.splitlines()
    # An error of a test's own fixture names the test: the run could not even begin.
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    if returncode == 1 and failed:
        return Verdict.CAUGHT, failed[0].split(maxsplit=1)[1]
    passed = [line for line in lines if re.search(r"\b[1-9]\d* passed\b", line)]
    if returncode == 0 and passed:
        return Verdict.SURVIVED, passed[-1]
    return Verdict.NOT_RUN, f"pytest ended with {returncode}: {lines[-1] if lines else stderr[-300:]}"


def judged(defect: Defect) -> tuple[Verdict, str]:
    """Return what the tests say of a defect, and how."""
    with tempfile.TemporaryDirectory(prefix="defect-") as folder:
        sources = Path(folder, "src")
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            put_back(defect, sources)
        except (ValueError, OSError) as error:
            return Verdict.SURVIVED, str(error)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *defect.tests.split(),
            "-m",
            "",
            "-x",
            "-p",
            "no:cacheprovider",
        ]
        environment = os.environ | {"PYTHONPATH": f"{sources}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [*command, "--durations=0", "--no-header"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Verdict.CAUGHT, f"the tests did not end within {TIMEOUT_S:g} s"
    return verdict_of(ended.returncode, ended.stdout, ended.stderr)


def main(numbers: list[int]) -> int:
    counts = dict.fromkeys(Verdict, 0)
    for defect in DEFECTS:
        if numbers and defect.number not in numbers:
            continue
        began_s = time.monotonic()
        verdict, how = judged(defect)
        counts[verdict] += 1
        print(
            f"{defect.number:2}  {verdict:8}  {time.monotonic() - began_s:4.0f} s  {defect.what}\n      {how}",
            flush=True,
        )
    caught, survived, not_run = counts.values()
    print(f"{caught} caught, {survived} survived{f', {not_run} not run' if not_run else ''}")
    return 0 if caught == sum(counts.values()) and caught else 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
