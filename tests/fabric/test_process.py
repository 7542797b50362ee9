"""A process that has ended and is not waited for yet: there for who looks for its number, not for who reads it."""

import os
import subprocess

from ductile.fabric.process import Process, start_time


def test_a_zombie_has_a_start_time_and_is_not_alive() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    started = start_time(process.pid)
    assert started is not None
    assert not Process(process.pid, started).alive
    process.wait()
    assert start_time(process.pid) is None


def test_this_process_is_alive() -> None:
    assert Process.own() == Process(os.getpid(), start_time(os.getpid()) or 0)
    assert Process.own().alive
