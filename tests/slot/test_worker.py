"""What a slot's process does with commands: one real cluster of one slot for the whole file."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from ductile.cluster.local import LocalCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.messages.resizes import Prepare
from ductile.messages.workers import (
    CLOCK_EVENT,
    AssignRole,
    BeginTrace,
    Done,
    EndTrace,
    Finished,
    Generate,
    OptimStep,
    Ping,
    Publish,
    ReleaseRole,
    Score,
    Scores,
    Survey,
)
from ductile.records import GenerateRequest, Sample, Sampling
from ductile.roles import Late, Refused, StaleEpoch
from tests.slot.echo import ECHO
from tests.transport.transports import eventually


class Harness:
    """The cluster and the event loop that it lives in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = asyncio.Runner()
        self.cluster = LocalCluster([0], ClusterConfig(device="cpu"), folder, ECHO)
        self.runner.run(self.cluster.__aenter__())
        self.mailbox = self.cluster.mailbox

    def ask(self, command, deadline_s: float = 60.0):
        return self.runner.run(self.mailbox.ask(0, command, deadline_s))

    def close(self) -> None:
        self.runner.run(self.cluster.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory):
    harness = Harness(tmp_path_factory.mktemp("logs"))
    yield harness
    harness.close()


@pytest.fixture
def assign(slot: Harness):
    held = []

    def take(role, **settings):
        slot.ask(AssignRole(role, settings, ParallelLayout.of((0,))))
        held.append(role)

    yield take
    for role in held:
        slot.ask(ReleaseRole(role))


def test_several_roles_live_in_one_slot(slot: Harness, assign):
    assign("train")
    assign("score")
    assert slot.ask(OptimStep(2.0)) == Done()
    assert slot.ask(Score((Sample((5, 6), (False, True)),), "policy")) == Scores(((5.0, 6.0),))
    assert slot.mailbox.describe(0) == f"slot 0 (train, score, pid {slot.cluster.processes[0].pid})"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (OptimStep(1.0), r"slot 0.*OptimStep failed: ValueError: this slot does not hold the role 'train'"),
        (ReleaseRole("score"), r"does not hold the role 'score' \(it holds: none\)"),
        (
            AssignRole("train", {"refuse": True}, ParallelLayout.of((0,))),
            r"AssignRole failed: ValueError: cannot live in slot 0",
        ),
    ],
)
def test_a_failed_command_is_refused_and_the_slot_lives_on(slot: Harness, command, sentence: str):
    with pytest.raises(Refused, match=sentence) as raised:
        slot.ask(command)
    assert "Traceback" in raised.value.__notes__[0]
    assert slot.ask(Ping()) == Done()


def test_taking_a_role_twice_is_refused(slot: Harness, assign):
    assign("train")
    with pytest.raises(Refused, match="holds the role 'train' already"):
        slot.ask(AssignRole("train", {}, ParallelLayout.of((0,))))


def test_a_failing_handler_keeps_its_role(slot: Harness, assign):
    assign("train", fail_on="OptimStep")
    with pytest.raises(Refused, match="OptimStep failed: RuntimeError: as the settings ask"):
        slot.ask(OptimStep(1.0))
    assert isinstance(slot.ask(Publish(0)), Scores)


def test_a_role_that_cannot_be_closed_can_be_held_again(slot: Harness, assign):
    slot.ask(AssignRole("train", {"fail_on": "close"}, ParallelLayout.of((0,))))
    with pytest.raises(Refused, match="ReleaseRole failed: RuntimeError: as the settings ask"):
        slot.ask(ReleaseRole("train"))
    assign("train")
    assert slot.ask(OptimStep(1.0)) == Done()


def test_commands_run_in_order_and_late_ones_still_run(slot: Harness, assign):
    assign("train", sleep_s=0.3)
    with pytest.raises(Late, match=r"did not reply to OptimStep within 0.05 s"):
        slot.ask(OptimStep(1.0), deadline_s=0.05)
    assert slot.ask(Ping()) == Done()
    assert slot.mailbox.unused == {"Done": 1}


def test_what_is_done_beside_neither_waits_for_a_command_nor_makes_an_older_one_stale(slot: Harness, assign):
    assign("train", sleep_s=0.5)
    order = ResizeOrder(1, ParallelLayout.of((0,)), ParallelLayout.of((0,)))

    async def story():
        running = [asyncio.create_task(slot.mailbox.ask(0, OptimStep(1.0), 60)) for _ in range(2)]
        await asyncio.sleep(0.1)
        slot.mailbox.next_epoch()
        assert await slot.mailbox.ask(0, Prepare(order), 60) == Done()
        assert not any(task.done() for task in running)
        assert slot.mailbox.doing(0) == "running OptimStep"
        assert await asyncio.gather(*running) == [Done(), Done()]

    slot.runner.run(story())


def test_own_work_goes_on_between_commands_and_comes_as_events(slot: Harness, assign):
    assign("generate")
    finished: list[str] = []

    def listen(_: int, event) -> None:
        if isinstance(event, Finished):
            finished.extend(generation.id for generation in event.generations)

    leave = slot.mailbox.subscribe(listen)
    requests = tuple(GenerateRequest(str(n), (1,), Sampling()) for n in range(20))
    assert slot.ask(Generate(requests)) == Done()
    slot.runner.run(eventually(lambda: len(finished) == 20))
    assert finished == [str(n) for n in range(20)]
    leave()


def test_heartbeats_come_while_the_main_thread_works(slot: Harness, assign):
    assign("train", sleep_s=2.5)

    async def story():
        asking = asyncio.create_task(slot.mailbox.ask(0, OptimStep(1.0), 60))
        await eventually(lambda: slot.mailbox.heartbeats[0].busy_for_s > 1)
        assert slot.mailbox.heartbeats[0].busy_with == "OptimStep"
        assert not asking.done()
        await asking

    slot.runner.run(story())


def test_an_idle_slot_uses_no_cpu(slot: Harness):
    pid = slot.cluster.processes[0].pid

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    slot.runner.run(asyncio.sleep(2))
    assert cpu_ticks() - before <= 0.05 * os.sysconf("SC_CLK_TCK") * 2


def test_settings_of_the_process(slot: Harness):
    pid = slot.cluster.processes[0].pid
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    assert ignored & 1 << 1, "SIGINT must be ignored: the orchestrator decides"


def test_the_log_has_what_the_slot_printed(slot: Harness, assign):
    assign("train")
    slot.ask(OptimStep(123.5))
    log = (slot.folder / "slot_0.log").read_text()
    assert "echo is ready" in log
    assert "loss denominator 123.5" in log


def test_a_role_joins_beside_what_another_one_does(slot: Harness, assign):
    assign("train", sleep_s=1.0)

    async def story():
        running = asyncio.create_task(slot.mailbox.ask(0, OptimStep(1.0), 60))
        await asyncio.sleep(0.1)
        joining = AssignRole("generate", {}, ParallelLayout.of((0,)), joining=True)
        assert await slot.mailbox.ask(0, joining, 60) == Done()
        assert not running.done()
        assert await running == Done()

    slot.runner.run(story())
    slot.ask(ReleaseRole("generate"))


def test_a_role_that_is_to_be_released_first_is_held_again_after_that(slot: Harness, assign):
    """A scorer on several slots of which one was lost begins again on those that are left, too."""
    assign("generate")
    assign("train", sleep_s=0.5)

    async def story():
        joining = AssignRole("generate", {}, ParallelLayout.of((0,)), joining=True)
        commands = [OptimStep(1.0), ReleaseRole("generate"), joining]
        assert await asyncio.gather(*(slot.mailbox.ask(0, command, 60) for command in commands)) == [Done()] * 3

    slot.runner.run(story())
    assert slot.mailbox.roles(0) == ("train", "generate")


def test_a_role_that_waited_for_its_release_joins_beside_what_another_one_does(slot: Harness, assign):
    assign("generate")
    assign("train", sleep_s=1.0)

    async def story():
        joining = AssignRole("generate", {"made_in_s": 0.5}, ParallelLayout.of((0,)), joining=True)
        commands = [OptimStep(1.0), ReleaseRole("generate"), joining, OptimStep(1.0)]
        asked = [asyncio.create_task(slot.mailbox.ask(0, command, 60)) for command in commands]
        await asked[2]
        assert not asked[3].done(), "that step did not wait until the role was made"
        assert await asyncio.gather(*asked) == [Done()] * 4

    slot.runner.run(story())


def test_a_release_that_waits_is_not_of_a_role_that_is_assigned_after_it(slot: Harness, assign):
    assign("train", sleep_s=0.5)

    async def story():
        alone = ParallelLayout.of((0,))
        refused, joining = (AssignRole("generate", each, alone, joining=True) for each in ({"refuse": True}, {}))
        step = asyncio.create_task(slot.mailbox.ask(0, OptimStep(1.0), 60))
        with pytest.raises(Refused, match="cannot live in slot 0"):
            await slot.mailbox.ask(0, refused, 60)
        assert not step.done(), "the release will wait for it"
        released, joined, _ = await asyncio.gather(
            *(slot.mailbox.ask(0, command, 60) for command in (ReleaseRole("generate"), joining)),
            step,
            return_exceptions=True,
        )
        assert isinstance(released, Refused), "the slot did not hold it then"
        assert joined == Done()

    slot.runner.run(story())
    slot.ask(ReleaseRole("generate"))


def test_a_role_that_is_released_while_it_is_made_is_not_held(slot: Harness):
    async def story():
        joining = AssignRole("generate", {"made_in_s": 0.5}, ParallelLayout.of((0,)), joining=True)
        making = asyncio.create_task(slot.mailbox.ask(0, joining, 60))
        await asyncio.sleep(0.1)
        with pytest.raises(Refused, match="holds the role 'generate' already"):
            await slot.mailbox.ask(0, joining, 60)
        assert await slot.mailbox.ask(0, ReleaseRole("generate"), 60) == Done()
        with pytest.raises(Refused, match="the role 'generate' was released while it was made"):
            await making

    slot.runner.run(story())
    with pytest.raises(Refused, match=r"does not hold the role 'generate' \(it holds: none\)"):
        slot.ask(ReleaseRole("generate"))


def test_an_older_epoch_is_refused(slot: Harness, assign):
    slot.mailbox.next_epoch()
    made_in = slot.mailbox.epoch
    assign("train")
    slot.mailbox.epoch = made_in + 4
    assert slot.ask(Ping()) == Done()
    slot.mailbox.epoch = made_in + 3
    told = f"StaleEpoch: the command is of epoch {made_in + 3}, this slot is in epoch {made_in + 4}"
    with pytest.raises(StaleEpoch, match=told):
        slot.ask(OptimStep(1.0))
    slot.mailbox.epoch = made_in + 5
    assert slot.ask(OptimStep(1.0)) == Done()
    assert slot.ask(Publish(0)) == Scores(((float(made_in), 0.0),)), "a role keeps the epoch in which it was made"


def test_a_role_of_an_older_epoch_is_refused_and_not_begun(slot: Harness, assign):
    now = slot.mailbox.next_epoch()
    assert slot.ask(Ping()) == Done()
    slot.mailbox.epoch = now - 1
    with pytest.raises(StaleEpoch):
        slot.ask(AssignRole("generate", {}, ParallelLayout.of((0,)), joining=True))
    slot.mailbox.epoch = now
    assign("generate")


def test_a_reply_that_comes_later_keeps_no_command_waiting(slot: Harness, assign) -> None:
    assign("train", later_s=0.5)

    async def story() -> None:
        later = asyncio.create_task(slot.mailbox.ask(0, OptimStep(2.0), 60))
        failing = asyncio.create_task(slot.mailbox.ask(0, OptimStep(0.0), 60))
        assert await slot.mailbox.ask(0, Ping(), 60) == Done()
        assert not later.done()
        assert not failing.done()
        assert await later == Done()
        with pytest.raises(Refused, match="OptimStep failed: ZeroDivisionError"):
            await failing

    slot.runner.run(story())


def test_a_slot_says_what_its_device_is_and_measures_it_when_asked(slot: Harness):
    said = slot.ask(Survey())
    assert (said.device_name, said.reserved_bytes, said.peak_flops_per_s, said.peak_source) == ("cpu", None, None, None)
    assert said.used_bytes > 10 << 20
    measured = slot.ask(Survey("float32"), 60.0)
    assert measured.peak_source == "measured"
    assert measured.peak_flops_per_s > 1e8
    again = slot.ask(Survey("float32"))
    assert again.peak_flops_per_s == measured.peak_flops_per_s, "once in a process"


def test_a_slot_is_traced_from_one_command_to_another(slot: Harness, tmp_path: Path):
    file = tmp_path / "traces" / "slot_0.json"
    assert slot.ask(BeginTrace(str(file))) == Done()
    with pytest.raises(Refused, match="this slot is being traced already"):
        slot.ask(BeginTrace())
    assert not file.exists()
    traced = slot.ask(EndTrace())
    assert (traced.seconds > 0, traced.communication_s) == (True, 0.0)
    assert any(event["name"].startswith(CLOCK_EVENT) for event in json.loads(file.read_text())["traceEvents"])
    with pytest.raises(Refused, match="this slot is not being traced"):
        slot.ask(EndTrace())
    assert slot.ask(BeginTrace()) == Done()
    assert slot.ask(EndTrace()).seconds > 0, "it may be traced again"
