"""Policies by the names that configurations use."""

from collections.abc import Callable, Mapping

from ductile.core.cluster.orders import Policy
from ductile.core.cluster.policies.model import Model
from ductile.core.cluster.policies.rules import Rules
from ductile.core.cluster.policies.static import InTurns, Static


def policy(name: str, *, pre_process: bool = False, wait_before_last_iter: bool = False) -> Policy:
    """The built-in policy of that name; the two flags are of `rules`. Raises ValueError for another name."""
    made: Mapping[str, Callable[[], Policy]] = {
        "static": Static,
        "rules": lambda: Rules(pre_process, wait_before_last_iter),
        "model": Model,
        "in_turns": InTurns,
    }
    if name not in made:
        raise ValueError(f"there is no policy {name}: there are {', '.join(made)}")
    return made[name]()
