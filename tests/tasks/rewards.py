"""Reward functions as users write them, the bad ones included."""

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPINNING = []


def exact(row, completion):
    return float(completion == row["solution"])


def with_metrics(row, completion):
    return 0.5, {"length": len(completion)}


def misbehaves(row, completion):
    match completion:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(3)
        case "raise":
            raise KeyError("solution")
        case "text":
            return "good"
        case "nan":
            return float("nan")
        case "metrics that are no numbers":
            return 0.5, {"precision": math.nan, "ratio": math.inf, "gap": -math.inf, "huge": 10**400, "length": 3}
        case "print":
            print('{"reward": 1000, "metrics": {}}')
            os.write(1, b'{"reward": 1000, "metrics": {}}\n')
            return 0.25
        case "last words":
            print("these are my last words")
            os._exit(7)
        case "torch":
            return float("torch" in sys.modules)
        case "input":
            return float(sys.stdin.read() == "")
        case "segfault":
            import ctypes

            ctypes.string_at(0)
        case "half a second":
            time.sleep(0.5)
        case "many metrics":
            return 1.0, {f"{number:08}": 0.0 for number in range(100_000)}
        case "connect":
            socket.create_connection(("192.0.2.1", 80), timeout=5)
        case "own server":
            with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
                return 1.0
        case "memory":
            bytearray(4 << 30)
        case "long file":
            with tempfile.TemporaryFile() as file:
                file.write(bytes(4 << 20))
        case "core":
            return float(resource.getrlimit(resource.RLIMIT_CORE)[0])
        case "privileges":
            with open("/proc/self/status") as file:
                return float("NoNewPrivs:\t1" in file.read())
        case "subprocess":
            return float(subprocess.run(["echo", "2"], capture_output=True, text=True, check=True).stdout) / 2
        case "pool":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(float, [1, 0])[0]
        case "terminate":
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            process.start()
            process.terminate()
            process.join()
            return float(process.exitcode == -signal.SIGTERM)
    match completion.split(" ", 1):
        case ["print", text]:
            print(text)
            print("to stderr", file=sys.stderr)
        case ["env", name]:
            return float(name in os.environ)
        case ["wants_variable", name]:
            return float(os.environ[name])
        case ["wants_client", name]:  # as clients of APIs say it
            raise ValueError(f"pass api_key, or set the {name} environment variable")
        case ["port", port]:
            with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
                return 1.0
        case ["pipe", line]:
            for fd in range(3, 20):
                with contextlib.suppress(OSError):
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, line.encode("latin-1") + b"\n")
            return 1.0
        case ["outlives", file]:
            with subprocess.Popen(["sleep", "1000"]) as child:
                Path(file).touch()
            return float(-child.returncode)
        case ["spins", _]:
            SPINNING.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            return 0.0
        case ["spun", _]:
            return float(-(SPINNING[-1].poll() or 0))
        case ["leaves", what]:
            file = what.removeprefix("child ")
            daemon = "import os, sys; os.setsid(); os.fork() and os._exit(0); os.execvp('sleep', ['sleep', '98765'])"
            subprocess.run([sys.executable, "-c", daemon], check=True)
            with subprocess.Popen(["sleep", "1000"]):
                time.sleep(0.2)
                Path(file).touch()
    return 1.0


not_a_function = 3


class Echo:
    """A task without `reply`, which does not inherit from anything."""

    name = "echo"

    def __init__(self, word="hi"):
        self.word = word

    def __len__(self):
        return 4

    def messages(self, example):
        return [{"role": "user", "content": self.word}]

    def reward(self, example, completion):
        return float(completion == self.word)


class Hopeless:
    def __init__(self):
        raise RuntimeError("no data today")


class Unfinished:
    def __len__(self):
        return 1


class Uncalled(Echo):
    def reward(self, completion):
        return 1.0


class Empty(Echo):
    def __len__(self):
        return 0


class BadReply(Echo):
    def reply(self, example, messages):
        if example:
            raise ValueError("lost the thread")
        return [{"role": "user", "text": "hm"}]
