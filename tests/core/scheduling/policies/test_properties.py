"""What holds for every policy, whatever the cluster looks like."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ductile.core.instances.instances import Instance, InstanceId, instance_on, slot_groups
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.facts.cluster_state import Lengths, Limits, SlotState, Unfinished
from ductile.core.scheduling.orders import instances_after, layout_after, roles_after, violations
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from tests.core.scheduling.scenes import scene
from tests.nightly import examples

SERVER = Instance(InstanceId("http://there"), "generate", ())
POLICIES = [Static(), InTurns(), Rules(), Rules(True, False), Rules(False, True), Rules(True, True), Model()]
POLICIES += [Model(pre_process=False, wait_before_last_iter=False)]


@st.composite
def states(draw, at_boundary=None):
    """Any placement of up to fourteen slots on one node or several, any roles by now, rollouts anywhere that generates,
    be it on one slot, on two or on none; a scorer on one slot or two; and a trainer that may have any number of slots,
    or even ones, or multiples of three."""
    size, scorer_size = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2]))
    num_train, num_generate = draw(st.integers(1, 4)), size * draw(st.integers(1, 4))
    num_scorers = draw(st.integers(0, 1))
    bounds = [0, num_train, num_train + num_generate, num_train + num_generate + num_scorers * scorer_size]
    placement = {
        name: ",".join(map(str, range(first, last)))
        for name, first, last in zip(["actor", "rollout", "inference"], bounds, bounds[1:], strict=False)
        if last > first
    }
    room = draw(st.sampled_from(["both", "one", "lends"]))
    limits = Limits(
        min_train=draw(st.integers(1, num_train)),
        min_generate=1,
        min_score=draw(st.integers(0, num_scorers)),
        max_num_seqs=draw(st.integers(1, 16)),
        may_share=room == "both",
        offloads=room == "lends",
        slots_per_generator=size,
        slots_per_scorer=scorer_size,
    )
    shapes = [("train",), ("generate",), ("generate",)] + ([("train", "generate")] if room != "one" else [])
    groups = slot_groups(range(num_train, bounds[2]), range(bounds[2]), size)
    roles = dict.fromkeys(range(bounds[2]), ("train",))
    for group in groups:
        roles |= dict.fromkeys(group, draw(st.sampled_from([*shapes, ()])))
    scores = bool(limits.min_score) or draw(st.booleans())
    roles |= dict.fromkeys(range(bounds[2], bounds[-1]), ("score",) if scores else ("train",))
    for group in reversed(groups):
        if sum("train" in held for held in roles.values()) < limits.min_train:
            roles |= dict.fromkeys(group, ("train",))
    servers = draw(st.sampled_from([(), (), (SERVER,)]))
    generators = [instance_on("generate", group).id for group in groups if "generate" in roles[group[0]]]
    generators += [server.id for server in servers]
    to_generate = bool(generators) and draw(st.booleans())
    running = {name: draw(st.lists(st.integers(0, 999), max_size=8)) for name in generators} if to_generate else {}
    lending = room == "lends" and any({"train", "generate"} <= {*held} for held in roles.values())
    num_rollouts = 64
    ready = draw(st.integers(0, num_rollouts))
    trained = draw(st.integers(0, num_rollouts - 1))
    state = scene(
        placement,
        roles=roles,
        running=running,
        not_ready=draw(st.sets(st.integers(0, bounds[-1] - 1), max_size=2)),
        at_boundary=draw(st.booleans()) if at_boundary is None and not lending else True,
        held=draw(st.booleans()) or lending,
        limits=limits,
        servers=servers,
        lengths=Lengths(tuple(draw(st.lists(st.integers(1, 999), max_size=30))), (), 100.0),
        since_s=draw(st.sampled_from([0.0, 99.0])),
        trained=trained,
        ready=ready,
        ready_tokens=ready * 300,
        to_start=draw(st.integers(0, 64)) if to_generate else 0,
        to_score=draw(st.integers(0, 3)) if num_scorers else 0,
        num_updates=draw(st.integers(1, 4)),
        group_size=2,
    )
    tp = draw(st.sampled_from([1, 1, 2, 3]))
    slots = state.trainer.layout.slots
    layout = ParallelLayout.of(slots, tp=tp if len(slots) % tp == 0 else 1)
    wanted = lending and draw(st.booleans())
    per_node = draw(st.sampled_from([None, None, 2, 3, 4]))
    topology = ONE_NODE if per_node is None else Topology.of(per_node, -(-bounds[-1] // per_node))
    rules = LayoutRules(asked=AskedLayout(tp=tp), topology=topology)
    return replace(state, trainer=replace(state.trainer, layout=layout, rules=rules, wanted=wanted))


def may_be_asked(policy, state):
    """Policies that lend no device are not asked while one is lent."""
    return not (state.lending and isinstance(policy, Static | InTurns))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=examples(60), deadline=None)
@given(state=states())
def test_every_decision_can_be_carried_out(policy, state):
    """Devices conserved, floors respected, no rollout left behind, nobody moved who is not ready."""
    assume(may_be_asked(policy, state))
    decision = policy.decide(state)
    assert violations(state, decision) == []
    assert {*roles_after(state, decision)} == {slot.slot for slot in state.slots}
    assert len(layout_after(state, decision).slots) >= state.limits.min_train
    assert bool(decision.reason) or not decision.orders


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@settings(max_examples=examples(60), deadline=None)
@given(state=states())
def test_the_same_state_gives_the_same_decision(policy, state):
    assert policy.decide(state) == policy.decide(state)


@settings(max_examples=examples(100), deadline=None)
@given(state=states(at_boundary=True))
def test_it_never_makes_a_move_that_it_expects_to_lose(state):
    decision = Model().decide(state)
    if decision.prediction is not None:
        assert decision.prediction.gain_s > 0
        assert decision.prediction.cost_s >= 0
        assert decision.orders


def carried_out(state, decision):
    """The state afterwards, with nothing else changed."""
    after = roles_after(state, decision)
    targets = {order.id: order.target for order in decision.migrations}
    moved = {move.slot for move in decision.moves}
    return replace(
        state,
        slots=tuple(
            SlotState(slot.slot, after[slot.slot], state.now_s if slot.slot in moved else slot.since_s, slot.ready)
            for slot in state.slots
        ),
        instances=instances_after(state, decision),
        change=state.change + 1,
        trainer=replace(state.trainer, layout=layout_after(state, decision), held=decision.hold_training),
        unfinished=tuple(
            Unfinished(
                each.id, targets.get(each.id, each.instance), each.prompt_tokens, each.generated, each.limit, each.group
            )
            for each in state.unfinished
        ),
    )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("later_s", [0.0, 1000.0], ids=["at once", "much later"])
@settings(max_examples=examples(40), deadline=None)
@given(state=states(at_boundary=True))
def test_under_constant_load_it_comes_to_rest(policy, later_s, state):
    """Asked again and again while nothing but its own orders changes anything, it stops giving orders."""
    assume(may_be_asked(policy, state))
    seen = []
    for _ in range(12):
        decision = policy.decide(state)
        if not decision.orders:
            return
        state = replace(carried_out(state, decision), now_s=state.now_s + later_s)
        roles = tuple(slot.roles for slot in state.slots)
        assert roles not in seen or not decision.moves, f"in circles: {decision.reason}"
        seen.append(roles)
    pytest.fail(f"still giving orders after 12 decisions: {decision.reason}")
