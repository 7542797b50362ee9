"""Seconds that a wait may take, and the key that says so: who is told that they have passed learns what to write."""

from typing import Self


class Deadline(float):
    """Seconds as any others, with their key: `Deadline(600, "cluster.command_timeout_s")`. Seconds added to it keep the
    key; any other arithmetic gives a plain number. It stays in its process."""

    key: str

    def __new__(cls, seconds: float, key: str) -> Self:
        deadline = super().__new__(cls, seconds)
        deadline.key = key
        return deadline

    def __add__(self, seconds: float) -> "Deadline":
        return Deadline(float(self) + seconds, self.key)


def said(seconds: float) -> str:
    """ "600 s (cluster.command_timeout_s)"; "2 s" of seconds that no key says."""
    return f"{seconds:g} s ({seconds.key})" if isinstance(seconds, Deadline) else f"{seconds:g} s"
