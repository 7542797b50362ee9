"""The policy that a config asks for: who decides which slot does what while the run is at work.

`[cluster]` says it in four keys. `auto_scheduler` turns it on; `policy` says who decides, and where it says nothing,
`rules` do; the two `use_..._policy` keys are further ones of those.
"""

from typing import Any

from ductile.config.cluster import ClusterConfig
from ductile.config.imports import ImportPathError, import_object
from ductile.config.scheduling import policy_name
from ductile.core.cluster.orders import Policy
from ductile.core.cluster.policies.named import policy
from ductile.core.cluster.policies.names import NAMES


def policy_of(cluster: ClusterConfig) -> Policy:
    """The policy of a run, ready to be asked: what `launch` gives to whoever carries decisions out.

    Raises ImportPathError when it is the user's own and cannot be had. `preflight` has asked already, so a config that
    was found good raises only when the file has changed since.
    """
    return named_policy(
        policy_name(cluster),
        pre_process=cluster.use_pre_process_policy,
        wait_before_last_iter=cluster.use_wait_before_last_iter_policy,
    )


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
        raise ImportPathError(f"{name!r} is no policy: it has no method decide(state)")
    return made
