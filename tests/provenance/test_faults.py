"""Faults put into a generator, each of which the run names right; `make provenance` runs all of this folder."""

import pytest
import torch

from ductile.generator.engine import engine as engine_module
from ductile.generator.engine.scheduler import Scheduler
from ductile.sampling import Sampling
from tests.provenance.rig import Rig, opened
from tests.tiny import make_model_folder

VICTIM = "generator-1"
TENSOR = "layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rig(tmp_path, model):
    for each in opened(tmp_path, model):
        assert each.publish() == each.publish() == []
        yield each


def wrong_version(rig: Rig, monkeypatch):
    """One generator is left out, and samples from the version before."""
    role = rig.generators[VICTIM].role
    monkeypatch.setattr(role, "load_weights", lambda tensors, version: None)


def old_weights_by_the_new_number(rig: Rig, monkeypatch):
    role = rig.generators[VICTIM].role
    kept = {name: tensor.clone() for name, tensor in role._engine.weights()}
    load = role.load_weights
    monkeypatch.setattr(role, "load_weights", lambda tensors, version: load(kept, version))


def tensor_not_sent(rig: Rig, monkeypatch):
    role = rig.generators[VICTIM].role
    kept, load = role._engine.model.get_parameter(TENSOR).clone(), role.load_weights
    monkeypatch.setattr(role, "load_weights", lambda tensors, version: load({**tensors, TENSOR: kept}, version))


def flipped_bits(rig: Rig, monkeypatch):
    """The weights of one server change in its memory, after they were verified."""
    role = rig.generators[VICTIM].role
    load = role.load_weights

    def load_and_flip(tensors, version):
        load(tensors, version)
        weight = role._engine.model.get_parameter(TENSOR).data
        weight.view(torch.int32)[:4] ^= 1 << 25

    monkeypatch.setattr(role, "load_weights", load_and_flip)


def weights_of_another_model(rig: Rig, monkeypatch):
    role = rig.generators[VICTIM].role
    load = role.load_weights
    others = {name: torch.randn_like(tensor) * 0.2 for name, tensor in role._engine.weights()}
    monkeypatch.setattr(role, "load_weights", lambda tensors, version: load(others, version))


def adapter_not_loaded(rig: Rig, monkeypatch):
    """A base, and beside it a delta of rank 2 that the generators lack."""
    weight = rig.trainer.get_parameter(TENSOR)
    rig.delta = {TENSOR: torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1])}
    rig.adapters = {"policy": "0123456789abcdef"}


def stale_kv(rig: Rig, monkeypatch):
    """The prefix cache does not hear of new weights."""

    def unheard(scheduler, keep_cache):
        pass

    monkeypatch.setattr(Scheduler, "weights_changed", unheard)


def sampling_transform(rig: Rig, monkeypatch):
    """Log-probs are those of temperature 1, whatever the request says."""
    real = engine_module.all_logprobs
    monkeypatch.setattr(
        engine_module, "all_logprobs", lambda logits, samplings: real(logits, [Sampling()] * len(samplings))
    )


def numerics(rig: Rig, monkeypatch):
    """The generators compute with another epsilon."""
    for generator in rig.generators.values():
        for module in generator.engine.model.modules():
            if hasattr(module, "eps"):
                module.eps = 0.1


FAULTS = [
    (wrong_version, "wrong_version", "of version 1, and version 2 was published"),
    (old_weights_by_the_new_number, "wrong_version", "has the weights of version 1"),
    (tensor_not_sent, "tensor_not_sent", f"{TENSOR} is still as in version 1"),
    (flipped_bits, "wrong_weights", f"{TENSOR} is neither as published nor as in version 1"),
    (weights_of_another_model, "wrong_weights", "more are neither as published"),
    (adapter_not_loaded, "adapter_not_loaded", "no adapter policy"),
    (stale_kv, "stale_kv", "when keys and values are computed anew"),
    (sampling_transform, "sampling_transform", "agree at temperature 1"),
    (numerics, "numerics", "its weights are the published ones"),
]


@pytest.mark.parametrize(("inject", "kind", "said"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_each_fault_is_named(rig, monkeypatch, inject, kind, said):
    inject(rig, monkeypatch)
    told = rig.publish()
    of_all = inject in (adapter_not_loaded, stale_kv, sampling_transform, numerics)
    assert [row["instance"] for row in told] == (["generator-0", VICTIM] if of_all else [VICTIM])
    for row in told:
        assert (row["diagnosis"], said in row["sentence"]) == (kind, True), row["sentence"]
