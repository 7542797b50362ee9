"""Tensor-parallel models compute what the textbook model computes: log-probs, entropies and every gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.groups import Groups
from ductile.model.attention import PackedAttention
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import data, tensor_parallel
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.vocabulary_parallel import VocabularyParallelHead
from ductile.records import Sample
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks

LLAMA = ModelSpec("llama", 47, 24, 36, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6)
QWEN2 = replace(LLAMA, family="qwen2", attention_bias=True, tie_embeddings=True)
QWEN3 = replace(LLAMA, family="qwen3", head_dim=4, qk_norm=True, tie_embeddings=True)


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        parameter.name: torch.randn(parameter.shape, generator=random) * 0.3 + ("norm" in parameter.name)
        for parameter in parameters(spec)
    }


def packed_of(spec: ModelSpec, rank: int, multiple: int) -> PackedSamples:
    """Samples of a data-parallel rank: a shared prompt, and one that has several completions at other temperatures."""
    random = np.random.default_rng(rank)
    prompt = random.integers(0, spec.vocab_size, 5).tolist()

    def sample(length: int, temperature: float, prompt: list[int]) -> Sample:
        tokens = [*prompt, *random.integers(0, spec.vocab_size, length).tolist()]
        return Sample(
            token_ids=tuple(tokens),
            loss_mask=tuple(index >= max(1, len(prompt)) for index in range(len(tokens))),
            temperature=temperature,
        )

    packed = PackedSamples.of(
        [sample(7, 1.0, prompt), sample(4, 0.7, prompt), sample(9 + rank, 1.0, []), sample(3, 1.3, prompt)]
    )
    missing = -len(packed.token_ids) % multiple
    return replace(
        packed,
        token_ids=torch.cat((packed.token_ids, packed.token_ids.new_zeros(missing))),
        positions=torch.cat((packed.positions, torch.arange(missing))),
        stems=(*packed.stems, missing),
        branches=(*packed.branches, ()),
    )


def loss_of(logprobs: Tensor, entropies: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(len(logprobs))
    return (logprobs * torch.randn(len(logprobs), generator=random)).sum() + 0.1 * (
        entropies * torch.randn(len(entropies), generator=random)
    ).sum()


def reference(spec: ModelSpec, num_ranks: int, multiple: int) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Log-probs and entropies of each data-parallel rank; gradients of the sum of their losses."""
    model = Transformer(spec)
    model.load_state_dict(weights_of(spec))
    scored: list[tuple[Tensor, Tensor]] = []
    for rank in range(num_ranks):
        logprobs, entropies = packed_of(spec, rank, multiple).score(model)
        loss_of(logprobs, entropies).backward()
        scored.append((logprobs.detach(), entropies.detach()))
    return scored, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def built(spec: ModelSpec, context: ParallelContext, compute: torch.dtype = torch.float32) -> Transformer:
    """The slot's part of a model. What is padding is NaN."""
    with torch.device("meta"):
        model = Transformer(spec)
    tensor_parallel.apply(model, context)
    data.shard(model, context.mesh, compute, torch.float32, reshard_after_forward=True)
    model.to_empty(device="cpu")
    layout, whole = model_layout(spec, context.layout), weights_of(spec)
    for name, parameter in model.named_parameters():
        local = data.local_shard(parameter).view(-1).fill_(torch.nan)
        for box, view in views(layout, name, context.slot, local):
            view.copy_(whole[name][box])
    return model


def views(layout: Layout, name: str, slot: int, local: Tensor) -> list[tuple[tuple[slice, ...], Tensor]]:
    """(box of the whole tensor, where it lies in the slot's memory) for all that the slot holds."""
    found = []
    for start, stop, offset, strides, _ in layout[name].holdings.rows_of(slot):
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        found.append((tuple(map(slice, start, stop)), local.as_strided(size, strides, local.storage_offset() + offset)))
    return found


def errors_of(
    groups: Groups,
    members: tuple[int, ...],
    spec: ModelSpec,
    sizes: dict[str, int],
    compute: torch.dtype,
) -> tuple[dict[str, float], bytes]:
    """The largest differences from one device, and this slot's log-probs and entropies."""
    layout = ParallelLayout.of(members, **sizes)
    context = ParallelContext(groups, layout)
    model, described = built(spec, context, compute), model_layout(spec, layout)
    rank, tp = context.data_parallel_rank, layout.dims.tp
    packed = packed_of(spec, rank, multiple=tp)
    head = LogprobHead(packed.rows, packed.targets, packed.temperatures)
    attend = PackedAttention(packed.stems, packed.branches)
    parallel_head = VocabularyParallelHead(head, spec.vocab_size, context.group("tp"))
    logprobs, entropies = model(packed.token_ids, packed.positions, attend, parallel_head)
    loss_of(logprobs, entropies).backward()

    scored, gradients = reference(spec, layout.num_data_parallel, multiple=tp)
    errors = {
        "logprobs": (logprobs - scored[rank][0]).abs().max().item(),
        "entropies": (entropies - scored[rank][1]).abs().max().item(),
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        local, largest = data.local_shard(parameter.grad).view(-1), gradients[name].abs().max()
        assert local.numel() == described.buffer_sizes(groups.slot)[name][1]
        errors[name] = 0.0
        for box, view in views(described, name, groups.slot, local):
            errors[name] = max(errors[name], ((view - gradients[name][box]).abs().max() / largest).item())
            view.zero_()
        assert not local.any(), f"{name}: what is padding has a gradient"
    return errors, torch.cat((logprobs, entropies)).detach().numpy().tobytes()


def check(
    spec: ModelSpec,
    num_slots: int,
    sizes: dict[str, int],
    tolerance: float = 1e-4,
    compute: torch.dtype = torch.float32,
) -> list[dict[str, float]]:
    results = run_ranks(num_slots, errors_of, spec, sizes, compute)
    for errors, _ in results:
        assert all(error < tolerance for error in errors.values()), errors  # also where one is NaN
    tp = sizes["tp"]
    for first in range(0, num_slots, tp):
        assert len({scored for _, scored in results[first : first + tp]}) == 1, "slots of tp have the same bits"
    return [errors for errors, _ in results]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "spec",
    [LLAMA, replace(LLAMA, attention_bias=True, output_bias=True, mlp_bias=True), QWEN2, QWEN3],
    ids=["llama", "llama with biases", "qwen2", "qwen3"],
)
def test_parity_with_one_device(spec: ModelSpec, tp: int) -> None:
    check(spec, tp, {"tp": tp})


@pytest.mark.parametrize(
    ("spec", "tp"),
    [
        (replace(QWEN3, num_heads=8), 3),
        (replace(LLAMA, intermediate_size=9, num_heads=3, num_kv_heads=1, attention_bias=True), 2),
        (replace(LLAMA, num_heads=6, num_kv_heads=2), 3),
        (replace(QWEN3, vocab_size=5), 4),
    ],
    ids=[
        "a slot has three queries of a key, the next one its last",
        "uneven heads and columns",
        "a slot shares its keys with two others",
        "a slot whose rows of the vocabulary are padding",
    ],
)
def test_parts_that_differ(spec: ModelSpec, tp: int) -> None:
    check(spec, tp, {"tp": tp})


@pytest.mark.parametrize(
    ("spec", "num_slots", "sizes"),
    mostly_nightly(
        [
            (QWEN3, 4, {"tp": 2}),
            (replace(LLAMA, attention_bias=True, mlp_bias=True, output_bias=True), 4, {"tp": 2}),
            (replace(QWEN2, vocab_size=5, intermediate_size=11), 8, {"tp": 4}),
            (QWEN3, 8, {"tp": 2, "dp_replicate": 2}),
        ],
        (replace(LLAMA, attention_bias=True, mlp_bias=True, output_bias=True), 4, {"tp": 2}),
    ),
    ids=["qwen3", "llama with biases", "little of everything", "two copies"],
)
def test_with_data_parallelism(spec: ModelSpec, num_slots: int, sizes: dict[str, int]) -> None:
    check(spec, num_slots, sizes)


@pytest.mark.parametrize("num_slots", [2, 4])
def test_bf16_stays_near(num_slots: int) -> None:
    for errors in check(QWEN3, num_slots, {"tp": 2}, tolerance=0.2, compute=torch.bfloat16):
        assert errors["logprobs"] > 1e-3, "it does not compute in bf16"


def refusal(groups: Groups, members: tuple[int, ...], spec: ModelSpec) -> str:
    with torch.device("meta"):
        model = Transformer(spec)
    with pytest.raises(ValueError, match="tp") as refused:
        tensor_parallel.apply(model, ParallelContext(groups, ParallelLayout.of(members, tp=len(members))))
    return str(refused.value)


def refusal_of_a_router(groups: Groups, members: tuple[int, ...]) -> str:
    with torch.device("meta"):
        model = Transformer(QWEN3)
        model.get_submodule("layers.1.mlp").router = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="router") as refused:
        tensor_parallel.apply(model, ParallelContext(groups, ParallelLayout.of(members, tp=2)))
    return str(refused.value)


def test_a_module_of_which_nothing_is_known_is_refused() -> None:
    """A router's weight is whole on every slot, and its gradient would be of the slot's tokens alone."""
    assert run_ranks(2, refusal_of_a_router) == [
        "nothing says what tp does to layers.1.mlp.router, which has parameters: write 'router' in "
        "`tensor_parallel._replacements`, or in STAY where another module sees to its gradients"
    ] * 2  # fmt: skip


def test_a_slot_without_a_head_is_refused_on_all() -> None:
    assert run_ranks(4, refusal, replace(QWEN3, num_heads=6)) == [
        "tp = 4 (trainer.model.tp or scorer.tp) leaves a slot without any part of layers.0.attention.qkv_proj.weight; "
        "write a divisor of the model's num_attention_heads, 6, and of its intermediate_size, 36"
    ] * 4  # fmt: skip
