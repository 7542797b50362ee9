"""The control words over a real socket: who is let in, and what becomes of everybody else."""

import asyncio
import io
import json
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ductile.core.layout.choice.layout_text import parse_sizes
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.events.resizes import TrainerResized
from ductile.messages.control import (
    VERSION,
    Resized,
    ResizeRequest,
    Response,
    RunFailed,
    RunStatus,
    SlotStatus,
    Unfit,
)
from ductile.orchestrator.control import control, run_commands
from ductile.orchestrator.control.control import RESIZE_S, Run
from ductile.orchestrator.control.endpoint import Endpoint
from ductile.orchestrator.control.run_commands import slot_list, times
from ductile.orchestrator.control.status_table import show, status_table

STATUS = RunStatus(
    command="sft",
    pid=7,
    step=3,
    max_steps=9,
    running_s=1.5,
    epoch=2,
    trainer=ParallelLayout.of((0, 1), dp_replicate=2),
    changing="move, to slots 0-3",
    slots=(
        SlotStatus(0, 11, "cpu", ("train",), "train", {"train": 2.0, "idle": 1.0}),
        SlotStatus(1, 12, "cpu", (), "lost", {"idle": 3.0}),
    ),
    changes=(TrainerResized(epoch=2, before=(0,), after=(0, 1), step=2, sentence="Trainer resized."),),
    lost={1: "slot 1 was killed by SIGKILL"},
)


async def respond(ask):
    if not isinstance(ask, ResizeRequest):
        return STATUS
    if ask.train is None:
        layout = ParallelLayout.of(range(9, 13), **parse_sizes(ask.layout))
        return Resized("resized", "Done.", 1, layout, layout)
    if len(ask.train) == 3:
        raise Unfit("three is too many")
    if len(ask.train) == 4:
        raise RunFailed("it died")
    layout = ParallelLayout.of(ask.train, **ask.sizes)
    return Resized("resized", "Done.", 1, layout, layout)


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def serve(folder: Path, story: Callable[[dict[str, Any]], Any], respond: Callable[[Any], Awaitable[Any]] = respond):
    """Run `story(what control.json says)` in a thread, beside the endpoint."""

    async def both() -> Any:
        async with Endpoint(folder, respond):
            return await asyncio.to_thread(story, json.loads((folder / control.FILE).read_text()))

    return asyncio.run(asyncio.wait_for(both(), 100))


def say(known: dict[str, Any], line: bytes) -> Response:
    with socket.create_connection((known["host"], known["port"]), timeout=60) as connection:
        connection.sendall(line)
        return msgspec.json.decode(connection.makefile("rb").readline(), type=Response)


def test_a_run_is_asked_and_replies(tmp_path: Path):
    def story(known: dict[str, Any]) -> None:
        run = Run(tmp_path)
        assert run.status() == STATUS
        assert run.resize(train=range(2), dp_replicate=2).after == ParallelLayout.of((0, 1), dp_replicate=2)
        assert run.resize(layout="pp=2,tp=2").after == ParallelLayout.of(range(9, 13), pp=2, tp=2)
        with pytest.raises(Unfit, match="three is too many"):
            run.resize(train=range(3))
        with pytest.raises(RunFailed, match="it died"):
            run.resize(train=range(4))
        assert stat.S_IMODE((tmp_path / control.FILE).stat().st_mode) == 0o600
        assert known["host"] == "127.0.0.1"

    serve(tmp_path, story)
    assert not (tmp_path / control.FILE).exists()
    with pytest.raises(Unfit, match=r"there is no run in .*: nothing has run there yet"):
        Run(tmp_path).status()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "processes.log").touch()
    with pytest.raises(Unfit, match=r"no run is at work in .*, and nothing is recorded of it yet: .*processes.log"):
        Run(tmp_path).status()


@pytest.mark.parametrize("after", [[], [{"kind": "resized", "sentence": "Trainer resized."}]])
def test_how_the_last_run_ended_is_said_also_where_a_resize_ended_after_it(tmp_path: Path, after: list[dict[str, str]]):
    ended = {"kind": "failed", "sentence": "Slot 1 did not reply."}
    write_jsonl(tmp_path / "events.jsonl", [{"kind": "slot_started", "sentence": ""}, ended, *after])
    with pytest.raises(Unfit, match=r"the last one has ended\. Slot 1 did not reply\. What it did"):
        Run(tmp_path).status()
    write_jsonl(tmp_path / "events.jsonl", [ended, {"kind": "slot_started", "sentence": ""}, *after])
    with pytest.raises(Unfit, match=r"there is no run in"):
        Run(tmp_path).status()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token": "0" * 64}, "does not have the run's token"),
        ({"version": 1}, f"speaks version {VERSION} of the control words"),
        ({"ask": {"type": "explode"}}, "the request is none: Invalid value 'explode'"),
        ({"ask": {"type": "resize", "train": ["0"]}}, "the request is none: Expected `int`"),
        ({"ask": {"type": "status", "also": 1}}, "the request is none: Object contains unknown field `also`"),
        ({"ask": {"type": "resize", "train": [0] * 600_000}}, "the request is none: Separator is"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str):
    def story(known: dict[str, Any]) -> None:
        request = {"version": VERSION, "token": known["token"], "ask": {"type": "status"}} | change
        reply = say(known, json.dumps(request).encode() + b"\n")
        assert reply.unfit
        assert sentence in reply.error
        assert Run(tmp_path).status() == STATUS, "it serves others as before"

    serve(tmp_path, story)


@pytest.mark.parametrize(
    ("train", "sizes"), [("0-1", {}), (None, {"layout": 4}), (3, {}), ([0.5], {}), ([0], {"tp": "1"})]
)
def test_what_is_no_layout_is_not_asked_for(tmp_path: Path, train: Any, sizes: Any):
    with pytest.raises(Unfit, match=r"write slots as numbers, such as range\(4\) or \[0, 2, 5\]"):
        Run(tmp_path).resize(train, **sizes)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_wait_has_an_end_or_nothing_is_asked(tmp_path: Path, timeout_s: float):
    with pytest.raises(Unfit, match=r"the timeout is .* s; it must be above 0, and finite"):
        Run(tmp_path).resize([0], timeout_s=timeout_s)


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"GET / HTTP/1.1\r\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n"])
def test_noise_is_refused_with_a_sentence(tmp_path: Path, line: bytes):
    serve(tmp_path, lambda known: say(known, line).error.index("the request is none"))


def test_who_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ductile.orchestrator.control.endpoint.READ_S", 0.5)

    def story(known: dict[str, Any]) -> None:
        silent = [socket.create_connection((known["host"], known["port"]), timeout=60) for _ in range(3)]
        assert [connection.recv(1) for connection in silent] == [b""] * 3
        assert Run(tmp_path).status() == STATUS
        for connection in silent:
            connection.close()

    serve(tmp_path, story)


def test_who_says_nothing_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ductile.orchestrator.control.endpoint.READ_S", 3600)
    monkeypatch.setattr("ductile.orchestrator.control.endpoint.MAX_SILENT", 2)

    def story(known: dict[str, Any]) -> None:
        silent = [socket.create_connection((known["host"], known["port"]), timeout=60) for _ in range(4)]
        assert Run(tmp_path).status() == STATUS
        assert [connection.recv(1) for connection in silent[:3]] == [b""] * 3, "the longest silent ones made room"
        silent[3].sendall(b"{}\n")
        assert b"the request is none" in silent[3].recv(1000)
        for connection in silent:
            connection.close()

    serve(tmp_path, story)


def test_what_a_large_run_says_of_itself_is_read(tmp_path: Path):
    lost = {slot: "it was killed by SIGKILL while running TransferState; " * 50 for slot in range(1000)}
    large = msgspec.structs.replace(STATUS, lost=lost)

    async def much(ask):
        return large

    def story(known: dict[str, Any]) -> None:
        assert Run(tmp_path).status() == large

    serve(tmp_path, story, much)


def test_a_run_that_ends_meanwhile_or_does_not_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ductile.orchestrator.control.endpoint.CLOSE_S", 0.1)
    waiting: list[Any] = []
    asked = threading.Event()

    async def never(ask):
        if not isinstance(ask, ResizeRequest):
            asked.set()
        await asyncio.sleep(60)

    def story(known: dict[str, Any]) -> None:
        with pytest.raises(RunFailed, match=r"did not reply within 0\.2 s"):
            Run(tmp_path).resize([0], timeout_s=0.2)
        # This one is still waiting when the run ends.
        connection = socket.create_connection((known["host"], known["port"]), timeout=60)
        request = {"version": VERSION, "token": known["token"], "ask": {"type": "status"}}
        connection.sendall(json.dumps(request).encode() + b"\n")
        assert asked.wait(60)
        waiting.append(connection)

    serve(tmp_path, story, never)
    assert b"the run ended before it had a response" in waiting[0].recv(1000)
    waiting[0].close()


def left_by(machine: str) -> str:
    address = {"host": "127.0.0.1", "port": 1, "token": "x"}
    return json.dumps({"version": 2, "machine": machine, "pid": 1, "started": -1, **address})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read"),
        ('{"version": 1}', "cannot be read"),
        (left_by(socket.gethostname()), "process 1, which wrote its control.json, has ended"),
        (left_by("elsewhere"), "is, or was, on the machine elsewhere: ask it from there"),
    ],
)
def test_a_stale_or_broken_file(tmp_path: Path, text: str, sentence: str):
    (tmp_path / control.FILE).write_text(text)
    with pytest.raises(Unfit, match=sentence):
        Run(tmp_path).status()


def test_a_run_that_has_ended_is_not_said_to_be_starting(tmp_path: Path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(Unfit, match=r"the last one has ended \(or one has just been started, and has no") as said:
        Run(tmp_path).status()
    assert "still starting" not in str(said.value)


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(Unfit, match="no such folder"):
        Run(tmp_path / "nowhere").status()


@pytest.mark.parametrize(
    ("text", "slots"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), (" 0 - 1, 5", (0, 1, 5)), ("3,1", (3, 1))]
)
def test_slot_lists(text: str, slots: tuple[int, ...]):
    assert slot_list(text) == slots


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(
            (text, "is neither a slot nor a range; write 0-3 or 0,2,5")
            for text in ("", "x", "0,", "-1", "0-99999", "1.5")
        ),
        ("3-1", "'3-1' runs backwards; write 1-3"),
        ("0,1,0-2", "names a slot twice"),
    ],
)
def test_what_is_no_slot_list(text: str, says: str):
    with pytest.raises(Unfit, match=f"--train {text}.*{says}"):
        slot_list(text)


@pytest.mark.parametrize("flag", ["--dp-replicate", "--replicas"])
def test_the_command_line_asks_for_copies(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    layout = ParallelLayout.of((0, 1), dp_replicate=2)

    def resize(run: Run, *words: Any, **sizes: int) -> Resized:
        asked.append((*words, sizes))
        return Resized("unchanged", "Said.", 2, layout, layout)

    monkeypatch.setattr(Run, "resize", resize)
    assert run_commands.resize([str(tmp_path), "--train", "0-1", flag, "2"]) == run_commands.DONE
    assert asked == [((0, 1), RESIZE_S, "", {"dp_replicate": 2})]


def test_the_command_line_asks_for_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    layout = ParallelLayout.of(range(4), pp=2, tp=2)

    def resize(run: Run, *words: Any) -> Resized:
        asked.append(words)
        return Resized("unchanged", "Said.", 2, layout, layout)

    monkeypatch.setattr(Run, "resize", resize)
    assert run_commands.resize([str(tmp_path), "--layout", "pp=2,tp=2"]) == run_commands.DONE
    assert run_commands.resize([str(tmp_path), "--layout", "pp=2,tp=2", "--train", "0-3"]) == run_commands.DONE
    assert asked == [(None, RESIZE_S, "pp=2,tp=2"), ((0, 1, 2, 3), RESIZE_S, "pp=2,tp=2")]


@pytest.mark.parametrize(("outcome", "what"), [("resized", "resize"), ("rolled_back", "attempt")])
def test_a_resize_is_told_as_its_user_sees_it(outcome: Any, what: str):
    layout = ParallelLayout.of((0,))
    phases = {"assign": 0.5, "transfer": 0.1}
    result = Resized(
        outcome, "Said.", 2, layout, layout, pause_s=0.214, took_s=1.3, seconds=phases, slot_seconds=phases
    )
    assert times(result) == f"The {what} took 1.30 s, and kept training still for 0.21 s of them."


def test_the_picture_shows_who_does_what():
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(status_table(STATUS))
    text = console.export_text()
    for part in (
        "sft: step 3/9, membership epoch 2, pid 7",
        "trainer: slots 0-1 in 2 copies (changing: move, to slots 0-3)",
        "train",
        "lost: slot 1 was killed by SIGKILL",
        "step 2: Trainer resized.",
    ):
        assert part in text


def test_the_picture_shows_where_in_the_mesh_a_slot_is():
    """Slots 3 and 1 are the stages of a pipeline; slot 0 generates."""
    slots = tuple(SlotStatus(slot, 11 + slot, "cpu", ("train",), "train", {"train": 2.0}) for slot in (0, 1, 3))
    trainer = ParallelLayout.of((3, 1), pp=2)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(status_table(msgspec.structs.replace(STATUS, trainer=trainer, slots=slots, changing="")))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["trainer:", "slots", "1,3", "as", "pp", "2"] in lines
    assert ["slot", "pid", "roles", "doing", "pp", "train"] in lines
    assert [line[3:5] for line in lines if line[:1] in (["1"], ["3"])] == [["train", "1"], ["train", "0"]]
    assert ["0", "11", "train", "train", "2.0", "s"] in lines


def test_the_picture_has_devices_where_there_are_gpus_and_every_role_whatever_the_mesh(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    trainer = ParallelLayout.of(range(8), dp_replicate=2, cp=2, tp=2)
    seconds = {"train": 2645.5, "generate": 123.2, "score": 10.0, "publish": 33.0, "switch": 0.3, "idle": 1345.0}
    slots = tuple(SlotStatus(n, 28300 + n, "cuda:0", ("train", "generate"), "generate", seconds) for n in range(8))
    show(msgspec.structs.replace(STATUS, trainer=trainer, slots=slots))
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()][2:]
    assert header[:8] == ["slot", "pid", "device", "roles", "doing", "dp_replicate", "cp", "tp"]
    assert [row[:5] for row in rows if row[0] == "5"] == [["5", "28305", "cuda:0", "train,", "generate"]]


def test_the_picture_cuts_nothing_on_a_terminal_of_80_columns():
    seconds = {"train": 2645.5, "generate": 123.2, "score": 0.0, "publish": 33.0, "switch": 0.3, "idle": 1345.0}
    slots = (SlotStatus(0, 28305, "cpu", ("train", "generate"), "generate", seconds),)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(status_table(msgspec.structs.replace(STATUS, slots=slots)))
    text = console.export_text()
    assert "…" not in text
    for word in (*seconds, "train,", "28305", "2646 s", "123 s", "0.0 s", "33.0 s", "0.3 s", "1345 s"):
        assert word in text


def test_a_run_that_has_failed_is_told_with_its_reason(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1.0, "kind": "failed", "sentence": "The disk is full.", "traceback": ""}\n'
    )
    with pytest.raises(Unfit, match=r"the last one has ended\. The disk is full\. What it did: ductile report"):
        Run(tmp_path).status()
