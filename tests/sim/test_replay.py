"""`ductile replay`: the decisions of simulated runs made again, as the command line does it."""

import json
from functools import partial

import pytest

from ductile.cli import main
from ductile.config.checks.named_policy import named_policy
from ductile.core.scheduling.orders import Decision, RoleChange
from ductile.core.scheduling.policies.rules import Home
from ductile.elastic.policy_decision import BadDecision, decide
from ductile.events.decisions import DecisionJournal
from ductile.observe import Recorder, json_line, read_jsonl
from ductile.sim.run import simulate
from tests.sim.scenarios import scenario

RULES = {"name": "rules", "pre_process": True, "wait_before_last_iter": True}
OWN = {"name": "tests.sim.test_replay.Counts", "pre_process": None, "wait_before_last_iter": None}


class Counts:
    """It remembers how often it was asked, and says so."""

    def __init__(self):
        self.asked = 0

    def decide(self, state):
        self.asked += 1
        # Held only while a completion is to come: with it the policy is asked again.
        return Decision(
            reason=f"asked {self.asked} times", hold_training=bool(state.unfinished) and self.asked % 5 == 1
        )


class Fails:
    """It orders what cannot be when it is asked for the fourth time."""

    def __init__(self):
        self.asked = 0

    def decide(self, state):
        self.asked += 1
        return Decision((RoleChange(99, (), ("train",)),) if self.asked == 4 else ())


class Journalled:
    """A policy with its decisions written down, as `ElasticController` does it."""

    def __init__(self, record, named):
        self.policy, self.journal = named_policy(**named), DecisionJournal(record, named)

    def decide(self, state):
        try:
            decision, _ = decide(self.policy, state)
        except BadDecision as error:
            self.journal.refused(state, str(error))
            self.policy = Home()
            return self.decide(state)
        self.journal.decided(state, decision)
        return decision


def record_decisions(folder, named, *scenarios):
    """One start of a run after the other."""
    for each in scenarios:
        record = Recorder(folder)
        simulate(each, Journalled(record, named))
        record.close()
    return read_jsonl(folder / "decisions.jsonl")


def model(**options):
    return {"name": "model", "pre_process": None, "wait_before_last_iter": None} | options


@pytest.mark.parametrize(
    ("named", "how"),
    [
        (model(), "by the policy model in 2 starts"),
        (model(pre_process=False), "by the policy model, without pre-process in"),
        (RULES, "by the policy rules, with pre-process, with wait before the last iteration in"),
        ({**RULES, "name": "static"}, "by the policy static in"),
        (OWN, "by the policy tests.sim.test_replay.Counts in"),
        ({**OWN, "name": "tests.sim.test_replay.Fails"}, "Fails in 2 starts"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_every_decision_of_a_run_and_of_its_resume_is_made_again(tmp_path, capsys, named, how):
    """A policy that remembers begins anew with each start; one that was refused is asked no more in its start."""
    rows = record_decisions(
        tmp_path, named, scenario(), scenario({"actor": "0", "rollout": "1-3", "inference": 4}, score=True)
    )
    assert main(["replay", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(rows)} decisions")
    assert how in said
    failed = " In 2 of them the policy failed, as it did in the run." if "Fails" in how else ""
    assert said.endswith(f"all are equal.{failed}\n")
    assert sum("refused" in row for row in rows) == (2 if failed else 0)


def test_the_first_decision_that_differs_is_shown_in_words_and_whole(tmp_path, capsys):
    rows = record_decisions(tmp_path, model(), scenario())
    at = next(place for place, row in enumerate(rows) if row["decision"].get("orders"))
    rows[at]["decision"]["prediction"]["go_s"] *= 1 + 2**-52  # the last bit
    rows[-1]["decision"] = {"reason": "not so"}
    (tmp_path / "decisions.jsonl").write_text("".join(map(json_line, rows)))
    assert main(["replay", str(tmp_path)]) == 1
    said, recorded, replayed = capsys.readouterr().out.splitlines()
    assert said.startswith(f"Decision {at + 1}, at ")
    assert 'another prediction: it was "Slot' in said or 'another prediction: it was "slot' in said
    assert json.loads(recorded.removeprefix("recorded: ")) == {"decision": rows[at]["decision"]}
    assert json.loads(replayed.removeprefix("replayed: "))["decision"]["orders"] == rows[at]["decision"]["orders"]


def test_a_policy_that_does_not_fail_any_more_differs_and_one_that_fails_now_too(tmp_path, capsys):
    fails = {**OWN, "name": "tests.sim.test_replay.Fails"}
    for recorded, now, was in ((fails, OWN, "asked 1 times"), (OWN, fails, "no orders")):
        folder = tmp_path / recorded["name"]
        rows = record_decisions(folder, recorded, scenario())
        (folder / "decisions.jsonl").write_text("".join(map(json_line, [{**rows[0], "policy": now}, *rows[1:]])))
        assert main(["replay", str(folder)]) == 1
        assert was in capsys.readouterr().out


def test_a_folder_with_nothing_to_replay_gets_a_sentence(tmp_path, capsys):
    journal = tmp_path / "decisions.jsonl"
    run = partial(main, ["replay", str(tmp_path)])
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert run() == 2
    assert "has no decisions to replay" in capsys.readouterr().err
    rows = record_decisions(tmp_path, model(), scenario())
    for broken, said in (
        (rows[1:], "begin in the middle"),
        ([{**rows[0], "version": 99}], "format 99"),
        ([{**rows[0], "state": {"now_s": "soon"}}], "cannot be read"),
        ([rows[0], {"decision": {}}], "cannot be read"),
        ([{**rows[0], "policy": model(name="no_such.Policy")}], "no_such"),
    ):
        journal.write_text("".join(map(json_line, broken)))
        assert run() == 2
        assert said in capsys.readouterr().err


def test_a_last_line_that_a_kill_has_cut_is_left_out(tmp_path, capsys):
    rows = record_decisions(tmp_path, model(), scenario())
    journal = tmp_path / "decisions.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    record_decisions(tmp_path, model(), scenario())
    assert main(["replay", str(tmp_path)]) == 0
    assert f"{2 * len(rows) - 1} decisions" in capsys.readouterr().out


def test_a_half_written_last_line_is_left_out_and_told(tmp_path, capsys):
    rows, file = record_decisions(tmp_path, model(), scenario()), tmp_path / "decisions.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["replay", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(rows) - 1} decisions")
    assert said.endswith("all are equal. The last line is half written, and was left out.\n")


def test_a_line_that_is_missing_in_the_middle_is_told(tmp_path, capsys):
    record_decisions(tmp_path, model(), scenario())
    file = tmp_path / "decisions.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:3], *lines[4:]]))
    assert main(["replay", str(tmp_path)]) == 2
    assert "of start 1, line 4 is missing or cannot be read; the next one is 5" in capsys.readouterr().err


def test_another_program_s_file_is_told(tmp_path, capsys):
    (tmp_path / "decisions.jsonl").write_text('{"policy": {"name": "model"}}\n')
    assert main(["replay", str(tmp_path)]) == 2
    assert "cannot be read, or is no file of decisions" in capsys.readouterr().err
