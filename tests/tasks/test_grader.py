import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ductile.config.schema.orchestrator import GradersConfig
from ductile.deaths import OomKills
from ductile.lifeline import SENT_TO_GROUPS
from ductile.records import Completion
from ductile.tasks import grader_worker
from ductile.tasks.grader import Graders
from ductile.tasks.grader_log import appender
from ductile.tasks.task import TaskError


@pytest.fixture
def config(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "solution": "4"}) + "\n")
    return {
        "type": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "reward": "tests.tasks.rewards.misbehaves",
    }


ONE = GradersConfig(num_workers=1)


def grade(config, completions, num_workers=1, **limits):
    async def run():
        errors = []
        limits_ = GradersConfig(num_workers=num_workers, **limits)
        async with Graders({"train": config}, limits_, lambda *told: errors.append(told[0])) as graders:
            verdicts = await asyncio.gather(
                *(graders.reward("train", 0, Completion(completion)) for completion in completions)
            )
            pids = [worker.pid for worker in graders._workers]
        return verdicts, errors, pids, graders.num_errors

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("completion", "sentence"),
    [
        ("exit", "the reward of example 0 ended its process (exit code 7)"),
        ("segfault", "the reward of example 0 ended its process (SIGSEGV)"),
        ("raise", "the reward of example 0 raised KeyError: 'solution' (rewards.py:"),
        ("sys.exit", "the reward of example 0 raised SystemExit: 3 (rewards.py:"),
        ("text", "the reward of example 0 returned 'good'; it must return a finite number"),
        ("nan", "the reward of example 0 returned nan; it must return a finite number"),
    ],
)
def test_a_failing_reward_is_an_error_and_the_others_are_not_disturbed(config, completion, sentence):
    verdicts, errors, _, num_errors = grade(config, ["fine", completion, "fine"])
    assert [verdict.reward for verdict in verdicts] == [1, None, 1]
    assert verdicts[1].error is not None
    assert sentence in verdicts[1].error
    assert errors == [verdicts[1].error]
    assert num_errors == 1


def test_a_failed_reward_tells_how_it_failed(config):
    completions = ["fine", "sleep", "exit", "raise", "text"]
    verdicts, *_ = grade(config, completions, timeout_s=1)
    assert [verdict.failure for verdict in verdicts] == [None, "timeout", "lost", "raised", "wrong"]


def test_a_forged_reply_of_another_kind_costs_the_reward_and_its_writer(config):
    line = 'pipe {"type": "TasksMade", "number": 2, "notes": [], "want_token_ids": []}'
    verdicts, errors, _, _ = grade(config, [line, "fine"])
    assert [(verdict.reward, verdict.failure) for verdict in verdicts] == [(None, "lost"), (1, None)]
    assert errors == ["the reward of example 0 wrote something else than its reply into the grader's pipe"]


def no_process(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_process_that_cannot_be_started_costs_a_reward_and_not_the_run(config, monkeypatch):
    async def run():
        async with Graders({"train": config}, GradersConfig(num_workers=2)) as graders:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "create_subprocess_exec", no_process)
                asked = [graders.reward("train", 0, Completion(completion)) for completion in ("half a second", "fine")]
                meanwhile = await asyncio.gather(*asked)
            return meanwhile, await asyncio.gather(*(graders.reward("train", 0, Completion("fine")) for _ in range(2)))

    (lives, failed), later = asyncio.run(run())
    assert (lives.reward, failed.reward, failed.failure) == (1, None, "lost")
    assert failed.error is not None
    said = "the reward of example 0 found no grader process: [Errno 11] Resource temporarily unavailable (at most "
    assert failed.error.startswith(said)
    assert failed.error.endswith("processes and threads of a user: ulimit -u)")
    assert [verdict.reward for verdict in later] == [1, 1]


def test_a_replacement_that_cannot_make_its_tasks_costs_a_reward_and_not_the_run(config, tmp_path):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            await graders.reward("train", 0, Completion("exit"))
            (tmp_path / "rows.jsonl").rename(tmp_path / "away.jsonl")
            without = await graders.reward("train", 0, Completion("fine"))
            (tmp_path / "away.jsonl").rename(tmp_path / "rows.jsonl")
            return without, await graders.reward("train", 0, Completion("fine"))

    without, later = asyncio.run(run())
    assert without.error == f"the reward of example 0 found no grader process: there is no file {config['path']}"
    assert (without.failure, later.reward) == ("lost", 1)


def test_a_run_ends_when_no_grader_is_left_and_none_can_be_started(config, monkeypatch):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            await graders.reward("train", 0, Completion("exit"))
            monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
            for _ in range(2):
                assert (await graders.reward("train", 0, Completion("fine"))).failure == "lost"
            await graders.reward("train", 0, Completion("fine"))

    with pytest.raises(
        TaskError, match=r"found no grader process: .*unavailable \(at most .*\); so did the 2 before it"
    ):
        asyncio.run(run())


def test_metrics_that_are_no_finite_numbers_cost_neither_the_reward_nor_the_process(config):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            before = {worker.pid for worker in graders._workers}
            verdict = await graders.reward("train", 0, Completion("metrics that are no numbers"))
            return verdict, before == {worker.pid for worker in graders._workers}

    verdict, same_process = asyncio.run(run())
    assert (verdict.reward, verdict.error, same_process) == (0.5, None, True)
    assert verdict.metrics == {"precision": None, "ratio": None, "gap": None, "huge": None, "length": 3}


@pytest.mark.parametrize("completion", ["hang", "sleep"])
def test_a_hanging_reward_is_killed(config, completion):
    verdicts, errors, pids, _ = grade(config, [completion, "fine"], timeout_s=1)
    assert [verdict.reward for verdict in verdicts] == [None, 1]
    assert errors == ["the reward of example 0 took longer than 1 s and was stopped"]
    assert all(not alive(pid) for pid in pids)


def test_a_reward_that_waits_for_what_the_kernel_killed_tells_of_memory(config, monkeypatch, tmp_path):
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    monkeypatch.setattr(grader_worker, "OOM_KILLS", OomKills(tmp_path))
    (tmp_path / "vmstat").write_text("oom_kill 4\n")
    _, errors, _, _ = grade(config, ["sleep"], timeout_s=1)
    assert "took longer than 1 s and was stopped (the kernel's OOM killer may have taken a process" in errors[0]
    assert "went from 3 to 4" in errors[0]


def test_what_a_reward_prints_is_not_taken_for_its_reply(config):
    verdicts, errors, _, _ = grade(config, ["print", "fine", "print"])
    assert [verdict.reward for verdict in verdicts] == [0.25, 1, 0.25]
    assert errors == []


def test_what_rewards_print_goes_to_the_log_and_never_to_the_terminal(config, tmp_path, capfd):
    log, steers = tmp_path / "graders.log", "print \x1b]52;c;cm0=\x07"

    async def run():
        async with Graders({"train": config}, ONE, log=log) as graders:
            return [
                await graders.reward("train", 0, Completion(completion))
                for completion in (steers, "last words", "fine")
            ]

    assert [verdict.reward for verdict in asyncio.run(run())] == [1, None, 1]
    assert log.read_text() == "\x1b]52;c;cm0=\x07\nto stderr\nthese are my last words\n"
    assert capfd.readouterr() == ("", "")


def test_the_log_of_what_rewards_print_is_bounded_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("ductile.tasks.grader_log.MAX_BYTES", 10)
    append = appender(tmp_path / "graders.log")
    for word in (b"first\n", b"second\n", b"third\n"):
        append(word)
    assert (tmp_path / "graders.log").read_bytes() == b"third\n"
    assert (tmp_path / "graders.log.old").read_bytes() == b"second\n"


def test_a_print_that_cannot_be_kept_costs_no_reward(config, tmp_path):
    full = tmp_path / "graders.log"
    full.symlink_to("/dev/full")

    async def run():
        async with Graders({"train": config}, GradersConfig(num_workers=1, max_file_gib=1e-6), log=full) as graders:
            return [await graders.reward("train", 0, Completion("print " + "x" * 10_000)) for _ in range(2)]

    assert [verdict.reward for verdict in asyncio.run(run())] == [1, 1]


def test_a_reward_that_reads_its_input_finds_none(config):
    assert [verdict.reward for verdict in grade(config, ["input", "fine"])[0]] == [1, 1]


def test_graders_do_not_load_torch(config):
    assert grade(config, ["torch"])[0][0].reward == 0


def test_several_workers_serve_each_request_once(config):
    completions = [completion for _ in range(10) for completion in ("fine", "raise", "print", "exit")]
    verdicts, errors, _, num_errors = grade(config, completions, num_workers=3)
    assert [verdict.reward for verdict in verdicts] == [1, None, 0.25, None] * 10
    assert num_errors == len(errors) == 20


def test_nothing_is_left_running(config):
    *_, pids, _ = grade(config, ["fine", "fine"], num_workers=2)
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_cancelled_call_does_not_give_its_reply_to_the_next(config):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await graders.reward("train", 0, Completion("sleep"))
            return await graders.reward("train", 0, Completion("print"))

    assert asyncio.run(run()).reward == 0.25


def test_a_replacement_that_nobody_waits_for_any_more_serves_the_next(config):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            await graders.reward("train", 0, Completion("exit"))
            asking = asyncio.create_task(graders.reward("train", 0, Completion("fine")))
            while not graders._workers:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)
            (starting,) = graders._workers
            asking.cancel()
            await asyncio.wait([asking])
            return starting.pid, await graders.reward("train", 0, Completion("fine"))

    pid, verdict = asyncio.run(run())
    assert verdict.reward == 1
    assert not alive(pid)


def test_a_cancelled_call_that_ends_soon_costs_no_process(config):
    async def run():
        async with Graders({"train": config}, ONE) as graders:
            before = {worker.pid for worker in graders._workers}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await graders.reward("train", 0, Completion("half a second"))
            verdict = await graders.reward("train", 0, Completion("print"))
            return verdict.reward, before == {worker.pid for worker in graders._workers}

    assert asyncio.run(run()) == (0.25, True)


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
    assert raised.startswith("the reply of example 1 raised ValueError: lost the thread (rewards.py:")
    assert malformed == (
        "the reply of example 0 returned [{'role': 'user', 'text': 'hm'}]; it must return None or a list of "
        '{"role": ..., "content": ...}'
    )


def test_a_task_that_cannot_be_made_stops_the_start():
    with pytest.raises(TaskError, match="no data today"):
        grade({"type": "import", "import_path": "tests.tasks.rewards.Hopeless"}, [])


@pytest.mark.parametrize("completion", ["hang", "sleep"])
def test_graders_die_with_a_killed_orchestrator(config, completion, tmp_path):
    code = textwrap.dedent(f"""
        import asyncio
        from ductile.records import Completion
        from ductile.tasks.grader import Graders
        async def main():
            async with Graders({{"train": {config!r}}}) as graders:
                print(*(worker.pid for worker in graders._workers), flush=True)
                await graders.reward("train", 0, Completion({completion!r}))
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        pid = int(orchestrator.stdout.readline())
        assert alive(pid)
        orchestrator.send_signal(signal.SIGKILL)
        orchestrator.wait(30)
    for _ in range(500):
        if not alive(pid):
            return
        subprocess.run(["sleep", "0.02"], check=True)
    pytest.fail(f"grader {pid} outlived its orchestrator")


def test_the_sentence_and_the_traceback_name_the_line(config, tmp_path):
    (tmp_path / "mine.py").write_text(
        'def reward(row, completion):\n    return {}["\\ud83d" * 5000 if completion == "long" else completion]\n'
    )

    async def run():
        told = []
        config["reward"] = f"{tmp_path}/mine.py:reward"
        async with Graders({"train": config}, ONE, lambda *what: told.append(what)) as graders:
            await graders.reward("train", 0, Completion("x"))
            await graders.reward("train", 0, Completion("long"))
        return told

    (sentence, traceback), (long, _) = asyncio.run(run())
    assert sentence == "the reward of example 0 raised KeyError: 'x' (mine.py:2)"
    assert "return {}[" in traceback
    assert len(long) < 2100
    assert long.endswith("(mine.py:2)")


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "Scored", "number": 1000, "reward": 9, "metrics": {}}',
        b'{"reward": 9, "metrics": {}}',
        b"[]",
        b'{"type": "Scored", "number": 2, "reward": "9", "metrics": {}}',
        b"\xff",
    ],
)
def test_a_line_in_the_pipe_that_is_no_reply_costs_its_writer_and_shifts_nothing(config, line):
    verdicts, errors, _, _ = grade(config, ["fine", "pipe " + line.decode("latin-1"), "raise", "fine"])
    assert [verdict.reward for verdict in verdicts] == [1, None, None, 1]
    assert errors[0] == "the reward of example 0 wrote something else than its reply into the grader's pipe"


def test_a_reply_too_long_to_read_is_an_error(config, monkeypatch):
    monkeypatch.setattr("ductile.tasks.grader_worker.MAX_LINE_BYTES", 1 << 20)
    verdicts, errors, _, _ = grade(config, ["many metrics", "fine"])
    assert [verdict.reward for verdict in verdicts] == [None, 1]
    assert errors == ["the reward of example 0 replied with more than 1 MiB"]


def test_rewards_see_no_secrets_but_what_is_passed_on(config, monkeypatch):
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HTTPS_PROXY")
    for name in secrets:
        monkeypatch.setenv(name, "sk-secret")
    completions = [f"env {name}" for name in (*secrets, "PATH", "HOME")]
    seen = [verdict.reward for verdict in grade(config, completions)[0]]
    assert seen == [0, 0, 0, 0, 0, 1, 1]
    for wants in ("variable", "client"):
        (error,) = grade(config, [f"wants_{wants} OPENAI_API_KEY"])[1]
        assert "OPENAI_API_KEY" in error
        assert "orchestrator.graders.env names" in error
    passed = grade(config, completions, env=["OPENAI_API_KEY"])[0]
    assert [verdict.reward for verdict in passed] == [0, 0, 0, 1, 0, 1, 1]


def notes_and_verdicts(config, completions, **limits):
    async def run():
        notes = []
        async with Graders({"train": config}, GradersConfig(num_workers=1, **limits), on_note=notes.append) as graders:
            return notes, [await graders.reward("train", 0, Completion(completion)) for completion in completions]

    return asyncio.run(run())


def test_rewards_have_no_network_but_their_own_loopback(config):
    notes, (outside, inside) = notes_and_verdicts(config, ["connect", "own server"])
    if notes:
        pytest.skip(notes[0])
    assert outside.error is not None
    assert "raised OSError: [Errno 101] Network is unreachable" in outside.error
    assert outside.error.endswith("; rewards have no network: orchestrator.graders.network = true gives them one")
    assert inside.reward == 1


def test_the_network_is_there_when_it_is_asked_for(config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        completion = f"port {server.getsockname()[1]}"
        notes, (closed,) = notes_and_verdicts(config, [completion])
        _, (opened,) = notes_and_verdicts(config, [completion], network=True)
    assert opened.reward == 1
    assert bool(closed.error) == (not notes)


def test_what_cannot_be_fenced_is_said(config, monkeypatch):
    """Where the kernel permits no namespaces, rewards work as before, children and all, and a note tells of it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "no_namespaces"))
    notes, verdicts = notes_and_verdicts(config, ["fine", "exit", "subprocess", "fine"])
    assert [verdict.reward for verdict in verdicts] == [1, None, 1, 1]
    assert notes == [
        "Rewards can reach the network and see other processes: this machine permits no namespaces "
        "(Operation not permitted)."
    ]


def test_limits_of_a_reward(config):
    completions = ["memory", "long file", "core", "privileges", "fine"]
    _, verdicts = notes_and_verdicts(config, completions, max_memory_gib=2, max_file_gib=0.001)
    memory, long_file, core, privileges, fine = verdicts
    assert memory.error is not None
    assert "raised MemoryError" in memory.error
    assert long_file.error is not None
    assert "File too large" in long_file.error
    assert (core.reward, privileges.reward, fine.reward) == (0, 1, 1)


def test_a_reward_has_no_more_threads_than_it_is_given():
    """Of a user that is not root, whose processes the kernel does not count."""
    code = """
        import os, threading, time
        from ductile.tasks import keeper
        if os.getuid() == 0:
            os.setuid(65_432)
        keeper._limit({"max_memory_gib": None, "max_file_gib": None, "max_processes": 8})
        for number in range(1000):
            try:
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            except RuntimeError as error:
                print(number, error, flush=True)
                os._exit(0)
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    num_started, error = told.stdout.strip().split(" ", 1)
    assert error == "can't start new thread"
    assert int(num_started) < 100  # 8, and as many as other processes of this user ended meanwhile


@pytest.mark.slow
def test_what_a_reward_leaves_spinning_is_ended_by_the_kernel(config):
    """The limit grows with the cores, so this has one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:

        async def run():
            async with Graders({"train": config}, GradersConfig(num_workers=1, timeout_s=2)) as graders:
                await graders.reward("train", 0, Completion("spins -"))
                async with asyncio.timeout(60):
                    while not (spun := await graders.reward("train", 0, Completion("spun -"))).reward:
                        await asyncio.to_thread(time.sleep, 0.1)
                return spun.reward, graders.num_errors

        assert asyncio.run(run()) == (signal.SIGXCPU, 0)
    finally:
        os.sched_setaffinity(0, cores)


def test_a_reward_may_start_processes(config):
    assert [verdict.reward for verdict in grade(config, ["subprocess", "pool", "terminate"])[0]] == [1, 1, 1]


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("killed", ["orchestrator", "keeper", "inner keeper", "grader"])
def test_what_a_reward_has_started_does_not_outlive_it(config, killed, fenced, tmp_path):
    file = tmp_path / "pid"
    env = {} if fenced else {"PYTHONPATH": str(Path(__file__).parent / "no_namespaces")}
    code = textwrap.dedent(f"""
        import asyncio
        from ductile.config.schema.orchestrator import GradersConfig
        from ductile.records import Completion
        from ductile.tasks.grader import Graders
        async def main():
            async with Graders({{"train": {config!r}}}, GradersConfig(num_workers=1, timeout_s=60)) as graders:
                print(*(worker.pid for worker in graders._workers), flush=True)
                await graders.reward("train", 0, Completion("leaves child {file}"))
        asyncio.run(main())
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | env
    ) as orchestrator:
        try:
            assert orchestrator.stdout is not None
            keeper = int(orchestrator.stdout.readline())
            wait_for(file.exists)
            (inner,) = children(keeper)
            grader = children(inner)[0]  # behind it may be orphans that were adopted
            family = [keeper, inner, grader, *descendants(grader)]
            assert len(family) >= 4
            victim = {"orchestrator": orchestrator.pid, "keeper": keeper, "inner keeper": inner, "grader": grader}[
                killed
            ]

            # The child that has a session of its own, and lost its parent, is found by what it runs.
            def daemons() -> list[int]:
                return [pid for pid in all_pids() if f"sleep\x00{DAEMON_S}" in command_line(pid)]

            wait_for(lambda: len(daemons()) == 1)
            daemon = daemons()
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: not any(alive(pid) for pid in (*family[1:], *daemon)))
        finally:
            orchestrator.kill()


@pytest.mark.parametrize("signum", SENT_TO_GROUPS)
@pytest.mark.parametrize("to", ["the session", "each process"])
def test_graders_outlast_what_a_batch_system_sends_to_all(config, to, signum, tmp_path):
    """What a reward has started does not: it may be waiting for its end."""
    file = tmp_path / "started"

    async def run():
        async with Graders({"train": config}, ONE) as graders:
            (worker,) = graders._workers
            family = descendants(worker.pid)
            asking = asyncio.create_task(graders.reward("train", 0, Completion(f"outlives {file}")))
            await asyncio.to_thread(wait_for, file.exists)
            if to == "the session":
                os.killpg(worker.pid, signum)
            else:
                for pid in (worker.pid, *descendants(worker.pid)):
                    os.kill(pid, signum)
            verdicts = [await asking, await graders.reward("train", 0, Completion("fine"))]
            return verdicts, graders._workers == {worker} and all(alive(pid) for pid in family)

    verdicts, same = asyncio.run(run())
    assert [verdict.reward for verdict in verdicts] == [signum, 1]
    assert same


def test_graders_that_are_being_started_outlast_it_too(config):
    async def run():
        graders = Graders({"train": config}, ONE)
        entering = asyncio.create_task(graders.__aenter__())
        num_sent = 0
        while not entering.done():
            for worker in graders._workers:
                with contextlib.suppress(OSError):
                    for pid in descendants(worker.pid):
                        os.kill(pid, signal.SIGTERM)
                        num_sent += 1
            await asyncio.sleep(0.01)
        await entering
        verdict = await graders.reward("train", 0, Completion("fine"))
        await graders.__aexit__()
        return num_sent > 0, verdict.reward

    assert asyncio.run(run()) == (True, 1)


def test_a_keeper_is_small():
    code = "import sys, ductile.tasks.keeper; print(*(name for name in sys.modules if name in {'asyncio', 'pydantic'}"
    code += " or name.startswith('ductile.')))"
    told = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["ductile.tasks", "ductile.lifeline", "ductile.tasks.keeper"]


DAEMON_S = 98765


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def descendants(pid):
    return [further for child in children(pid) for further in (child, *descendants(child))]


def all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_for(condition, timeout_s=20.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
