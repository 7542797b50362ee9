"""A made-up layout with every axis above 1 goes from the configuration to a resize. What carries and prints a layout
takes ep too; where a model's experts lie is not built, so the state is planned without it, and `model_layout` and the
model, when it is made parallel, refuse it."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout, ResizeOrder
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.resize_rulings import describe, judge
from ductile.core.transfer.order import stays_put
from ductile.core.transfer.planning import Planner
from ductile.elastic.transaction import ResizeOptions, Transaction
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.messages.resizes import Prepare
from ductile.messages.workers import AssignRole, Envelope, ForwardBackward
from ductile.parallel import parallelize
from ductile.trainer.state import StatePlans
from ductile.transport.codec import decode, encode
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox
from tests.core.transfer.test_reshard import run
from tests.fleet.train_slots import TrainSlots, play, sample
from tests.orchestrator.doubles import clock
from tests.transport.memory_transport import MemoryTransport

SPEC = ModelSpec("qwen3", 30, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)
CONFIG = TrainerConfig.model_validate({"model": {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4}})
BEFORE = ParallelLayout.of(range(32), (0, 0, 1), pp=2, dp_replicate=2, cp=2, tp=2, ep=4)
AFTER = stays_put(BEFORE, BEFORE.on(range(24, 40)))
"""On 8 slots that leave and 8 that join; half as many in all."""
ORDER = ResizeOrder(3, BEFORE, AFTER)


def without_ep(layout: ParallelLayout) -> ParallelLayout:
    return replace(layout, dims=replace(layout.dims, ep=1))


def test_a_layout_has_every_axis() -> None:
    assert BEFORE.dims == ParallelDims(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)
    assert AFTER.dims == replace(BEFORE.dims, dp_shard=1)
    assert {*AFTER.slots} == {*range(24, 40)}
    assert AFTER.stages == BEFORE.stages
    with pytest.raises(ValueError, match="the number of slots, 12, must be a multiple of pp 2 · dp_replicate 2 · cp 2"):
        BEFORE.on(range(12))


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_state_is_planned_and_every_number_arrives(with_gradient: bool) -> None:
    plans = StatePlans(SPEC, CONFIG)
    before, after = (plans.layout(without_ep(layout), with_gradient) for layout in (BEFORE, AFTER))
    run(before, after, Planner())
    assert before["model/layers.1.mlp.down_proj.weight"].holdings.slots.max() < 16, "stages are where the layout says"
    assert before["model/layers.2.mlp.down_proj.weight"].holdings.slots.min() >= 16


def test_a_state_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="ep is 4, and where experts lie is not built yet"):
        StatePlans(SPEC, CONFIG).layout(BEFORE, False)


def test_the_planner_would_take_experts_too() -> None:
    def experts(layout: ParallelLayout) -> Layout:
        holdings = place((8, 6, 4), layout.expert_mesh, [Shard("ep", 0), Shard("expert_shard", 1)], (("pp", (1,)),))
        return Layout([Tensor("experts", "bfloat16", holdings)], layout.slots)

    run(experts(BEFORE), experts(AFTER), Planner())


def test_slots_that_stay_keep_their_stage_and_columns() -> None:
    staying = {*BEFORE.slots} & {*AFTER.slots}
    kept = [BEFORE.coordinates(slot)["tp"] == AFTER.coordinates(slot)["tp"] for slot in staying]
    assert len(staying) == 8
    assert all(kept)


@pytest.mark.parametrize(
    "message", [AssignRole("train", CONFIG.model_dump(mode="json"), BEFORE, "host:1"), Prepare(ORDER)], ids=type
)
def test_messages_carry_it(message: AssignRole | Prepare) -> None:
    assert decode(encode(Envelope(3, 17, message))) == Envelope(3, 17, message)


def test_the_words_of_a_live_run_carry_it() -> None:
    resized = Resized("resized", "Trainer resized.", 3, BEFORE, AFTER)
    assert msgspec.json.decode(msgspec.json.encode(resized), type=Resized) == resized


def test_an_order_says_who_joins_who_leaves_and_what_a_death_costs() -> None:
    assert (ORDER.joiners, ORDER.leavers) == (tuple(s for s in AFTER.slots if s >= 32), tuple(range(24)))
    assert describe(BEFORE) == "slots 0-31 as pp 2 · dp_replicate 2 · dp_shard 2 · cp 2 · tp 2 · ep 4"
    ruling = judge("freeze", ORDER, {5: "slot 5 died"}, {})
    held = "slot 5 held 1 of 16 parts of the trainer's state; restoring it from another copy is not supported yet"
    assert ruling.reason == f"slot 5 died; {held}"


def fleet() -> tuple[TrainSlots, MemoryTransport, Mailbox, RemoteTrainer]:
    slots = TrainSlots(BEFORE, 40)
    transport = MemoryTransport(dict.fromkeys(slots.slots, slots.respond))
    slots.tell = transport.emit
    mailbox = Mailbox(transport, clock)
    return slots, transport, mailbox, RemoteTrainer(mailbox, BEFORE, Deadlines.same(100))


def test_samples_go_to_data_parallel_ranks() -> None:
    told: list[int] = []

    async def story() -> None:
        _, transport, _, trainer = fleet()
        trainer.on_micro_step.add(lambda done: told.append(done.num_ranks))
        assert trainer.num_ranks == 4
        await trainer.forward_backward([sample(n, 4 + n % 5) for n in range(13)], 10)
        sent: dict[int, list[object]] = {slot: [] for slot in BEFORE.slots}
        for slot, command in transport.sent:
            sent[slot].append(command)
        ranks = {BEFORE.data_parallel_rank(slot): sent[slot] for slot in BEFORE.slots}
        assert all(sent[slot] == ranks[BEFORE.data_parallel_rank(slot)] for slot in BEFORE.slots)
        trained = [
            part.token_ids[0]
            for commands in ranks.values()
            for command in commands
            if isinstance(command, ForwardBackward)
            for micro_batch in command.micro_batches
            for part in micro_batch.samples
        ]
        assert sorted(trained) == list(range(13))
        assert {*told} == {4}, "speeds are those of data-parallel ranks"

    play(story)


def test_a_resize_is_carried_out() -> None:
    async def story() -> None:
        slots, _, mailbox, trainer = fleet()
        options = ResizeOptions({}, "127.0.0.1:1", timeout_s=5, leave_s=50)
        result = await Transaction(mailbox, trainer, AFTER, options, mailbox.lose, clock).run()
        assert result.outcome == "resized"
        assert (trainer.layout, slots.wrong) == (AFTER, [])

    play(story)


def test_what_is_not_built_is_refused_when_the_model_is_made_parallel() -> None:
    options = parallelize.ParallelizeOptions.of(CONFIG.model, "cpu")
    with pytest.raises(ValueError, match=r"^trainer\.model\.ep = 4\. Not built yet: expert parallelism") as refused:
        parallelize.build(SPEC, (), SimpleNamespace(layout=BEFORE), None, "cpu", options)  # pyright: ignore[reportArgumentType]
    keys = [word for word in str(refused.value).split() if word.startswith("trainer.model.")]
    assert keys == ["trainer.model.ep"]
