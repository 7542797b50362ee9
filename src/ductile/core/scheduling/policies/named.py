"""Policies by the names that configurations use."""

from collections.abc import Callable, Mapping

from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static


def policy(name: str, *, pre_process: bool | None = None, wait_before_last_iter: bool | None = None) -> Policy:
    """The built-in policy of that name. Raises ValueError for another name.

    Of the two options, `rules` do what is True, and `model` may do what is not False.
    """
    made: Mapping[str, Callable[[], Policy]] = {
        "static": Static,
        "rules": lambda: Rules(pre_process is True, wait_before_last_iter is True),
        "model": lambda: Model(
            pre_process=pre_process is not False, wait_before_last_iter=wait_before_last_iter is not False
        ),
        "in_turns": InTurns,
    }
    if name not in made:
        raise ValueError(f"there is no policy {name}: there are {', '.join(made)}")
    return made[name]()
