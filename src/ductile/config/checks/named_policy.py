"""A policy by its name, ready to be asked which slot does what: built in, or the user's own."""

import inspect
from typing import Any

from ductile.config.reading.imports import ImportPathError, import_object
from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.named import policy
from ductile.core.scheduling.policies.names import NAMES


def named_policy(name: str, *, pre_process: bool | None = None, wait_before_last_iter: bool | None = None) -> Policy:
    """A built-in policy by its name, or the user's own by its import path: a class to be called without arguments.

    Raises ImportPathError, whose sentence says what is wrong with the name.
    """
    if name in NAMES:
        return policy(name, pre_process=pre_process, wait_before_last_iter=wait_before_last_iter)
    made: Any = import_object(name)
    try:
        made = made()
    except Exception as error:
        hint = "" if isinstance(made, type) else ". A policy is a class with a method decide(self, state)"
        raise ImportPathError(f"{name!r} cannot be called without arguments: {error}{hint}") from error
    if not isinstance(made, Policy):
        raise ImportPathError(f"{name!r} is not a policy: it has no method decide(self, state)")
    _check_signature(name, made)
    return made


def _check_signature(name: str, policy: Policy) -> None:
    """Raises ImportPathError when `policy.decide(state)` cannot be called, or would return no decision."""
    decide = policy.decide
    try:
        signature = inspect.signature(decide)
    except ValueError:
        return  # written in C: it tells nothing of itself
    try:
        signature.bind(None)
    except TypeError:
        found = f"decide{signature}".replace("decide(", "decide(self, ").replace("self, )", "self)")
        raise ImportPathError(
            f"{name!r} has {found}, and is called with one state: write decide(self, state)"
        ) from None
    if inspect.iscoroutinefunction(decide):
        raise ImportPathError(f"{name!r} has an async decide, and is not awaited: write def decide(self, state)")
