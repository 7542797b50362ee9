"""Reward functions as users write them, the bad ones included."""

import os
import sys
import time


def exact(row, answer):
    return float(answer == row["solution"])


def with_metrics(row, answer):
    return 0.5, {"length": len(answer)}


def misbehaves(row, answer):
    match answer:
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
        case "print":
            print('{"reward": 1000, "metrics": {}}')
            os.write(1, b'{"reward": 1000, "metrics": {}}\n')
            return 0.25
        case "torch":
            return float("torch" in sys.modules)
        case "input":
            return float(sys.stdin.read() == "")
        case "segfault":
            import ctypes

            ctypes.string_at(0)
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

    def reward(self, example, answer):
        return float(answer == self.word)


class Hopeless:
    def __init__(self):
        raise RuntimeError("no data today")


class Unfinished:
    def __len__(self):
        return 1


class Empty(Echo):
    def __len__(self):
        return 0


class BadReply(Echo):
    def reply(self, example, messages):
        if example:
            raise ValueError("lost the thread")
        return [{"role": "user", "text": "hm"}]
