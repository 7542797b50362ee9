"""When slots begin and end their traces."""

import asyncio
import json
from pathlib import Path

from ductile.config.schema.trace import TraceConfig
from ductile.messages.workers import BeginTrace, Done, EndTrace, Ping, Traced
from ductile.orchestrator.commands.tracing import SlotTracer, Tracing
from ductile.transport.mailbox import Mailbox
from tests.transport.memory_transport import MemoryTransport


def respond(slot, command):
    return Traced(1.0, 0.25) if isinstance(command, EndTrace) else Done()


async def told() -> None:
    """Let what was asked for be sent and replied to."""
    for _ in range(20):
        await asyncio.sleep(0)


def names(transport: MemoryTransport) -> list[object]:
    """Each command that was sent, since this was asked last: the steps from which slots trace, and the ends."""
    said = [
        (slot, Path(command.file).stem if isinstance(command, BeginTrace) else type(command).__name__)
        for slot, command in transport.sent
    ]
    transport.sent.clear()
    return said


def test_chosen_steps_of_chosen_slots_are_traced(tmp_path: Path) -> None:
    async def story() -> None:
        slots = [0, 1]
        transport = MemoryTransport(dict.fromkeys(range(4), respond))
        mailbox = Mailbox(transport)
        tracing = Tracing(TraceConfig(steps=[2, 3, 5], slots=[0, 2]), tmp_path)
        tracing.begin(SlotTracer(mailbox, 5.0), lambda: slots, 0)
        await told()
        assert names(transport) == []
        tracing.on_metrics(1, {})
        sent_later = asyncio.create_task(mailbox.ask(0, Ping(), 5.0))
        await sent_later
        assert names(transport) == [(0, "slot_0_step_2"), (0, "Ping")]
        slots.append(2)
        tracing.on_metrics(2, {})
        await told()
        assert names(transport) == [(2, "slot_2_step_3")], "slot 0 goes on, and slot 2 is there now"
        tracing.on_metrics(3, {})
        await told()
        assert names(transport) == [(0, "EndTrace"), (2, "EndTrace")]
        tracing.on_metrics(4, {})
        await told()
        assert names(transport) == [(0, "slot_0_step_5"), (2, "slot_2_step_5")]
        mailbox.lose(2, "slot 2 was killed")
        await told()
        await tracing.wait_for_replies()
        assert names(transport) == [(0, "EndTrace")], "whatever the steps were, all ends with the run"

    asyncio.run(story())


def test_a_slot_that_cannot_trace_costs_its_trace_alone(capsys) -> None:
    async def story() -> dict[int, Traced]:
        transport = MemoryTransport(dict.fromkeys(range(2), respond))
        transport.fail(1, "error", on=EndTrace)
        tracer = SlotTracer(Mailbox(transport), 5.0)
        assert tracer.begin({0: "", 1: "", 2: ""}) == [0, 1, 2]
        assert tracer.begin({0: "", 1: ""}) == [], "they trace already"
        tracer.end()
        return await tracer.replies()

    assert asyncio.run(story()) == {0: Traced(1.0, 0.25)}
    said = capsys.readouterr().err
    assert "Slot 1 has no trace: " in said
    assert "Slot 2 has no trace: " in said


def test_the_whole_trace_is_of_this_life_of_the_run(tmp_path: Path, capsys) -> None:
    async def story() -> Tracing:
        for life in ("earlier", "later"):
            tracing = Tracing(TraceConfig(steps=[1]), tmp_path)
            row = {"time": tracing._began_s + 1 - 5 * (life == "earlier"), "kind": "data", "sentence": life}
            with (tmp_path / "events.jsonl").open("a") as events:
                events.write(json.dumps(row) + "\n")
        tracing.begin(SlotTracer(Mailbox(MemoryTransport({0: respond})), 5.0), lambda: [0], 0)
        await tracing.wait_for_replies()
        return tracing

    asyncio.run(story()).close(0)
    said = capsys.readouterr()
    assert f"The trace is in {tmp_path / 'trace' / 'trace.json'}" in said.out
    assert "slot 0 has no trace in slot_0_step_1.json (FileNotFoundError)" in said.err
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["later"]


def test_a_run_that_ends_before_its_traced_steps_says_so(tmp_path: Path, capsys) -> None:
    Tracing(TraceConfig(), tmp_path).close(1)
    assert "There is no trace" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()
