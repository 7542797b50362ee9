"""Optimizers are the same function on every mesh, and that of their formula."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ductile.config.checks.trainer_layout import mean_state_bytes
from ductile.config.schema.optimizer_state import optimizer_state
from ductile.config.schema.trainer import AdamWConfig, MuonConfig, OptimConfig, SignSGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ONE_SLOT, ParallelLayout
from ductile.core.layout.geometry.strategy import block_columns, block_layout
from ductile.core.layout.model.parameters import Parameter, is_layer_matrix, is_norm_or_bias, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.messages.workers import LoadState, SaveState
from ductile.model.checkpoint import read_spec
from ductile.parallel.data import like, local_shard
from ductile.trainer import muon, optimizer
from ductile.trainer.adamw_8bit import dequantized, quantized
from ductile.trainer.muon import orthogonal
from ductile.trainer.optimizer import Optimizer
from ductile.trainer.state import StatePlans, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from tests.parity.assemble import Array, assemble, differing
from tests.parity.batches import BATCHES
from tests.parity.measured import run_chunk
from tests.parity.meshes import NUM_LAYERS, NUM_SLOTS, MeshCase, mesh
from tests.parity.model import make_folders, settings_for
from tests.parity.plan import OF_THE_SUITE
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet, SlotFailed

LR, NUM_STEPS = 1e-3, 3
OPTIMIZERS: dict[str, OptimConfig] = {
    "muon": MuonConfig(type="muon", lr=LR),
    "8bit": AdamWConfig(lr=LR, moments="8bit"),
    "sign_sgd": SignSGDConfig(type="sign_sgd", lr=LR),
    "groups": AdamWConfig(lr=LR, weight_decay=0.5, decay_norms_and_biases=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Models of parity, and one whose every matrix has blocks."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "head_dim": 8, "intermediate_size": 64}
    return make_folders(root) | {"blocks": make_model_folder(root / "blocks", "llama", hidden_size=32, **sizes)}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet({}, range(NUM_SLOTS)) as fleet:
        yield fleet


def assign(fleet: Fleet, layout: ParallelLayout, folder: Path, name: str, case: MeshCase | None = None) -> None:
    settings = settings_for(folder, dict(case.settings) if case else {})
    fleet.settings = settings | {"optim": OPTIMIZERS[name].model_dump()}
    fleet.assign_in(layout)


# -- One update on every mesh


def gradient_of(parameter: Parameter, step: int) -> Tensor:
    """Numbers of several sizes, some of them 0."""
    generator = torch.Generator().manual_seed(crc32(f"{parameter.name} {step}".encode()))
    numbers = torch.randn(parameter.shape, generator=generator)
    return numbers * (numbers.abs() > 0.1) * 10.0 ** -(len(parameter.name) % 4)


def take_steps(role: TrainRole) -> None:
    trainer = role._live
    for step in range(NUM_STEPS):
        for parameter in parameters(trainer.spec):
            ours = dict(trainer.model.named_parameters()).get(parameter.name)
            if ours is None:
                continue
            whole, part = gradient_of(parameter, step), torch.zeros_like(local_shard(ours))
            for box in trainer.parts.held(parameter.name):
                trainer.parts.view(parameter.name, part.view(-1), box).copy_(whole[tuple(map(slice, *box))])
            ours.grad = like(ours, part)
        trainer.optimizer.step(LR)
        trainer.optimizer.zero_grad()


def state_of(role: TrainRole) -> dict[str, Array]:
    return {name: part.numpy() for name, part in parts_of(named_state(role._live)).items()}


def whole_state(fleet: Fleet, spec: ModelSpec) -> dict[str, Array]:
    plans = StatePlans(spec, TrainerConfig.model_validate(fleet.settings))
    return assemble(plans.layout(fleet.layout, False), fleet.call(fleet.layout.slots, state_of))


@pytest.fixture(scope="module")
def on_one_slot(fleet: Fleet, folders: Mapping[str, Path]) -> dict[tuple[str, str], tuple[Any, Any]]:
    """The state on one slot, before and after the steps, by model and optimizer."""
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for model, folder in folders.items():
        spec = read_spec(folder)
        for name in OPTIMIZERS:
            assign(fleet, ONE_SLOT, folder, name)
            before = whole_state(fleet, spec)
            fleet.call(ONE_SLOT.slots, take_steps)
            found[model, name] = before, whole_state(fleet, spec)
            fleet.release(ONE_SLOT.slots)
    return found


@pytest.mark.parametrize("name", ["muon", "8bit"])
@pytest.mark.parametrize("case", OF_THE_SUITE, ids=lambda case: case.name)
def test_a_mesh_updates_as_one_slot_does(
    fleet: Fleet, folders: Mapping[str, Path], on_one_slot: Any, case: MeshCase, name: str
) -> None:
    has_tp_of_three = dict(case.axes).get("tp") == 3
    model = "blocks" if name == "8bit" and not has_tp_of_three else "qwen3"
    assign(fleet, case.layout, folders[model], name, case)
    fleet.call(fleet.layout.slots, take_steps)
    found = whole_state(fleet, read_spec(folders[model]))
    fleet.release(fleet.layout.slots)
    check(found, on_one_slot[model, name][1])


def check(found: Mapping[str, Array], one_slot: Mapping[str, Array]) -> None:
    for tensor, expected in one_slot.items():
        if expected.dtype == np.uint8:
            assert np.array_equal(found[tensor], expected), tensor
        else:  # torch's own loops round the last numbers of a part otherwise
            assert np.linalg.norm(found[tensor] - expected) <= 1e-6 * np.linalg.norm(expected), tensor


def small_buckets(role: TrainRole) -> None:
    optimizer.BUCKET_BYTES, muon.BATCH_BYTES = 3100, 1 << 12


@pytest.mark.parametrize("name", ["muon", "8bit"])
def test_state_in_host_memory_that_comes_in_buckets_changes_nothing(
    fleet: Fleet, folders: Mapping[str, Path], on_one_slot: Any, name: str
) -> None:
    case = mesh({"knobs": "optim_cpu_offload"}, dp_shard=3)
    assign(fleet, case.layout, folders["qwen3"], name, case)
    fleet.call(fleet.layout.slots, small_buckets)
    fleet.release(fleet.layout.slots)
    assign(fleet, case.layout, folders["qwen3"], name, case)
    names = [*fleet.call(fleet.layout.slots, names_of_buckets).values()]
    assert len(names[0]) > 3
    if name == "muon":
        assert names[0] == names[1] == names[2], "though their parts have other sizes"
    fleet.call(fleet.layout.slots, take_steps)
    check(whole_state(fleet, read_spec(folders["qwen3"])), on_one_slot["qwen3", name][1])
    fleet.release(fleet.layout.slots)


def names_of_buckets(role: TrainRole) -> list[Sequence[str]]:
    optimizer.BUCKET_BYTES, muon.BATCH_BYTES = 64 << 20, 64 << 20  # of what this process makes later
    return [bucket.names for bucket in role._live.optimizer._buckets]


# -- and it is that of the formula


def textbook(name: str, spec: ModelSpec, before: Mapping[str, Array]) -> dict[str, Tensor]:
    """The weights after the steps, in float64 but for what has other numbers by definition."""
    config, blocks, after = OPTIMIZERS[name], block_columns(spec), dict[str, Tensor]()
    for parameter in parameters(spec):
        weights = torch.from_numpy(before["model/" + parameter.name].copy()).double()
        decays = config.decay_norms_and_biases or not is_norm_or_bias(parameter.name)
        decay = 1 - LR * config.weight_decay * decays
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(NUM_STEPS):
            gradient = gradient_of(parameter, step).double()
            weights = weights * decay
            if isinstance(config, SignSGDConfig):
                weights -= LR * gradient.sign()
                continue
            if isinstance(config, MuonConfig) and is_layer_matrix(parameter.name):
                first = config.mu * first + (1 - config.mu) * gradient
                update = (1 - config.mu) * gradient + config.mu * first
                for rows, part in zip(weights.split(parameter.rows), update.split(parameter.rows), strict=True):
                    rows -= LR * 0.2 * max(part.shape) ** 0.5 * newton_schulz(part)
                continue
            assert isinstance(config, AdamWConfig | MuonConfig)
            first = config.betas1 * first + (1 - config.betas1) * gradient
            second = config.betas2 * second + (1 - config.betas2) * gradient**2
            divisor = (second / (1 - config.betas2 ** (step + 1))).sqrt() + config.eps
            weights -= LR * first / (1 - config.betas1 ** (step + 1)) / divisor
            if name == "8bit" and parameter.name in blocks:
                first = rounded(first, blocks[parameter.name], is_signed=True)
                second = rounded(second.sqrt(), blocks[parameter.name], is_signed=False).square()
        after[parameter.name] = weights
    return after


def newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        inner = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        polynomial = 3.4445 * torch.eye(len(inner), dtype=x.dtype) - 4.7750 * inner + 2.0315 * inner @ inner
        x = polynomial @ x if len(x) <= x.shape[1] else x @ polynomial
    return x


def rounded(numbers: Tensor, columns: int, is_signed: bool) -> Tensor:
    codes, scales = quantized(numbers.float(), columns, is_signed)
    return dequantized(codes, scales, is_signed).double()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_slot_updates_as_the_formula_says(folders: Mapping[str, Path], on_one_slot: Any, name: str) -> None:
    for model, folder in folders.items():
        before, after = on_one_slot[model, name]
        for parameter, expected in textbook(name, read_spec(folder), before).items():
            changed = torch.from_numpy(after["model/" + parameter]).double()
            difference = (changed - expected).norm() / expected.norm()
            assert difference < 1e-6, parameter


def test_muon_is_torchs() -> None:
    """But for torch's iteration, which is in bfloat16 always."""
    torch.manual_seed(1)
    weights, gradient = torch.randn(24, 40), torch.randn(24, 40)
    theirs = nn.Parameter(weights.clone())
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    theirs.grad = gradient
    torchs.step()
    update = gradient.lerp(torch.zeros(24, 40).lerp(gradient, 0.05), 0.95)
    ours = weights * 0.99 - 0.1 * 0.2 * 40**0.5 * orthogonal(update)
    assert (ours - theirs).norm() < 0.02 * (theirs - weights).norm()


# -- 8-bit moments


@given(st.integers(0, 2**31), st.sampled_from([8, 64, 256]), st.booleans(), st.floats(-20, 20))
def test_a_number_of_8_bits_is_near(seed: int, columns: int, is_signed: bool, magnitude: float) -> None:
    numbers = torch.randn(3, 2 * columns, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    numbers = numbers if is_signed else numbers.abs()
    codes, scales = quantized(numbers, columns, is_signed)
    assert (codes.dtype, scales.shape) == (torch.uint8, (3, 2))
    near = dequantized(codes, scales, is_signed)
    largest = scales.repeat_interleave(columns, 1)
    # Of a number between a tenth of the largest and the largest half a space between two of the table is lost.
    assert bool(((near - numbers).abs() <= 0.9 * largest / 2 ** (6 if is_signed else 7) * 0.51).all())
    if not is_signed:  # with a sign the table has 1 and no -1
        assert torch.equal(dequantized(*quantized(near, columns, is_signed), is_signed), near), (
            "it is not rounded twice"
        )


def test_zeros_stay() -> None:
    codes, scales = quantized(torch.zeros(2, 16), 8, is_signed=True)
    assert not dequantized(codes, scales, is_signed=True).any()
    assert not dequantized(torch.zeros_like(codes), torch.zeros_like(scales), is_signed=True).any(), "at the start"


@given(st.integers(0, 2**31), st.integers(2, 5))
def test_what_is_small_in_its_block_does_not_leap(seed: int, ratio: int) -> None:
    """Gradients of one number are some thousandth of its neighbour's, and sometimes 0: steps are near to those of full
    moments, which never are longer than about 7 learning rates."""
    torch.manual_seed(seed)
    scale = 10.0 ** -torch.randint(0, ratio, (4, 64))
    after: dict[str, Tensor] = {}
    for moments in ("full", "8bit"):
        config = AdamWConfig(lr=1.0, moments=moments, weight_decay=0.0, max_norm=None)
        weights, generator = nn.Parameter(torch.zeros(4, 64)), torch.Generator().manual_seed(seed)
        made = Optimizer(config, {"w": optimizer_state(config, "w", "float32", columns=64)}, {"w": weights})
        for _ in range(10):
            weights.grad = (
                scale * torch.randn(4, 64, generator=generator) * (torch.rand(4, 64, generator=generator) > 0.5)
            )
            made.step(1.0)
        after[moments] = weights.detach()
    assert (after["8bit"] - after["full"]).abs().max() < 5.0


def test_8_bits_learn_as_32_do() -> None:
    torch.manual_seed(2)
    inputs, target = torch.randn(64, 32), torch.randn(32, 32)
    losses: dict[str, list[float]] = {}
    for moments in ("full", "8bit"):
        config = AdamWConfig(lr=1e-2, moments=moments)
        weights = nn.Parameter(torch.zeros(32, 32))
        described = {"w": optimizer_state(config, "w", "float32", columns=32)}
        made = Optimizer(config, described, {"w": weights})
        losses[moments] = []
        for _ in range(150):
            loss = (inputs @ (weights - target)).square().mean()
            loss.backward()
            made.step(1e-2)
            made.zero_grad()
            losses[moments].append(float(loss.detach()))
    assert losses["8bit"][-1] == pytest.approx(losses["full"][-1], rel=0.3)
    assert losses["8bit"][-1] < 0.2 * losses["8bit"][0]


def test_a_tp_that_cuts_a_block_is_refused() -> None:
    spec = ModelSpec("llama", 64, 64, 8 * 72, num_layers=1, num_heads=16, num_kv_heads=16, head_dim=16)
    assert block_columns(spec)["layers.0.mlp.down_proj.weight"] == 8
    for tp in (1, 2, 4, 8):
        block_layout(spec, ParallelLayout.of(range(tp), tp=tp))
    with pytest.raises(ValueError, match=r"tp = 16 cuts layers.0.mlp.down_proj.weight inside a block of 8-bit moments"):
        block_layout(spec, ParallelLayout.of(range(16), tp=16))


# -- Resizes


@pytest.mark.parametrize("name", ["muon", "8bit", "sign_sgd"])
def test_a_resize_in_the_middle_of_a_batch_keeps_every_byte(
    fleet: Fleet, folders: Mapping[str, Path], name: str
) -> None:
    layouts = [
        ParallelLayout.of((0, 1), dp_shard=2),
        ParallelLayout.of((4, 2, 1, 5), tp=2, dp_shard=2),
        ParallelLayout.of((3, 0), pp=2),
        ParallelLayout.of((6, 7, 1), dp_replicate=3),
    ]
    folder = folders["blocks"]
    spec = read_spec(folder)
    assert len(block_columns(spec)) == 2 + 4 * NUM_LAYERS or spec.tie_embeddings
    assign(fleet, layouts[0], folder, name)
    for batch in BATCHES[:1]:
        for chunk in batch.chunks:
            run_chunk(fleet, chunk)
        fleet.optim_step(batch.loss_denominator)
    for before, after in pairwise(layouts):
        assert fleet.layout == before
        run_chunk(fleet, BATCHES[1].chunks[0])
        state = whole_state(fleet, spec)
        fleet.resize(after)
        assert differing(state, whole_state(fleet, spec)) == []
    assert np.isfinite(fleet.optim_step(BATCHES[1].loss_denominator).grad_norm)
    fleet.release(fleet.layout.slots)


@pytest.mark.parametrize("name", ["muon", "8bit"])
def test_another_layout_loads_what_one_has_saved(
    fleet: Fleet, folders: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    spec, path = read_spec(folders["blocks"]), str(tmp_path / "state")
    states: list[dict[str, Array]] = []
    for layout, command in (
        (ParallelLayout.of((0, 1, 2, 3), tp=2, dp_shard=2), SaveState(path)),
        (ParallelLayout.of((4, 5, 6)), LoadState(path)),
    ):
        assign(fleet, layout, folders["blocks"], name)
        if not states:
            fleet.call(layout.slots, take_steps)
        fleet.ask(dict.fromkeys(layout.slots, command))
        states.append(whole_state(fleet, spec))
        fleet.release(layout.slots)
    assert differing(*states) == []


def test_codes_are_not_read_as_numbers(fleet: Fleet, folders: Mapping[str, Path], tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assign(fleet, ONE_SLOT, folders["blocks"], "8bit")
    fleet.ask({0: SaveState(path)})
    fleet.release(ONE_SLOT.slots)
    assign(fleet, ONE_SLOT, folders["blocks"], "groups")
    with pytest.raises(SlotFailed, match=r"is torch.uint8 there, and this trainer keeps it in torch.float32"):
        fleet.ask({0: LoadState(path)})
    fleet.release(ONE_SLOT.slots)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planner_counts_what_is_kept(folders: Mapping[str, Path], on_one_slot: Any, name: str) -> None:
    for model, folder in folders.items():
        spec, state = read_spec(folder), on_one_slot[model, name][1]
        kept = sum(each.nbytes for tensor, each in state.items() if not tensor.startswith("model/"))
        assert kept == round(mean_state_bytes(OPTIMIZERS[name], spec, "float32") * spec.num_parameters)
