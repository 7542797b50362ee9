"""The policy that a config asks for: who decides which slot does what while the run is at work.

`[cluster]` says it in four keys. `auto_scheduler` turns it on; `policy` says who decides, and where it says nothing,
`model` does; the two `use_..._policy` keys are permissions to `model`, and further rules to `rules`. What would do
nothing is refused, never ignored.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ductile.config.finding import Finding
from ductile.config.reading.errors import did_you_mean
from ductile.config.reading.imports import ImportPathError
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.scheduling.policies.names import DEFAULT, NAMES, WITH_OPTIONS

if TYPE_CHECKING:  # it loads numpy, and so do policies; most configs name none of their own
    from ductile.core.instances.instances import Serving
    from ductile.core.scheduling.orders import Policy

OPTIONAL = ("use_pre_process_policy", "use_wait_before_last_iter_policy")
"""Keys that `model` takes as permissions, and `rules` as further rules."""
POLICIES = '"model", "rules", "static", "in_turns" or the import path of your own (package.module.Class, file.py:Class)'


def policy_name(cluster: ClusterConfig) -> str:
    """`cluster.policy`, or the default where it is not set: one of `NAMES`, or an import path."""
    return cluster.policy or (DEFAULT if cluster.auto_scheduler else "static")


def policy_of(cluster: ClusterConfig) -> "Policy":
    """The policy of a run: what `orchestrator.scheduling` gives to the controller.

    Raises ImportPathError when it is the user's own and cannot be had. `preflight` has asked already, so a config that
    was found good raises only when the file has changed since.
    """
    from ductile.config.checks.named_policy import named_policy

    return named_policy(**policy_arguments(cluster))


def policy_arguments(cluster: ClusterConfig) -> dict[str, Any]:
    """The arguments of `named_policy` that make the policy of a run."""
    return {
        "name": policy_name(cluster),
        "pre_process": cluster.use_pre_process_policy,
        "wait_before_last_iter": cluster.use_wait_before_last_iter_policy,
    }


def replaced_roles(cluster: ClusterConfig) -> frozenset["Serving"]:
    """Roles of a slot that is given back which the policy gives to other slots. The other built-in policies know the
    configured slots only, and none makes a scorer elsewhere."""
    name = policy_name(cluster)
    makes_generators = cluster.auto_scheduler and (name == "model" or name not in NAMES)
    return frozenset({"generate"}) if makes_generators else frozenset()


def scheduling_findings(cluster: ClusterConfig) -> Iterator[Finding]:
    """Findings on the scheduling keys of `ductile rl`."""
    name = policy_name(cluster)
    known = name in NAMES or _is_import_path(name)
    if not known:
        what = f"is not a policy: write {POLICIES}.{did_you_mean(name, list(NAMES))}"
        yield Finding(("cluster.policy",), what)
    optional = (cluster.use_pre_process_policy, cluster.use_wait_before_last_iter_policy)
    for key, given in zip(OPTIONAL, optional, strict=True):
        if given and not cluster.auto_scheduler and cluster.policy is None:
            what = f"is of dynamic scheduling, which is off: write auto_scheduler = true too, or leave {key} out"
            yield Finding((f"cluster.{key}", "cluster.auto_scheduler"), what)
        elif given and known and name not in WITH_OPTIONS:
            what = (
                f'is for the policies "model" and "rules", and the policy is "{name}": write policy = "model", or '
                f"leave {key} out"
            )
            yield Finding((f"cluster.{key}", "cluster.policy"), what)
    if cluster.enable_offload and not cluster.auto_scheduler:
        what = (
            "lends devices while slots change roles, which none does: write auto_scheduler = true too, or leave it out"
        )
        yield Finding(("cluster.enable_offload", "cluster.auto_scheduler"), what)
    if known and name != "static" and not cluster.auto_scheduler:
        what = 'moves slots, and auto_scheduler is false: write auto_scheduler = true too, or policy = "static"'
        yield Finding(("cluster.policy", "cluster.auto_scheduler"), what)
    if known and name not in NAMES:
        try:
            policy_of(cluster)
        except ImportPathError as error:
            yield Finding(("cluster.policy",), str(error).removeprefix(repr(name)).lstrip(": "))


def _is_import_path(name: str) -> bool:
    return "." in name or ":" in name
