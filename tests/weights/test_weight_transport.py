"""What every `WeightTransport` does."""

import os
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from ductile.records import Manifest
from ductile.weights.digest import whole_digest
from ductile.weights.shared_memory import WeightsUnavailable
from ductile.weights.weight_transport import TRANSPORTS, WeightTransport, transport_of

TENSORS = {
    "embed": torch.arange(15, dtype=torch.float32).reshape(5, 3),
    "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest):
    transport = TRANSPORTS[request.param]()
    yield transport
    transport.close()


def receive(manifest: Manifest) -> Mapping[str, torch.Tensor]:
    """As another process would."""
    return transport_of(manifest).receive(manifest)


def test_receives_what_was_published(transport: WeightTransport):
    manifest = transport.publish(3, TENSORS.items())
    received = receive(manifest)
    assert list(received) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    assert manifest.version == 3
    assert manifest.digest == whole_digest(TENSORS.items())


def test_a_version_may_be_empty(transport: WeightTransport):
    assert receive(transport.publish(0, [])) == {}


def test_receivers_do_not_disturb_each_other(transport: WeightTransport):
    manifest = transport.publish(0, TENSORS.items())
    first, second = receive(manifest), receive(manifest)
    first["embed"].zero_()
    assert torch.equal(second["embed"], TENSORS["embed"])
    assert torch.equal(receive(manifest)["embed"], TENSORS["embed"])


def test_withdrawn_versions_are_freed_and_keep_serving_who_has_them(transport: WeightTransport):
    num_fds = len(os.listdir("/proc/self/fd"))
    manifests = [transport.publish(version, TENSORS.items()) for version in range(3)]
    held = receive(manifests[0])
    transport.withdraw(1)
    assert len(os.listdir("/proc/self/fd")) == num_fds + 2  # version 2's, and the mapping of version 0
    with pytest.raises(WeightsUnavailable, match=r"version 0 is gone.*ended or withdrew"):
        receive(manifests[0])
    assert torch.equal(held["embed"], TENSORS["embed"])
    assert torch.equal(receive(manifests[2])["embed"], TENSORS["embed"])


def test_a_number_that_serves_another_version_is_refused(transport: WeightTransport):
    old = transport.publish(0, TENSORS.items())
    transport.withdraw(0)
    new = transport.publish(1, [("embed", TENSORS["embed"] + 1)])
    assert new.location == old.location
    with pytest.raises(WeightsUnavailable, match="version 0"):
        receive(old)
    transport.withdraw(1)
    changed = {**TENSORS, "embed": TENSORS["embed"] + 1}
    transport.publish(2, changed.items())
    with pytest.raises(WeightsUnavailable, match=r"version 0.*damaged.*fingerprint"):
        receive(old)


def test_publishing_a_version_twice_is_refused(transport: WeightTransport):
    transport.publish(0, [])
    with pytest.raises(ValueError, match="version 0 is published already"):
        transport.publish(0, [])


def test_a_failing_source_leaves_nothing_open(transport: WeightTransport):
    def tensors():
        yield "a", torch.ones(2)
        raise RuntimeError("gather failed")

    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="gather failed"):
        transport.publish(0, tensors())
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "complex7"}, "embed has the unknown dtype 'complex7'"),
        ({"offset_bytes": 10_000}, "embed lies at bytes"),
        ({"offset_bytes": -64}, "embed lies at bytes"),
        ({"shape": (5, 4)}, "embed has 60 bytes, too many or few for float32"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(transport: WeightTransport, change: dict, message: str):
    manifest = transport.publish(0, TENSORS.items())
    wrong = replace(manifest, tensors=(replace(manifest.tensors[0], **change), *manifest.tensors[1:]))
    with pytest.raises(WeightsUnavailable, match=message):
        receive(wrong)


def test_who_asks_for_the_same_version_is_offered_the_same_copy(transport: WeightTransport):
    first = transport.offer(4, TENSORS.items())
    assert transport.offer(4, [("never", torch.ones(1))]) == first
    newer = transport.offer(5, TENSORS.items())
    assert newer.version == 5
    assert torch.equal(receive(first)["embed"], receive(newer)["embed"])


def test_a_manifest_of_an_unknown_transport_is_refused(transport: WeightTransport):
    manifest = replace(transport.publish(3, []), carrier="none")
    with pytest.raises(WeightsUnavailable, match="version 3 is offered by none, and only shared_memory can be read"):
        transport_of(manifest)
