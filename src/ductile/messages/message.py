"""The base of all that the orchestrator and a slot say to each other (`ductile.messages.workers`)."""

from typing import Literal

import msgspec

RoleName = Literal["train", "generate", "score"]


class Message(msgspec.Struct, tag=True):
    def roles_after(self, roles: tuple[RoleName, ...]) -> tuple[RoleName, ...]:
        """Return the roles of a slot that had `roles` and has done what the message says."""
        return roles

    def count_tokens(self) -> int:
        """Return the number of tokens that the message carries data of; what encoding it takes goes by that."""
        return 0

    @property
    def is_beside(self) -> bool:
        """True when a slot does what the message says in a thread of its own, beside what its main thread works at. All
        other commands are executed in order."""
        return False
