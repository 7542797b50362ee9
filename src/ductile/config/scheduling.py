"""What must hold between the keys of dynamic scheduling: a key that would do nothing is said, never ignored."""

from collections.abc import Iterator

from ductile.config.cluster import ClusterConfig
from ductile.config.errors import did_you_mean
from ductile.config.finding import Finding
from ductile.config.imports import ImportPathError
from ductile.core.cluster.policies.names import NAMES

OPTIONAL = ("use_pre_process_policy", "use_wait_before_last_iter_policy")
"""Keys that add a rule to `rules`."""
POLICIES = '"static", "rules", "model" or the import path of your own (package.module.Class, file.py:Class)'


def policy_name(cluster: ClusterConfig) -> str:
    """One of `NAMES`, or an import path: what `cluster.policy` is when nobody wrote it."""
    return cluster.policy or ("rules" if cluster.auto_scheduler else "static")


def scheduling_findings(cluster: ClusterConfig) -> Iterator[Finding]:
    """Of `ductile rl`."""
    name, given = policy_name(cluster), _given(cluster)
    known = name in NAMES or _is_import_path(name)
    if not known:
        what = f"is no policy: write {POLICIES}.{did_you_mean(name, list(NAMES))}"
        yield Finding(("cluster.policy",), what)
    for key in OPTIONAL:
        if given[key] and not cluster.auto_scheduler and cluster.policy is None:
            what = "is a rule of dynamic scheduling, which is off: write auto_scheduler = true too, or leave it out"
            yield Finding((f"cluster.{key}", "cluster.auto_scheduler"), what)
        elif given[key] and known and name != "rules":
            what = f'is a rule of policy "rules", and the policy is "{name}": write policy = "rules", or leave it out'
            yield Finding((f"cluster.{key}", "cluster.policy"), what)
    if known and name != "static" and not cluster.auto_scheduler:
        what = 'moves slots, and auto_scheduler is false: write auto_scheduler = true too, or policy = "static"'
        yield Finding(("cluster.policy", "cluster.auto_scheduler"), what)
    if known and name not in NAMES:
        from ductile.config.policy import named_policy  # policies load numpy, and most configs name none of their own

        try:
            named_policy(name)
        except ImportPathError as error:
            yield Finding(("cluster.policy",), f"cannot be used: {error}")


def unscheduled_findings(cluster: ClusterConfig, command: str) -> Iterator[Finding]:
    """Of the commands whose slots have one role from their start to their end."""
    for key, given in _given(cluster).items():
        if given:
            what = f"is for `ductile rl`: the slots of `ductile {command}` have one role. Leave it out"
            yield Finding((f"cluster.{key}",), what)


def _given(cluster: ClusterConfig) -> dict[str, bool]:
    """Which of the keys ask for something."""
    return {
        "auto_scheduler": cluster.auto_scheduler,
        "policy": cluster.policy is not None,
        "use_pre_process_policy": cluster.use_pre_process_policy,
        "use_wait_before_last_iter_policy": cluster.use_wait_before_last_iter_policy,
    }


def _is_import_path(name: str) -> bool:
    return "." in name or ":" in name
