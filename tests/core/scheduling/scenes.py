"""Cluster states for tests, with round numbers: decode 100 steps a second, train 1,000 tokens a second and slot."""

from ductile.core.instances.instances import NOUNS, InstanceId, regrouped, slot_groups
from ductile.core.instances.placement import place
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import (
    BatchProgress,
    ClusterState,
    Lengths,
    Limits,
    SlotState,
    TrainerState,
    Unfinished,
)

SPEEDS = Speeds(
    decode=DecodeSpeed(step_s=0.01, per_sequence_s=0.001),
    prefill_tokens_per_s=10_000,
    train=TrainSpeed(tokens_per_s=1000, overhead=0.02, micro_step_s=0.01),
    optim_s=0.1,
    publish_s=0.1,
    receive_s=0.1,
)
COSTS = SwitchCosts(resize_s=0.3, assign_s=0.2, release_s=0.05)


def id_on(slot):
    """Id of the generator that a run begins with on this slot; an external server's is its name."""
    return InstanceId(slot if isinstance(slot, str) else f"generator-{slot}")


def unfinished(running, limit=1000, prompt=100):
    """`{slot: [generated, ...]}` as rollouts named by slot and number; two neighbours are a group."""
    return tuple(
        Unfinished(f"{slot}/{number}", id_on(slot), prompt, generated, limit, group=f"{slot}/{number // 2}")
        for slot, generateds in running.items()
        for number, generated in enumerate(generateds)
    )


def scene(
    placement=None,
    *,
    now_s=100.0,
    roles=None,
    running=None,
    not_ready=(),
    seq_len=512,
    at_boundary=True,
    held=False,
    lengths=None,
    since_s=0.0,
    speeds=SPEEDS,
    costs=COSTS,
    max_tokens=1000,
    limits=None,
    servers=(),
    asked=True,
    **batch,
):
    """placement: as in a config. roles: slots that have other roles by now. servers: external instances. batch: fields
    of `BatchProgress`."""
    home = place(placement or {"actor": "0-1", "rollout": "2-5"})
    held_roles = {slot: home.roles(slot) for slot in home.slots} | (roles or {})
    limits = limits or Limits(max_num_seqs=8)
    groups = {role: slot_groups(home.of(role), held_roles, limits.slots_per(role)) for role in NOUNS}
    return ClusterState(
        now_s=now_s,
        slots=tuple(
            SlotState(slot, roles, since_s, slot not in not_ready) for slot, roles in sorted(held_roles.items())
        ),
        batch=BatchProgress(**{"step": 3, "num_rollouts": 64, **batch}),
        trainer=TrainerState(
            ParallelLayout.of(tuple(slot for slot, roles in sorted(held_roles.items()) if "train" in roles)),
            at_boundary,
            held,
            seq_len,
        ),
        speeds=speeds,
        costs=costs,
        home=home,
        limits=limits,
        instances=regrouped(servers, {}, held_roles, groups, birth=0),
        unfinished=unfinished(running or {}, max_tokens),
        lengths=lengths or Lengths(tuple(range(20, 400, 4)), (max_tokens,) * 3, 100.0),
        max_tokens=max_tokens,
        asked=asked,
    )
