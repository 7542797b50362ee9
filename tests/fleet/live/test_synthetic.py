"""What the tiny model's servers do not have: experts, hundreds of threads and members.

| row | test |
|---|---|
| 10: read-modify-write outside the lock | test_eight_threads_change_the_roster_and_nothing_is_lost |
| 10: comparison that depends on the order | test_the_order_of_members_says_nothing |
| dense and expert tensors in one stream; uneven shards | test_a_version_of_many_owners_is_put_together |
| probe storm | test_a_hundred_servers_are_probed_side_by_side |
"""

import asyncio
import itertools
import random
import sys
import threading
import time
from functools import partial

import msgspec
import pytest
import torch

from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import ProbeReply
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import FleetTopology, TopologyMember
from ductile.fleet.servers.monitor import Monitor, ProbeOutcome
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.messages.updates import Bucket, digest_text
from ductile.weights.carriers.carrier import bytes_of
from ductile.weights.digest import box_digest, whole_digest
from ductile.weights.live_weights import LiveWeights
from ductile.weights.staged_weights import StagedWeights
from tests.fleet.live.hand import cut

pytestmark = pytest.mark.fleet


def member(name: str) -> TopologyMember:
    return TopologyMember(InstanceId(name), f"http://{name}:80", "first", "ready", 1)


def test_the_order_of_members_says_nothing() -> None:
    members = [member(f"s{number}") for number in range(4)]
    for order in itertools.permutations(members):
        assert FleetTopology(1, tuple(order)) == FleetTopology(1, tuple(members))
    assert FleetTopology(2, tuple(members)) != FleetTopology(1, tuple(members))


def test_eight_threads_change_the_roster_and_nothing_is_lost() -> None:
    roster, told = SharedFleetState(), []
    roster.on_change.add(lambda before, after: told.append((before.epoch, after.epoch)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        for turn in range(250):
            roster.change(lambda now: now.above(now.epoch))
            if turn % 50 == 0:
                reply = ProbeReply(incarnation=f"{number}-{turn}", version=0)
                joined = partial(FleetState.joined, address=f"http://h{number}:80", reply=reply, now=float(turn))
                roster.change(joined)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sys.setswitchinterval(interval)
    assert roster.now.epoch >= 8 * 250
    assert {server.incarnation for server in roster.now.living} == {f"{number}-200" for number in range(8)}
    assert all(roster.now.births[f"http://h{number}:80"] == 5 for number in range(8))
    assert told == sorted(told), "changes are told of in their order"
    assert all(after == later for (_, after), (later, _) in itertools.pairwise(told)), "and each of them once"


@pytest.mark.parametrize("num_owners", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_a_version_of_many_owners_is_put_together(num_owners: int, bucket_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_owners)

    def tensors() -> dict[str, torch.Tensor]:
        return {
            "experts.down": torch.randn(6, 5, 3, generator=generator),
            "experts.up": torch.randn(7, 4, 2, generator=generator).bfloat16(),
            "dense": torch.randn(11, 3, generator=generator),
            "norm": torch.randn(13, generator=generator),
            "nothing": torch.randn(0, 4, generator=generator),
        }

    old, new = tensors(), tensors()
    live = LiveWeights(old, 1)
    staged = StagedWeights(live, 2)
    offers, sums = [], 0
    for owner in range(num_owners):  # each has rows of every tensor, unevenly
        mine = {name: tensor.tensor_split(num_owners)[owner] for name, tensor in new.items()}
        starts = {
            name: sum(len(each) for each in tensor.tensor_split(num_owners)[:owner]) for name, tensor in new.items()
        }
        offer, contents = cut(mine, f"owner-{owner}", bucket_bytes)
        buckets = tuple(replace_boxes(bucket, starts) for bucket in offer.buckets)
        offers.append((buckets, contents))
        sums += sum(
            box_digest(name, tensor, (starts[name], *(0,) * (tensor.dim() - 1))) for name, tensor in mine.items()
        )
    specs = cut(new, "all")[0].tensors
    staged.prepare(specs, [box for buckets, _ in offers for bucket in buckets for box in bucket.boxes])
    pieces = [piece for buckets, contents in offers for piece in zip(buckets, contents, strict=True)]
    random.Random(num_owners).shuffle(pieces)
    for bucket, content in pieces:
        staged.load(bucket, bytes_of(bytearray(content)))
    assert staged.digest() == digest_text(sums) == whole_digest(new.items())
    swapped: dict[str, torch.Tensor] = {}
    staged.commit(lambda made, version: swapped.update(made))
    assert all(torch.equal(swapped[name], tensor) for name, tensor in new.items())


def replace_boxes(bucket: Bucket, starts: dict[str, int]) -> Bucket:
    boxes = tuple(
        msgspec.structs.replace(
            box,
            start=(box.start[0] + starts[box.name], *box.start[1:]),
            stop=(box.stop[0] + starts[box.name], *box.stop[1:]),
        )
        for box in bucket.boxes
    )
    return msgspec.structs.replace(bucket, boxes=boxes)


def test_a_hundred_servers_are_probed_side_by_side() -> None:
    async def story() -> None:
        addresses = frozenset(f"http://h{number}:80" for number in range(100))
        found: dict[str, int] = dict.fromkeys(addresses, 0)

        async def probe(address: str) -> ProbeOutcome:
            await asyncio.sleep(0.2 if address.endswith("7:80") else 0.001)
            return ProbeOutcome("closed", "it is a stub")

        def note(address: str, finding: ProbeOutcome) -> None:
            found[address] += 1

        config = FleetConfig(health_check_interval_seconds=0.25, probe_timeout_seconds=0.2)
        monitor = Monitor(probe, lambda: addresses, note, config, lambda sentence: None)
        began = time.monotonic()
        monitor.start()
        await asyncio.sleep(1.5)
        await monitor.stop()
        assert time.monotonic() - began < 4.0
        assert min(found.values()) >= 3
        assert max(found.values()) <= 9, "no storm"

    asyncio.run(story())
