import io
import os
import pty
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ductile.core.scheduling.facts.ledger import Activity, SlotLedger
from ductile.dashboard.follower import NUM_EVENTS, Follower
from ductile.dashboard.run_display import show, step_line
from ductile.dashboard.view import BARS, STYLES, SlotView, ViewEvent, ViewState, duration, render, sparkline
from ductile.events.checkpoints import CheckpointSaved
from ductile.events.rollouts import RewardError
from ductile.events.run_state import RunState
from ductile.events.scheduling import TrainingHeld
from ductile.events.steps import Evaluated


def text_of(state, width=100):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(state))
    return console.export_text()


def test_render_shows_progress_trends_slots_and_events():
    text = text_of(
        ViewState(
            title="ductile rl: runs/x",
            max_steps=10,
            step=4,
            elapsed_s=80,
            rewards=(0.1, 0.2, 0.3, 0.4),
            lengths=(20, 21, 22, 23),
            eval_rewards=(0.15, 0.45),
            tokens_per_s_generate=2310.4,
            tokens_per_s_train=5000,
            off_policy_mean=0.5,
            slots=(SlotView(0, ("train",), "train", 0.8), SlotView(1, ("generate", "score"), "idle", 0.25)),
            events=(ViewEvent(61, "Saved step 4 to runs/x/state/step_4."),),
        )
    )
    for part in (
        "ductile rl: runs/x",
        "step 4/10",
        "1:20, about 2:00 left",
        "0.400",
        "from 0.100",
        "▁▃▆█",
        "2,310 generated, 5,000 trained",
        "0.50 versions",
        "slot 1",
        "generate, score",
        "80% busy",
        "1:01  Saved step 4 to runs/x/state/step_4.",
    ):
        assert part in text


def test_render_before_the_first_step_and_in_a_narrow_terminal():
    assert "step 0/10" in text_of(ViewState("x", 10))
    assert max(map(len, text_of(ViewState("x", 10, rewards=(1.0,) * 500), width=40).splitlines())) <= 40


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 40))
def test_a_sparkline_is_never_longer_than_asked_and_never_fails(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS)


def test_a_sparkline_leaves_no_value_out():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([0] * 50 + [9], width=3) == "▁▁█"
    assert sparkline([5, 5, 5]) == "▁▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.9, "1:05"), (3723, "1:02:03")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_every_activity_has_its_colour_on_the_terminal():
    assert set(STYLES) == set(get_args(Activity))


def test_follower_keeps_the_picture():
    now, run = [100.0], RunState()
    follower = Follower("t", 5, run, lambda: now[0], began_s=1000.0)
    account = SlotLedger.opened(1, 100.0)
    follower.on_slot(["generate"], account)
    now[0] = 102
    follower.on_slot(["generate"], account.switch("generate", 102.0))
    follower.on_metrics(0, {"eval_reward": 0.2})
    follower.on_metrics(1, {"reward_mean": 0.3, "loss": 1.0, "tokens_per_s_train": 9.0})
    for number in range(20):
        run.apply(CheckpointSaved(number, "", sentence=f"event {number}", time_s=999.5 + number))
    now[0] = 108
    state = follower.state
    assert (state.step, state.rewards, state.eval_rewards, state.losses) == (1, (0.3,), (0.2,), (1.0,))
    assert state.elapsed_s == 8
    assert state.slots == (SlotView(1, ("generate",), "generate", 0.75),)
    assert state.events == tuple(ViewEvent(number - 0.5, f"event {number}") for number in range(14, 20))


def test_waiting_does_not_push_the_other_events_out_of_the_picture():
    run = RunState()
    follower = Follower("ductile rl", 4, run, clock=lambda: 0.0, began_s=0.0)
    run.apply(CheckpointSaved(1, "", sentence="Saved step 1."))
    for _ in range(NUM_EVENTS):
        run.apply(TrainingHeld(0.0, True, sentence="Training waits."))
    assert [event.sentence for event in follower.state.events] == ["Saved step 1."]


def test_without_a_terminal_there_is_one_line_a_step():
    out = io.StringIO()
    with show("t", 12, RunState(), out) as view:
        view.on_metrics(0, {"eval_reward": 0.2})
        view.on_event(Evaluated(0, 0.2, sentence="Held-out reward after step 0: 0.200, over 64 completions."))
        for step in (1, 2):
            view.on_metrics(step, {"reward_mean": 0.5, "loss": 0.01, "tokens_per_s_generate": 2310.2, "step_s": 1.26})
            view.on_event(RewardError("", sentence="Scored 0: the reward of train example 3 raised KeyError."))
        view.on_slot(["train"], SlotLedger.opened(0, 0.0))
        view.close(0)
    assert out.getvalue().splitlines() == [
        "Held-out reward after step 0: 0.200, over 64 completions.",
        "step  1/12  reward 0.500  loss 0.0100  2,310 tokens/s generated  1.3 s",
        "Scored 0: the reward of train example 3 raised KeyError. (Further ones like this are in events.jsonl.)",
        "step  2/12  reward 0.500  loss 0.0100  2,310 tokens/s generated  1.3 s",
    ]


def test_a_step_line_of_sft():
    assert (
        step_line(3, 9, {"loss": 2.0, "tokens_per_s_train": 1000.0}) == "step 3/9  loss 2.0000  1,000 tokens/s trained"
    )


def test_a_step_line_says_how_rewards_failed():
    failed = {"reward_error_share": 0.125, "reward_error_share/timeout": 0.09, "reward_error_share/lost": 0.0}
    failed["reward_error_share/raised"] = 0.035
    assert step_line(3, 9, {"reward_mean": 1.0, "loss": 0.5, **failed}) == (
        "step 3/9  reward 1.000  12% of rewards failed (9% timed out, 4% raised)  loss 0.5000"
    )
    without = {"reward_mean": 1.0, "loss": 0.5, "reward_error_share": 0.0}
    assert step_line(3, 9, without) == "step 3/9  reward 1.000  loss 0.5000"


def test_a_step_line_says_that_a_step_without_a_gradient_learned_nothing():
    assert step_line(3, 9, {"reward_mean": 1.0, "train_slots": 2.0}) == (
        "step 3/9  reward 1.000  nothing learned: all rewards of each group are equal"
    )
    assert step_line(3, 9, {"reward_mean": 1.0}) == "step 3/9  reward 1.000", "`ductile orchestrator` trains nothing"


def test_on_a_terminal_the_view_is_live_and_its_last_picture_stays():
    code = (
        "from ductile.dashboard.run_display import show; from ductile.events.run_state import RunState\n"
        "with show('a run', 3, RunState()) as view:\n"
        "    view.on_metrics(1, {'reward_mean': 0.5}); view.on_metrics(3, {'reward_mean': 0.75})\n"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:
        pass
    finally:
        os.close(master)
    assert process.wait(30) == 0
    text = seen.decode()
    assert "a run" in text
    assert "step 3/3" in text
    assert "0.750" in text


def test_the_view_needs_no_torch():
    code = "import sys, ductile.dashboard.run_display; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
