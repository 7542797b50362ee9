import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import textwrap

import pytest

from ductile.tasks.grader import Graders
from ductile.tasks.task import TaskError


@pytest.fixture
def config(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "solution": "4"}) + "\n")
    return {
        "type": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "reward": "tests.tasks.rewards.misbehaves",
    }


def grade(config, answers, num_workers=1, timeout_s=30.0):
    async def run():
        errors = []
        async with Graders({"train": config}, num_workers, timeout_s, errors.append) as graders:
            verdicts = await asyncio.gather(*(graders.reward("train", 0, answer) for answer in answers))
            pids = [worker._process.pid for worker in graders._workers]
        return verdicts, errors, pids, graders.num_errors

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("exit", "the reward of train example 0 ended its process (exit code 7)"),
        ("segfault", "the reward of train example 0 ended its process (SIGSEGV)"),
        ("raise", "the reward of train example 0 raised KeyError: 'solution'"),
        ("sys.exit", "the reward of train example 0 raised SystemExit: 3"),
        ("text", "is of no use: the reward of example 0 is 'good'; it must be a finite number"),
        ("nan", "is of no use: the reward of example 0 is nan; it must be a finite number"),
    ],
)
def test_a_failing_reward_scores_0_and_the_others_are_not_disturbed(config, answer, sentence):
    verdicts, errors, _, num_errors = grade(config, ["fine", answer, "fine"])
    assert [verdict.reward for verdict in verdicts] == [1, 0, 1]
    assert verdicts[1].error is not None
    assert sentence in verdicts[1].error
    assert errors == [verdicts[1].error]
    assert num_errors == 1


@pytest.mark.parametrize("answer", ["hang", "sleep"])
def test_a_hanging_reward_is_killed(config, answer):
    verdicts, errors, pids, _ = grade(config, [answer, "fine"], timeout_s=1)
    assert [verdict.reward for verdict in verdicts] == [0, 1]
    assert errors == ["the reward of train example 0 took longer than 1 s and was stopped"]
    assert all(not alive(pid) for pid in pids)


def test_what_a_reward_prints_is_not_taken_for_its_answer(config):
    verdicts, errors, _, _ = grade(config, ["print", "fine", "print"])
    assert [verdict.reward for verdict in verdicts] == [0.25, 1, 0.25]
    assert errors == []


def test_a_reward_that_reads_its_input_finds_none(config):
    assert [verdict.reward for verdict in grade(config, ["input", "fine"])[0]] == [1, 1]


def test_graders_do_not_load_torch(config):
    assert grade(config, ["torch"])[0][0].reward == 0


def test_several_workers_answer_each_request_once(config):
    answers = [answer for _ in range(10) for answer in ("fine", "raise", "print", "exit")]
    verdicts, errors, _, num_errors = grade(config, answers, num_workers=3)
    assert [verdict.reward for verdict in verdicts] == [1, 0, 0.25, 0] * 10
    assert num_errors == len(errors) == 20


def test_nothing_is_left_running(config):
    *_, pids, _ = grade(config, ["fine", "fine"], num_workers=2)
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_cancelled_call_does_not_give_its_answer_to_the_next(config):
    async def run():
        async with Graders({"train": config}, 1, 30) as graders:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await graders.reward("train", 0, "sleep")
            return await graders.reward("train", 0, "print")

    assert asyncio.run(run()).reward == 0.25


def test_a_replacement_that_nobody_waits_for_any_more_is_stopped(config):
    async def run():
        async with Graders({"train": config}, 1, 30) as graders:
            await graders.reward("train", 0, "exit")
            asking = asyncio.create_task(graders.reward("train", 0, "fine"))
            while not graders._workers:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)
            (starting,) = graders._workers
            asking.cancel()
            await asyncio.wait([asking])
            return starting._process.returncode, await graders.reward("train", 0, "fine")

    code, verdict = asyncio.run(run())
    assert code == -signal.SIGKILL
    assert verdict.reward == 1


def test_replies_of_a_task_with_several_turns():
    task = {"type": "builtin", "name": "guess_number", "config": {"max_turns": 2}, "size": 5, "seed": 1}

    async def run():
        async with Graders({"train": task}) as graders:
            said = [{"role": "assistant", "content": "hm"}]
            once = await graders.reply("train", 0, said)
            return once, await graders.reply("train", 0, said * 2)

    once, twice = asyncio.run(run())
    assert once.messages == [{"role": "user", "content": "Say a number."}]
    assert twice.messages is None


def test_a_failing_reply_is_an_error_in_a_sentence():
    task = {"type": "import", "import_path": "tests.tasks.rewards.BadReply"}

    async def run():
        async with Graders({"train": task}) as graders:
            return [(await graders.reply("train", example, [])).error for example in (1, 0)]

    raised, malformed = asyncio.run(run())
    assert raised == "the reply of train example 1 raised ValueError: lost the thread"
    assert malformed == (
        "the reply of train example 0 is of no use: [{'role': 'user', 'text': 'hm'}] must be None or a list of "
        '{"role": ..., "content": ...}'
    )


def test_a_task_that_cannot_be_made_stops_the_start():
    with pytest.raises(TaskError, match="no data today"):
        grade({"type": "import", "import_path": "tests.tasks.rewards.Hopeless"}, [])


@pytest.mark.parametrize("answer", ["hang", "sleep"])
def test_graders_die_with_a_killed_orchestrator(config, answer, tmp_path):
    code = textwrap.dedent(f"""
        import asyncio
        from ductile.tasks.grader import Graders
        async def main():
            async with Graders({{"train": {config!r}}}) as graders:
                print(*(worker._process.pid for worker in graders._workers), flush=True)
                await graders.reward("train", 0, {answer!r})
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        pid = int(orchestrator.stdout.readline())
        assert alive(pid)
        orchestrator.send_signal(signal.SIGKILL)
        orchestrator.wait(10)
    for _ in range(500):
        if not alive(pid):
            return
        subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail(f"grader {pid} outlived its orchestrator")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
