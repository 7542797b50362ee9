from ductile.core.instances.placement import place
from ductile.core.layout.choice.layout_rules import NO_RULES
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.sim.scenario import Scenario, WorkLoad, lognormal


def scenario(
    placement=None,
    *,
    score=False,
    decode=None,
    costs=None,
    limits=None,
    coalesce_s=0.2,
    on_gpu=False,
    offloads=False,
    rules=NO_RULES,
    **work,
):
    """Six slots, long-tailed completions, seconds as on small CPU slots."""
    placement = place(placement or {"actor": "0-2", "rollout": "3-5"})
    given = {
        "num_steps": 2,
        "groups_per_step": 12,
        "group_size": 4,
        "prompt_tokens": 64,
        "max_tokens": 1024,
        "draw": lognormal(100, 1.1),
        "alike": 0.3,
        "seq_len": 1088,
    }
    made = Scenario(
        placement=placement,
        work=WorkLoad(**{**given, **work}),
        speeds=Speeds(
            decode=decode or DecodeSpeed(0.01, 0.002),
            prefill_tokens_per_s=5000,
            train=TrainSpeed(800, 0.02, 0.01),
            score_tokens_per_s=5000,
            optim_s=0.2,
            publish_s=0.1,
            receive_s=0.1,
        ),
        costs=costs or SwitchCosts(resize_s=0.15, assign_s=0.3, release_s=0.05, migration_s=0.01),
        limits=limits or Limits(max_num_seqs=16),
        coalesce_s=coalesce_s,
        score=score,
        on_gpu=on_gpu,
        offloads=offloads,
        rules=rules,
    )
    return made.at(placement)
