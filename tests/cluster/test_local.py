"""How the orchestrator learns that a slot is gone, and how it says so."""

import asyncio
import contextlib
import os
import re
import resource
import signal
from pathlib import Path

import pytest

from ductile.cluster.cluster import StartFailed
from ductile.cluster.local import LocalCluster
from ductile.cluster.node import FREED_MEMORY_STAYS, Devices
from ductile.cluster.processes import ForkedProcess, ProcessServer
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.workers import AssignRole, Generate, OptimStep, Ping, Survey
from ductile.records import GenerateRequest, Sampling
from ductile.roles import Late, Refused, SlotLost
from ductile.transport.sockets import LOOPBACK
from tests.cluster.processes import is_running
from tests.slot.echo import ECHO
from tests.transport.transports import eventually

CPU = ClusterConfig(device="cpu")


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story, 150))


def assert_gone(pids: list[int]) -> None:
    assert not [pid for pid in pids if is_running(pid)]


def test_a_killed_slot_is_told_in_a_sentence_and_fails_what_was_asked(tmp_path: Path):
    async def story():
        async with LocalCluster([0, 1], CPU, tmp_path, ECHO) as cluster:
            mailbox, pid = cluster.mailbox, cluster.processes[1].pid
            await mailbox.ask(1, AssignRole("train", {"sleep_s": 300}, ParallelLayout.of((1,))), 60)
            asking = asyncio.create_task(mailbox.ask(1, OptimStep(1.0), 300))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                sentence = await cluster.death()
            assert sentence == f"slot 1 (train, pid {pid}) was killed by SIGKILL while running OptimStep"
            with pytest.raises(SlotLost, match=re.escape(sentence)):
                await asking
            with pytest.raises(SlotLost, match=re.escape(sentence)):
                await mailbox.ask(1, Ping(), 60)
            await mailbox.ask(0, Ping(), 60)
            pids = [process.pid for process in cluster.processes.values()]
        assert_gone(pids)

    run(story())


def test_a_slot_whose_log_is_on_a_full_disk_lives_on_and_says_what_is_wrong(tmp_path: Path):
    async def story():
        (tmp_path / "slot_0.log").symlink_to("/dev/full")
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            with pytest.raises(Refused, match="does not hold the role"):
                await cluster.mailbox.ask(0, OptimStep(1.0), 60)
            await cluster.mailbox.ask(0, Ping(), 60)

    run(story())


def test_a_process_whose_log_is_on_a_full_disk_says_why_it_ended(tmp_path: Path):
    async def story():
        server = ProcessServer(tmp_path / "log", {}, lambda process: None)
        await server.start(["ductile.slot.store"], 30)
        process = await server.fork("store", "ductile.slot.store:no_such_thing", {}, Path("/dev/full"))
        await asyncio.wait_for(process.ended.wait(), 60)
        assert process.ending == "ended with exit code 1 (KeyError: 'no_such_thing')"
        await server.stop(5)

    run(story())


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("fails", r"slot 0 \(generate, pid \d+\) ended with exit code 1 \(RuntimeError: out of blocks\)"),
        ("kills", r"slot 0 \(generate, pid \d+\) was killed by SIGSEGV"),
    ],
)
def test_a_slot_that_fails_at_its_own_work(tmp_path: Path, step: str, sentence: str):
    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            await cluster.mailbox.ask(0, AssignRole("generate", {"step": step}, ParallelLayout.of((0,))), 60)
            with contextlib.suppress(SlotLost):  # it may fail before its reply to this is out
                await cluster.mailbox.ask(0, Generate((GenerateRequest("a", (1,), Sampling()),)), 60)
            assert re.match(sentence, await asyncio.wait_for(cluster.death(), 60))

    run(story())
    if step == "fails":
        assert "out of blocks" in (tmp_path / "slot_0.log").read_text()


def test_a_mistake_in_the_orchestrators_own_books_ends_the_run_with_its_traceback(tmp_path: Path):
    """Somebody who listens raises: asyncio would only log it, and the run would go on from wrong books, or wait."""

    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            cluster.mailbox.subscribe(lambda slot, event: {}["books"])
            with pytest.raises(KeyError, match="books") as raised:
                await asyncio.wait_for(cluster.death(), 60)  # a heartbeat comes every second
            assert raised.traceback[-1].path == Path(__file__)
            [note] = raised.value.__notes__
            assert re.fullmatch(r"What slot 0.* said \(Heartbeat\) could not be taken in.", note)

    run(story())


def test_a_silent_slot_is_lost_and_killed(tmp_path: Path):
    async def story():
        config = ClusterConfig(device="cpu", heartbeat_timeout_s=2.5)
        async with LocalCluster([0, 1], config, tmp_path, ECHO) as cluster:
            pid = cluster.processes[0].pid
            os.kill(pid, signal.SIGSTOP)
            sentence = await asyncio.wait_for(cluster.death(), 60)
            assert re.fullmatch(
                rf"slot 0 \(pid {pid}\) was silent for \d+ s while idle \(cluster.heartbeat_timeout_s = 2.5\) "
                "and has been killed",
                sentence,
            )
            await eventually(lambda: not is_running(pid))
            await cluster.mailbox.ask(1, Ping(), 60)

    run(story())


@pytest.mark.parametrize("name", ["store", "server"])
def test_a_helper_process_that_dies_ends_the_run_too(tmp_path: Path, name: str):
    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            server = cluster._home._server
            processes = {process.name: process for process in server._processes.values()}
            pid = {"store": processes["store"], "server": server._server}[name].pid
            slots = [process.pid for process in cluster.processes.values()]
            os.kill(pid, signal.SIGKILL)
            sentence = await asyncio.wait_for(cluster.death(), 60)
            called = {"store": "store", "server": "process server"}[name]
            assert sentence == f"the process {called!r} (pid {pid}) was killed by SIGKILL"
        assert_gone([pid, *slots])

    run(story())


def test_stopping_does_not_wait_for_a_slot_that_hangs(tmp_path: Path):
    async def story():
        async with LocalCluster([0, 1, 2], CPU, tmp_path, ECHO) as cluster:
            await cluster.mailbox.ask(0, AssignRole("train", {"sleep_s": 300}, ParallelLayout.of((0,))), 60)
            hanging = asyncio.create_task(cluster.mailbox.ask(0, OptimStep(1.0), 300))
            await cluster.mailbox.ask(1, AssignRole("train", {}, ParallelLayout.of((0,))), 60)
            os.kill(cluster.processes[2].pid, signal.SIGSTOP)
            pids = [process.pid for process in cluster.processes.values()]
            async with asyncio.timeout(60):
                await cluster.stop()
            hanging.cancel()
            await asyncio.wait([hanging])
        assert_gone(pids)
        assert "echo is closed" in (tmp_path / "slot_1.log").read_text(), "an orderly end closes the roles"

    run(story())


def test_a_role_that_cannot_be_imported_is_told_at_the_start(tmp_path: Path):
    async def story():
        with pytest.raises(StartFailed, match=r"importing ductile.nowhere failed: ModuleNotFoundError.*processes.log"):
            async with LocalCluster([0], CPU, tmp_path, {"train": "ductile.nowhere:TrainRole"}):
                pass

    run(story())


def test_a_process_server_that_never_was_ready_is_told_by_start_alone(tmp_path: Path):
    """Were its end reported too, and before the reason, nobody would hear what could not be imported."""

    async def story():
        exited: list[ForkedProcess] = []
        server = ProcessServer(tmp_path / "log", {}, exited.append)
        with pytest.raises(StartFailed, match=r"importing ductile.nowhere failed"):
            await server.start(["ductile.nowhere"], 30.0)
        assert server._hearing is not None
        await asyncio.wait_for(server._hearing, 60)
        await server.stop(5.0)
        assert exited == []

    run(story())


def test_more_slots_than_devices_are_refused(tmp_path: Path):
    async def story():
        config = ClusterConfig(device="cuda")
        with pytest.raises(StartFailed, match=r"slot 99 has no device: this machine has \d+ CUDA devices"):
            async with LocalCluster([99], config, tmp_path, ECHO):
                pass

    run(story())


def test_neighbours_share_a_gpu_where_it_has_several_slots():
    devices = Devices(2, slots_per_device=2)
    assert [devices.of(slot) for slot in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    with pytest.raises(StartFailed, match=r"slot 4 has no device: .* 2 CUDA devices, with 2 slots on each"):
        devices.of(4)
    assert [Devices(2, 2, first_slot=4).of(slot) for slot in (4, 7)] == ["cuda:0", "cuda:1"], "of another node"


def test_a_process_that_cannot_be_started_is_told_with_what_there_was_too_little_of(tmp_path: Path):
    async def story():
        server = ProcessServer(tmp_path / "log", {}, lambda process: None)
        await server.start(["ductile.slot.store"], 30)
        assert server._server is not None
        pid = server._server.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        allowed = len(os.listdir(f"/proc/{pid}/fd")) + 1
        hosting = ("store", "ductile.slot.store:host", {"host": LOOPBACK}, tmp_path / "log")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (allowed, hard))
        with pytest.raises(StartFailed, match=f"store cannot be started: .*at most {allowed} open files: ulimit -n"):
            await server.fork(*hosting)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert is_running((await server.fork(*hosting)).pid), "the server is as good as before"
        await server.stop(5)

    run(story())


def test_a_fork_that_is_given_up_leaves_no_process(tmp_path: Path):
    async def story():
        exited: list[ForkedProcess] = []
        server = ProcessServer(tmp_path / "log", {}, exited.append)
        await server.start(["ductile.slot.store"], 30)
        hosting = ("store", "ductile.slot.store:host", {"host": LOOPBACK}, tmp_path / "log")
        for _ in range(10):
            forking = asyncio.create_task(server.fork(*hosting))
            await asyncio.sleep(0)
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
        assert [process.ending for process in exited] == ["was killed by SIGKILL"] * 10
        again = await server.fork(*hosting)
        assert is_running(again.pid)
        assert_gone([process.pid for process in exited])
        await server.stop(5)
        assert_gone([again.pid])

    run(story())


def test_a_fork_that_is_given_up_before_it_is_asked_for_is_not_waited_for(tmp_path: Path):
    async def story():
        exited: list[ForkedProcess] = []
        server = ProcessServer(tmp_path / "log", {}, exited.append)
        await server.start(["ductile.slot.store"], 30)
        hosting = ("store", "ductile.slot.store:host", {"host": LOOPBACK}, tmp_path / "log")
        async with server._sending:  # as another one's request that the server is slow to take
            forking = asyncio.create_task(server.fork(*hosting, deadline_s=1000))
            await asyncio.sleep(0)
            forking.cancel()
            await asyncio.wait([forking], timeout=60)
            assert forking.cancelled()
        again = await server.fork(*hosting)
        await server.stop(5)
        assert exited == [again], "none but this one was started"

    run(story())


def test_a_process_that_comes_after_its_deadline_is_killed_and_is_not_taken_for_the_next_one(tmp_path: Path):
    async def story():
        exited: list[ForkedProcess] = []
        server = ProcessServer(tmp_path / "log", {}, exited.append)
        await server.start(["ductile.slot.store"], 30)
        assert server._server is not None
        hosting = ("store", "ductile.slot.store:host", {"host": LOOPBACK}, tmp_path / "log")
        os.kill(server._server.pid, signal.SIGSTOP)
        with pytest.raises(StartFailed, match="did not start store"):
            await server.fork(*hosting, deadline_s=0.2)
        os.kill(server._server.pid, signal.SIGCONT)
        second = await server.fork(*hosting)
        await eventually(lambda: len(server._processes) == 1)
        assert [process.pid for process in server._processes.values()] == [second.pid]
        assert is_running(second.pid)
        assert exited == []
        await server.stop(5)
        assert_gone([second.pid])

    run(story())


@pytest.mark.usefixtures("cold")
def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path):
    async def story():
        config = ClusterConfig(device="cpu", start_timeout_s=0.05)
        with pytest.raises(StartFailed, match=r"within 0.05 s"):
            async with LocalCluster([0], config, tmp_path, ECHO):
                pass

    run(story())


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("users", [None, "glibc.malloc.arena_max=2"])
def test_what_the_user_says_about_memory_goes_before_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if users:
        monkeypatch.setenv("GLIBC_TUNABLES", users)

    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            path = Path(f"/proc/{cluster.processes[0].pid}/environ")
            environment = (await asyncio.to_thread(path.read_text)).split("\0")
        # Of what it has read, glibc leaves the part before the first colon.
        expected = users or FREED_MEMORY_STAYS["GLIBC_TUNABLES"].partition(":")[0]
        assert f"GLIBC_TUNABLES={expected}" in environment

    run(story())


def test_a_slot_that_is_added_to_measured_ones_is_measured_too(tmp_path: Path):
    """Without it the trainer could not say how fast its devices are together, once the slot is one of them."""

    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            asked: list[Survey] = []
            listen_in(cluster, asked)
            assert await cluster.add([1]) == [1]
            assert asked == [], "nobody has asked how fast slots are"
            first = await cluster.survey("float32")
            assert first.keys() == {0, 1}
            asked.clear()
            assert await cluster.add([1, 2]) == [2]
            assert asked == [Survey("float32")]
            assert (await cluster.survey())[2].peak_flops_per_s is None, "only whoever asks for it is told"

    run(story())


def test_a_slot_that_cannot_be_measured_does_not_start(tmp_path: Path):
    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            await cluster.survey("float32")

            ask_all = cluster.mailbox.ask_all

            async def late(commands, *how):
                if not any(isinstance(command, Survey) for command in commands.values()):
                    return await ask_all(commands, *how)
                return {slot: Late(f"slot {slot} did not reply to Survey") for slot in commands}

            cluster.mailbox.ask_all = late
            cluster.ends_without(lambda slot: slot == 0)
            with pytest.raises(StartFailed, match="slot 1 did not reply to Survey"):
                await cluster.add([1])
            assert 1 in cluster.mailbox.lost
            await cluster.mailbox.ask(0, Ping(), 60)

    run(story())


def test_two_that_want_the_same_slot_get_one_process(tmp_path: Path):
    async def story():
        async with LocalCluster([0], CPU, tmp_path, ECHO) as cluster:
            assert await asyncio.gather(cluster.add([1]), cluster.add([1, 2])) == [[1], [2]]
            await asyncio.gather(*(cluster.mailbox.ask(slot, Ping(), 60) for slot in range(3)))

    run(story())


def listen_in(cluster: LocalCluster, asked: list[Survey]) -> None:
    """Note what slots are asked of their devices."""
    ask_all = cluster.mailbox.ask_all

    async def noting(commands, *how):
        asked.extend(command for command in commands.values() if isinstance(command, Survey))
        return await ask_all(commands, *how)

    cluster.mailbox.ask_all = noting
