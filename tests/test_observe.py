import json
import subprocess
import sys
from contextlib import suppress

import pytest

from ductile.disk import DiskError
from ductile.events.checkpoints import CheckpointSaved, StartedAnew
from ductile.events.rollouts import RewardError
from ductile.observe import JournalUnwritable, Listener, Recorder, Stopwatch, read_jsonl, timed
from tests.full_disk import fill, small_disk


class Watcher:
    def __init__(self):
        self.events, self.rows, self.closed = [], [], False

    def on_event(self, event):
        self.events.append(event)

    def on_metrics(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self, code):
        self.closed = True


def test_events_metrics_and_summary(tmp_path):
    record = Recorder(tmp_path, clock=lambda: 12.5)
    watcher = Watcher()
    record.listeners.append(watcher)
    record.event(CheckpointSaved(3, "/there", sentence="Saved step 3."))
    record.metrics(3, {"loss": 0.5, "kl": float("nan")})
    record.summary({"steps": 3})
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "time": 12.5,
        "kind": "saved",
        "sentence": "Saved step 3.",
        "step": 3,
        "path": "/there",
    }
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "time": 12.5, "loss": 0.5, "kl": None}
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    record.close()
    assert watcher.events[0].sentence == "Saved step 3."
    assert watcher.rows[0][0] == 3
    assert watcher.closed


def test_a_line_is_on_disk_when_the_process_is_killed(tmp_path):
    code = (
        "import os, pathlib, signal; from ductile.observe import Recorder, RunEvent\n"
        f"r = Recorder(pathlib.Path({str(tmp_path)!r})); r.event(RunEvent(sentence='One.')); r.metrics(1, {{'x': 1}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    assert [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")] == ["One."]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_a_cut_line_neither_hides_the_next_one_nor_breaks_reading(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    record = Recorder(tmp_path)
    record.metrics(3, {"x": 3})
    record.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 3]


@pytest.mark.parametrize(
    "end",
    ['{"kind": "decided", "sentence": "2 → 3"}\n'.encode()[:-8], b'{"x": "\xe2\x86', b"\0" * 512, b"17\n", b"null"],
    ids=["half a line", "half a character", "a hole", "no object", "no object, cut"],
)
def test_a_journal_is_read_to_its_last_whole_line_and_continued(tmp_path, end):
    """What a kill, a full disk or a power cut leaves."""
    file = tmp_path / "events.jsonl"
    file.write_bytes('{"kind": "a", "sentence": "→"}\n'.encode() + end)
    assert [row["kind"] for row in read_jsonl(file)] == ["a"]
    record = Recorder(tmp_path)
    record.event(StartedAnew(sentence="Gone on."))
    record.close()
    assert [row["kind"] for row in read_jsonl(file)] == ["a", "started_anew"]


def test_lines_wait_for_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        record, watcher = Recorder(disk), Watcher()
        record.listeners.append(watcher)
        ballast = fill(disk)
        for step in range(1, 4):
            record.metrics(step, {"x": step})
        assert read_jsonl(disk / "metrics.jsonl") == []
        assert (disk / "metrics.jsonl").stat().st_size == 0
        (told,) = watcher.events
        assert told.sentence == (
            f"{disk / 'metrics.jsonl'} cannot be written: No space left on device (0 B free). "
            "Its lines wait in memory until it can be."
        )
        with pytest.raises(DiskError, match=r"summary.json cannot be written: No space left on device \(0 B free\)"):
            record.summary({"steps": 3})
        assert [path.name for path in disk.glob(".*")] == []
        ballast.unlink()
        record.metrics(4, {"x": 4})
        record.close()
        assert [row["step"] for row in read_jsonl(disk / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_line_may_hold_what_other_readers_take_for_a_line_s_end(tmp_path):
    record = Recorder(tmp_path)
    record.event(RewardError("", sentence="Scored 0: it said \u2028 and \x85."))
    record.close()
    assert [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")] == ["Scored 0: it said \u2028 and \x85."]


def test_half_a_character_ends_nothing(tmp_path):
    record, watcher = Recorder(tmp_path), Watcher()
    record.listeners.append(watcher)
    record.event(RewardError(traceback="\ud83d", sentence="Scored 0: no name in '\ud83d'."))
    record.metrics(1, {"reward/\ud83d": 1.0})
    assert record.rewind(1) == 0
    record.close()
    assert read_jsonl(tmp_path / "events.jsonl")[0]["sentence"] == "Scored 0: no name in '\\ud83d'."
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["reward/\ud83d"] == 1.0
    assert watcher.events[0].sentence.isascii(), "so that any terminal takes it"


def test_a_watcher_that_fails_is_told_no_more_and_the_others_are(tmp_path):
    class Gone(Watcher):
        def on_event(self, event):
            raise OSError(5, "Input/output error")

    record, watcher = Recorder(tmp_path), Watcher()
    record.listeners += [Gone(), watcher]
    record.event(CheckpointSaved(3, "", sentence="Saved step 3."))
    record.event(CheckpointSaved(4, "", sentence="Saved step 4."))
    record.close()
    sentences = ["Saved step 3.", "Gone is not told of the run any more: OSError: [Errno 5] Input/output error."]
    assert [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")] == [*sentences, "Saved step 4."]
    assert sorted(event.sentence for event in watcher.events) == sorted([*sentences, "Saved step 4."])


def test_what_the_disk_has_no_room_for_ends_nothing_and_is_told(tmp_path, capsys):
    for name in ("events.jsonl", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    record, watcher = Recorder(tmp_path), Watcher()
    record.listeners.append(watcher)
    record.event(CheckpointSaved(3, "", sentence="Saved step 3."))
    record.event(CheckpointSaved(4, "", sentence="Saved step 4."))
    record.metrics(3, {"loss": 0.5})
    record.samples(3, [{"reward": 0.5}])
    record.close()
    told = [event.sentence for event in watcher.events if isinstance(event, JournalUnwritable)]
    assert len(told) == 3
    assert told[0].startswith(f"{tmp_path / 'events.jsonl'} cannot be written: No space left on device (")
    assert capsys.readouterr().err.splitlines() == [
        f"ductile: {tmp_path / 'events.jsonl'} cannot be written, and its last 2 lines are lost",
        f"ductile: {tmp_path / 'metrics.jsonl'} cannot be written, and its last line is lost",
        f"ductile: {tmp_path / 'samples.jsonl'} cannot be written, and its last line is lost",
    ]


def test_what_was_written_is_known_when_the_folder_is_gone(tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2):
        record = Recorder(folder)
        record.metrics(step, {"x": step})
        if step == 1:
            record.close()
    assert not record.is_lost()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    record.metrics(3, {"x": 3})
    record.summary({"steps": 3})
    assert record.is_lost()
    assert [row["step"] for row in record.rows()] == [1, 2, 3]
    assert list(folder.iterdir()) == []
    record.close()


def test_rewind_keeps_what_the_checkpoint_knows(tmp_path):
    record = Recorder(tmp_path)
    for step in range(1, 6):
        record.metrics(step, {"x": step})
    assert record.rewind(3) == 2
    record.metrics(4, {"x": 40})
    record.close()
    assert [(row["step"], row["x"]) for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_rewind_drops_the_samples_of_steps_that_are_repeated(tmp_path):
    record = Recorder(tmp_path)
    assert not (tmp_path / "samples.jsonl").exists(), "a run that has none writes none"
    for step in (1, 2, 3):
        record.samples(step, [{"reward": 0.5}, {"reward": None}])
    record.close()
    record = Recorder(tmp_path)
    record.rewind(2)
    record.samples(3, [{"reward": 0.25}])
    record.close()
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.5), (1, None), (2, 0.5), (2, None), (3, 0.25)]


def test_stopwatch_adds_up_phases_and_starts_again_after_a_lap():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    with watch("wait"):
        now[0] += 2
    with watch("train"), watch("publish"):
        now[0] += 1
    with watch("wait"):
        now[0] += 3
    assert watch.lap() == (6.0, {"wait": 5.0, "train": 1.0, "publish": 1.0})
    assert watch.lap() == (0.0, {})


def test_a_phase_that_goes_on_over_a_lap_is_all_the_next_ones():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    with watch("wait"):
        now[0] += 2
        ended = watch.lap()
        now[0] += 1
    assert ended == (2.0, {})
    assert watch.lap() == (1.0, {"wait": 3.0})


def test_what_a_block_took_is_told_also_when_it_raises():
    seconds, now = {"load": 1.0}, [0.0]
    with suppress(ValueError), timed(seconds, "load", clock=lambda: now[0]):
        now[0] += 2
        raise ValueError
    assert seconds == {"load": 3.0}


def test_observing_needs_no_torch():
    code = "import sys, ductile.observe; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_was_due_when_a_row_was_written_is_added_to_it(tmp_path):
    told = []

    class Listens(Listener):
        def on_metrics(self, step, metrics):
            told.append((step, dict(metrics)))

    record = Recorder(tmp_path, clock=lambda: 1.0)
    record.listeners.append(Listens())
    record.metrics(1, {"loss": 1.0})
    record.metrics(2, {"loss": 0.5, "eval_reward": float("nan")})
    record.add_metrics(2, {"eval_reward": 0.25})
    record.add_metrics(3, {"eval_reward": 0.5})
    rows = record.rows()
    record.close()
    assert [(row["step"], row.get("loss"), row.get("eval_reward")) for row in rows] == [
        (1, 1.0, None), (2, 0.5, 0.25), (3, None, 0.5),
    ]  # fmt: skip
    assert told[2] == (2, {"loss": 0.5, "eval_reward": 0.25}), "a listener has the whole row"


def test_a_run_that_goes_back_has_no_summary_of_its_former_end(tmp_path):
    record = Recorder(tmp_path)
    record.summary({"steps": 4})
    record.rewind(2)
    record.close()
    assert not (tmp_path / "summary.json").exists()
