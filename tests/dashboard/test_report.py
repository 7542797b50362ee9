"""`ductile report`: one file that tells the run, whatever stands in its events."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import get_args

import pytest

from ductile.core.instances.instances import Instance, InstanceId, instance_on
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.ledger import IdleCause, Span
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.core.scheduling.orders import Decision, RoleChange
from ductile.dashboard.causes import CAUSES
from ductile.dashboard.curve import FIELD, Curve, round_up
from ductile.dashboard.ownership import MOST_ROWS, ownership
from ductile.dashboard.report import render
from ductile.dashboard.report_command import main
from ductile.dashboard.run_report import read_run_report
from ductile.elastic.decision_log import DecisionLog, ExecutedDecision
from ductile.events.resizes import TrainerResized
from ductile.events.scheduling import OrdersGiven, TrainingHeld
from ductile.events.slots import SlotStarted, SlotWasLost
from ductile.events.steps import StepProfiled, WorkBegan
from ductile.observe import Recorder

SPEEDS = Speeds(DecodeSpeed(0.01), 1e4, TrainSpeed(1e3))
NASTY = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Its visible text, the elements that it has, and everything that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.fetched = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text += data


def write_run(folder, *, profiles=True, said="Slot 1 generate → train: nothing is left to generate."):
    folder.mkdir(exist_ok=True)
    record = Recorder(folder, clock=lambda: 1000.0)
    setting = Setting(Placement((0,), (1,), (), "as said"), Limits(), "model", 2, 4, 2, 64, 128)
    if profiles:
        record.event(WorkBegan(setting, sentence="The model decides."))
    record.event(SlotStarted(0, ("train",), "cpu", 1, sentence="Slot 0 (train) runs on cpu."))
    record.event(OrdersGiven(1.5, 0.1, 0.5, sentence=said))
    record.event(TrainerResized(1, (0,), (0, 1), sentence="Trainer resized from slot 0 to slots 0-1 in 0.21 s."))
    for step in (1, 2):
        start_s = 2.0 * (step - 1)
        spans = (
            Span(0, start_s, start_s + 0.5, "idle", "waiting_for_batch"),
            Span(0, start_s + 0.5, start_s + 2.0, "train"),
            Span(1, start_s, start_s + 1.0, "generate"),
            Span(1, start_s + 1.0, start_s + 2.0, "idle", "queue_full"),
        )
        profile = StepProfile(step, start_s, start_s + 2.0, spans, (4, 7), 9.0, SPEEDS, SwitchCosts(), num_switches=1)
        if profiles:
            record.event(StepProfiled(profile, sentence=f"Step {step} took 2 s."))
        row = {"reward_mean": 0.25 * step, "length_mean": 20.0 + step, "step_s": 2.0, "seconds/publish": 0.012}
        record.metrics(step, {**row, "tokens_per_s_generate": 100.0})
    record.close()
    (folder / "config.toml").write_text('[model]\nname = "models/tiny"\n')
    return folder


def test_the_file_tells_the_run_and_needs_nothing_else(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert f"Written: {run}/report.html" in capsys.readouterr().out
    page = Page((run / "report.html").read_text())
    assert page.fetched == []
    for said in (
        "2 of 2",
        "0.250 first, 0.500 last",
        "train 0, generate 1",
        "37.5% of all slots' time",
        "nothing is left to generate",
        "Trainer resized from slot 0",
        "model.name",
        "models/tiny",
    ):
        assert said in page.text
    assert "Missing" not in page.text


def test_events_are_told_in_the_timeline_s_seconds_and_those_without_a_sentence_are_not(tmp_path):
    now_s = [1000.0]
    record = Recorder(tmp_path, clock=lambda: now_s[0])
    record.event(SlotStarted(0, ("train",), "cpu", 1, sentence="Slot 0 runs."))
    now_s[0] = 1001.5
    record.event(WorkBegan(Setting(Placement((0,), (1,), (), ""), Limits(), "m", 2, 4, 2, 64, 128)))
    now_s[0] = 1004.0
    record.event(OrdersGiven(2.5, sentence="Slot 1 trains."))
    record.close()
    report = read_run_report(tmp_path)
    assert [(each.after_s, each.sentence) for each in report.decisions] == [(2.5, "Slot 1 trains.")]
    assert [each.sentence for each in report.others] == ["Slot 0 runs."]
    page = Page(render(report)).text
    assert "2.5 s" in page
    assert "-1.5 s" not in page, "it was before the timeline begins"


def test_instances_are_told_from_their_beginning_to_their_end(tmp_path):
    now_s = [1000.0]
    record = Recorder(tmp_path, clock=lambda: now_s[0])
    server = Instance(InstanceId("http://there"), "generate", ())
    setting = Setting(Placement((0,), (1, 2, 3), (), ""), Limits(), "model", 2, 4, 2, 64, 128)
    first = (instance_on("generate", (1,)), instance_on("generate", (2, 3)), server)
    record.event(WorkBegan(replace(setting, instances=first)))
    now_s[0] = 1002.0
    change = ExecutedDecision(1.0, 1.0, Decision((RoleChange(1, ("generate",), ("train",)),)))
    DecisionLog(record).changed(change, first, (*first[1:], instance_on("generate", (0,), birth=1)))
    now_s[0] = 1003.0
    record.event(SlotWasLost(3, sentence="Slot 3 was killed."))
    record.close()
    report = read_run_report(tmp_path)
    assert [(life.instance.id, life.began_s, life.ended_s) for life in report.instances] == [
        ("generator-1", 0.0, 2.0),
        ("generator-2-3", 0.0, 3.0),
        ("http://there", 0.0, None),
        ("generator-0.1", 2.0, None),
    ]
    page = Page(render(report)).text
    assert "Generators and scorers (4)" in page
    assert "generator-0.1" in page


def test_events_that_name_no_instances_are_read_as_before(tmp_path):
    """They were written when a generator was a slot: those of the start are known, what came later is not."""
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("version", None)
        row.pop("instances", None)
        for name in ("slots_per_generator", "slots_per_scorer"):
            row.get("limits", {}).pop(name, None)
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = read_run_report(run)
    assert [life.instance.id for life in report.instances] == ["generator-1"]
    assert len(report.profiles) == 2
    with (run / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 1001.0, "kind": "switched", "sentence": "Done.", "slots": [1]}) + "\n")
    assert read_run_report(run).instances == ()


@pytest.mark.parametrize("end", ["→".encode()[:2], b'{"time": 1000.0, "kind": "decided", "sent', b"\0" * 64])
def test_a_run_that_ended_in_the_middle_of_a_line_is_told_to_the_line_before(tmp_path, end):
    run = write_run(tmp_path / "run")
    for name in ("events.jsonl", "metrics.jsonl"):
        with (run / name).open("ab") as stream:
            stream.write(b'{"sentence": "' + end)
    assert main([str(run)]) == 0
    assert "0.250 first, 0.500 last" in Page((run / "report.html").read_text()).text


def test_every_slot_second_is_drawn_and_counted_once(tmp_path):
    report = read_run_report(write_run(tmp_path / "run"))
    assert sum(report.seconds().values()) == pytest.approx(2 * 4.0)
    assert report.seconds()["idle", "queue_full"] == pytest.approx(2.0)
    picture = ownership(report.spans)
    drawn = sum(float(width) for shape in picture.shapes for width in re.findall(r"h(\d[\d.]*)v", shape.path))
    assert drawn == pytest.approx(2 * 4.0)
    assert {shape.title for shape in picture.shapes} >= {"slot 0: train", "slot 1: idle (queue full)"}


def test_idle_time_is_explained_to_who_has_not_read_the_code(tmp_path):
    assert set(CAUSES) == set(get_args(IdleCause))
    page = Page(render(read_run_report(write_run(tmp_path / "run")))).text
    assert "queue full" in page
    assert CAUSES["queue_full"] in page
    assert "queue_full" not in page


def test_a_picture_s_rows_have_names_and_its_axis_lies_under_it(tmp_path):
    """Names, picture and axis are in one grid: an axis beside it would begin elsewhere than the picture."""
    text = render(read_run_report(write_run(tmp_path / "run")))
    grid = text[text.index('<div class="timeline">') : text.index("<h2>Where the time went")]
    assert "slot 0" in Page(grid).text
    assert "slot 1" in Page(grid).text
    assert "4.0 s" in Page(grid).text
    assert re.search(r'id="axis">.*</div>\s*</div>\s*$', grid, re.DOTALL)


@pytest.mark.parametrize("where", ["event", "config", "folder", "policy"])
def test_nothing_that_a_run_says_is_run_by_the_page(tmp_path, where):
    run = write_run(tmp_path / ("<script>alert(1)<" if where == "folder" else "run"), said=NASTY)
    if where == "config":
        (run / "config.toml").write_text(f"[orchestrator.task]\nname = {json.dumps(NASTY)}\n")
    if where == "policy":
        events = run / "events.jsonl"
        events.write_text(events.read_text().replace('"model"', json.dumps(NASTY)))
    text = render(read_run_report(run))
    page = Page(text)
    assert page.tags.count("script") == 1  # the page's own
    assert "<script>alert" not in text
    assert "alert(" in page.text  # it is shown, as text


def test_a_run_without_profiles_has_its_curves_and_says_what_is_missing(tmp_path, capsys):
    run = write_run(tmp_path / "run", profiles=False)
    (run / "config.toml").unlink()
    (tmp_path / "new").mkdir()
    assert main(["--run", str(run), "--output", str(tmp_path / "new/r.html")]) == 0
    assert "Missing: Who did what when" in capsys.readouterr().out
    page = Page((tmp_path / "new/r.html").read_text())
    assert "this run wrote no profiles of its steps" in page.text
    assert "there is no config.toml" in page.text
    assert page.tags.count("figure") == 4
    assert "script" not in page.tags


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    """A slip in the path makes no folder."""
    run = write_run(tmp_path / "run")
    assert main([str(run), "--output", str(tmp_path / "nowhere/r.html")]) == 2
    assert f"there is no folder {tmp_path}/nowhere; make it" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_waiting_is_no_decision(tmp_path):
    """Training waits and goes on several times a step: among the decisions it would hide them."""
    run = write_run(tmp_path / "run")
    record = Recorder(run, clock=lambda: 1001.0)
    for holds in (True, False, True):
        sentence = "Training waits." if holds else "Training goes on."
        record.event(TrainingHeld(at_s=1.0, waits=holds, sentence=sentence))
    record.close()
    report = read_run_report(run)
    assert [each.sentence for each in report.decisions] == ["Slot 1 generate → train: nothing is left to generate."]
    assert [each.sentence for each in report.waits] == ["Training waits.", "Training goes on.", "Training waits."]
    assert "Training waited 2 times" in Page(render(report)).text


def test_profiles_of_another_version_are_said_and_not_drawn(tmp_path):
    run = write_run(tmp_path / "run")
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('"spans"', '"stretches"'))
    report = read_run_report(run)
    assert report.profiles == ()
    assert "of another version" in report.missing[0]
    assert "Who did what when:" in Page(render(report)).text


def test_events_of_another_version_are_shown_by_their_sentences_and_the_timeline_is_drawn(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "events.jsonl").open("a") as stream:
        stream.write('{"time": 1001.0, "kind": "slept", "sentence": "Slot 1 slept."}\n')
        stream.write('{"time": 1002.0, "kind": "saved", "sentence": "Saved step 1."}\n')
    report = read_run_report(run)
    assert [each.sentence for each in report.others][-2:] == ["Slot 1 slept.", "Saved step 1."]
    assert len(report.profiles) == 2
    (missing,) = report.missing
    assert missing.endswith("another version of ductile wrote saved, slept.")


def test_a_run_that_has_just_begun_is_told_too(tmp_path):
    record = Recorder(tmp_path)
    record.event(SlotStarted(0, ("train",), "cpu", 1, sentence="Slot 0 runs."))
    record.close()
    assert "no step is finished" in Page(render(read_run_report(tmp_path))).text


@pytest.mark.parametrize(
    ("make", "said"), [(False, "there is no run"), (True, "holds no run that has begun: events.jsonl")]
)
def test_a_folder_without_a_run_is_told_in_a_sentence(tmp_path, capsys, make, said):
    folder = tmp_path / "x"
    if make:
        folder.mkdir()
    assert main([str(folder)]) == 2
    assert said in capsys.readouterr().err


def test_many_slots_are_drawn_in_part():
    picture = ownership([Span(slot, 0.0, 1.0, "train") for slot in range(200)])
    assert (len(picture.slots), picture.num_slots) == (MOST_ROWS, 200)


def test_a_curve_of_one_step_is_a_point(tmp_path):
    run = write_run(tmp_path / "run")
    rows = (run / "metrics.jsonl").read_text().splitlines(True)
    (run / "metrics.jsonl").write_text(rows[0])
    tags = Page(render(read_run_report(run))).tags
    assert (tags.count("figure"), tags.count("circle"), tags.count("polyline")) == (4, 4, 0)


@pytest.mark.parametrize("values", [[1.0, 3.0, 2.0], [2.0, 2.0], [-5.0, 1e9]])
def test_a_curve_stays_inside_its_picture(values):
    curve = Curve("x", "{}", tuple((float(step), value) for step, value in enumerate(values, 1)))
    assert len(curve.dots) == len(values)
    for x, y in [*curve.dots, *((tick.at, 20) for tick in curve.steps), *((60, tick.at) for tick in curve.values)]:
        assert FIELD.left <= x <= FIELD.right
        assert FIELD.top - 1e-6 <= y <= FIELD.bottom + 1e-6
    assert 3 <= len(curve.values) <= 7
    assert len({tick.text for tick in curve.values}) == len(curve.values)


@pytest.mark.parametrize(
    ("points", "values", "steps"),
    [
        ([(1, 0.3), (40, 0.74)], ["0.2", "0.4", "0.6", "0.8"], ["10", "20", "30", "40"]),
        ([(1, 0.012), (2, 0.009)], ["0.009", "0.010", "0.011", "0.012"], ["1", "2"]),
        ([(7, 2807), (9, 5533)], ["2,000", "3,000", "4,000", "5,000", "6,000"], ["7", "8", "9"]),
        ([(1, -0.5), (300, 0.5)], ["-0.5", "0.0", "0.5"], ["100", "200", "300"]),
        ([(3, 8.0), (4, 8.0)], ["6", "8", "10"], ["3", "4"]),
        ([(3, 0.0)], ["-0.5", "0.0", "0.5"], ["3"]),
    ],
)
def test_axes_have_round_numbers_around_all_points(points, values, steps):
    curve = Curve("x", "{}", tuple((float(step), float(value)) for step, value in points))
    assert [tick.text for tick in curve.values] == values
    assert [tick.text for tick in curve.steps] == steps
    assert [tick.at for tick in curve.values] == sorted((tick.at for tick in curve.values), reverse=True)


@pytest.mark.parametrize(("number", "rounded"), [(0.11, 0.2), (0.2, 0.2), (7, 10), (1e-9, 1e-9), (341, 500), (0, 1)])
def test_round_numbers(number, rounded):
    assert round_up(number) == pytest.approx(rounded)


def test_curves_have_axes_with_numbers(tmp_path):
    text = render(read_run_report(write_run(tmp_path / "run")))
    (figure,) = re.findall(r"<figure><figcaption>reward .*?</figure>", text, re.DOTALL)
    assert re.findall(r'<text class="value"[^>]*>([^<]*)<', figure) == ["0.2", "0.3", "0.4", "0.5"]
    assert re.findall(r'<text class="step"[^>]*>([^<]*)<', figure) == ["1", "2"]
    assert 'class="axes"' in figure


def test_a_run_s_samples_are_shown_and_the_failed_ones_say_why(tmp_path):
    run = write_run(tmp_path / "run")
    row = {"step": 2, "prompt_id": "train/0/1", "prompt": "2 + 2 =", "completion": "<b>4</b>"}
    row |= {"reward": 0.75, "error": None}
    row |= {"finish_reason": "stop", "num_tokens": 17}
    failed = {"completion": "five", "reward": None, "error": "took too long", "finish_reason": "length"}
    (run / "samples.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (row, row | failed)))
    text = render(read_run_report(run))
    table = Page(text[text.index("Samples of the last steps") : text.index("What else happened")])
    assert "b" not in table.tags
    cells = table.text.split("\n")
    assert any("22 + 2 =<b>4</b>0.7517" in cell for cell in cells)
    assert any("22 + 2 =fivefailed: took too long17, cut" in cell for cell in cells)
    assert "Samples of the last steps" not in render(read_run_report(write_run(tmp_path / "without")))
