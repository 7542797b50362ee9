"""A policy by its name, ready to be asked which slot does what: built in, or the user's own."""

from typing import Any

from ductile.config.imports import ImportPathError, import_object
from ductile.core.cluster.orders import Policy
from ductile.core.cluster.policies.named import policy
from ductile.core.cluster.policies.names import NAMES


def named_policy(name: str, *, pre_process: bool = False, wait_before_last_iter: bool = False) -> Policy:
    """A built-in policy by its name, or the user's own by its import path: a class to be called without arguments.

    Raises ImportPathError, whose sentence says what is wrong with the name.
    """
    if name in NAMES:
        return policy(name, pre_process=pre_process, wait_before_last_iter=wait_before_last_iter)
    made: Any = import_object(name)
    try:
        made = made()
    except Exception as error:
        raise ImportPathError(f"{name!r} cannot be called without arguments: {error}") from error
    if not isinstance(made, Policy):
        raise ImportPathError(f"{name!r} is not a policy: it has no method decide(state)")
    return made
