"""Adapters are trained on every mesh as on one device, and as plain torch trains them; they move, are saved, published
and exported as what they are: y = W x + (alpha / rank) B (A x), with W as it was."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.model import LoraConfig
from ductile.config.schema.trainer import AdamWConfig, GRPOLoss, MuonConfig, OptimConfig, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator, weigh
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import block_columns
from ductile.core.layout.model.parameters import is_adapter, parameters
from ductile.fabric.groups import Groups
from ductile.generator.generate_role import GenerateRole
from ductile.messages.updates import Receiver, SendReport, WeightUpdate, total_of
from ductile.messages.workers import DigestWeights, ForwardBackward, OfferWeights, OptimStep, Publish, Receive, Score
from ductile.model.adapters import first_adapters
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model, read_spec
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.torch_pipelining import HAS_ZERO_BUBBLE
from ductile.records import MicroBatch, Sample, StepReport
from ductile.roles import NotTaken, RoleAssignment
from ductile.scorer.score_role import ScoreRole
from ductile.trainer import outgoing_weights
from ductile.trainer.adamw_8bit import dequantized, quantized
from ductile.trainer.checkpoint import load_state, save_state
from ductile.trainer.export import export_model
from ductile.trainer.loss import make_loss
from ductile.trainer.muon import orthogonal
from ductile.trainer.outgoing_weights import OutgoingWeights
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from ductile.trainer.trainer import Trainer
from ductile.weights.digest import whole_digest
from tests.nightly import mostly_nightly
from tests.ranks import run_alone, run_ranks
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples, summed_loss
from tests.weights.memory_sender import MemorySender

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
STEPS = ((20, 3, 9, 31, 2), (12,), (31, 8, 17, 5))
"""Lengths of the samples of each optimizer step. In the second one a data-parallel rank has none."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True, "mlp_bias": True, "intermediate_size": 50, "tie_word_embeddings": False},
}
ALL = {"rank": 3, "alpha": 6.0}
SOME = {"rank": 4, "alpha": 2.0, "target_modules": ["v_proj", "q_proj", "down_proj"]}
K_AND_UP = {"rank": 2, "alpha": 4.0, "target_modules": ["k_proj", "up_proj", "o_proj"]}
OPTIM = AdamWConfig(lr=1e-2, eps=1e-5, max_norm=0.5)
LOSS = GRPOLoss(kl_coef=0.1, clip_high=0.3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: str(make_model_folder(root / family, family, **keys)) for family, keys in FAMILIES.items()}


def settings_for(folder: str, lora: dict[str, Any], optim: OptimConfig = OPTIM, **model: object) -> dict[str, Any]:
    sections = {"model": {"name": folder, "lora": lora, **model}, "loss": LOSS, "optim": optim, "seed": 5}
    return TrainerConfig.model_validate(sections).model_dump()


def trainer_of(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int]) -> Trainer:
    return Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, ParallelLayout.of(members, **sizes)))


def take_steps(trainer: Trainer, steps: tuple[tuple[int, ...], ...] = STEPS) -> list[StepReport]:
    reports: list[StepReport] = []
    for number, lengths in enumerate(steps):
        samples = make_samples(lengths, seed=number, temperatures=(1.0, 0.6))
        parts = pack(weigh(samples, "token_mean"), trainer.context.layout.num_data_parallel, 34)
        mine = parts[trainer.context.data_parallel_rank]
        trainer.forward_backward(mine[:1])
        trainer.forward_backward(mine[1:])
        reports.append(trainer.optim_step(loss_denominator(samples, "token_mean")))
    return reports


class PlainLora:
    """Plain torch's twin: one device, one sample at a time, and one W + (alpha / rank) B A for each projection."""

    def __init__(
        self, folder: str, lora: dict[str, Any], optimizer: Callable[["PlainLora"], "PlainOptimizer"] | None = None
    ) -> None:
        """optimizer: in the place of torch's AdamW."""
        spec = read_spec(folder, lora=LoraConfig.model_validate(lora).spec)
        self.model, self.spec = load_model(folder).requires_grad_(False), spec
        self.scale = lora["alpha"] / lora["rank"]
        drawn = dict(first_adapters(spec, seed=5))
        self.adapters = {
            part.name: nn.Parameter(values.clone())
            for each in parameters(spec)
            if is_adapter(each.name)
            for part, values in zip(each.parts, drawn[each.name].split(each.rows), strict=True)
        }
        betas, decay = (OPTIM.betas1, OPTIM.betas2), OPTIM.weight_decay
        self.optimizer = torch.optim.AdamW(
            self.adapters.values(), lr=OPTIM.lr, betas=betas, eps=OPTIM.eps, weight_decay=decay
        )
        self.update = self.optimizer.step if optimizer is None else optimizer(self).step

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        own = dict(self.model.named_parameters())
        for each in parameters(self.spec.base):
            parts: list[Tensor] = []
            for part, values in zip(each.parts, own[each.name].split(each.rows), strict=True):
                name = part.name.removesuffix(".weight")
                if f"{name}.lora_A.weight" in self.adapters:
                    down, up = (self.adapters[f"{name}.lora_{letter}.weight"] for letter in "AB")
                    values = values + self.scale * up @ down
                parts.append(values)
            found[each.name] = torch.cat(parts)
        return found

    def __call__(self, *inputs: Any) -> Tensor:
        return functional_call(self.model, self.weights(), inputs)

    def take_steps(self) -> list[float]:
        losses: list[float] = []
        for number, lengths in enumerate(STEPS):
            samples, loss = make_samples(lengths, seed=number, temperatures=(1.0, 0.6)), make_loss(LOSS)
            terms = [summed_loss(self, sample, loss) for sample in weigh(samples, "token_mean")]  # pyright: ignore
            total = torch.stack(terms).sum() / loss_denominator(samples, "token_mean")
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.adapters.values(), OPTIM.max_norm or 1e9)
            self.update()
            losses.append(total.item())
        return losses


class PlainOptimizer(Protocol):
    def step(self) -> None:
        """Update the adapters by their gradients."""
        ...


class PlainMuon:
    """Muon of each A and each B by itself."""

    def __init__(self, of: PlainLora) -> None:
        self.adapters = of.adapters.values()
        self.momenta = [torch.zeros_like(each) for each in self.adapters]

    @torch.no_grad()
    def step(self) -> None:
        for weights, momentum in zip(self.adapters, self.momenta, strict=True):
            assert weights.grad is not None
            momentum.lerp_(weights.grad, 1 - MUON.mu)
            update = orthogonal(weights.grad.lerp(momentum, MUON.mu))
            weights.mul_(1 - MUON.lr * MUON.weight_decay)
            weights.add_(update, alpha=-MUON.lr * 0.2 * max(weights.shape) ** 0.5)


class PlainEightBit:
    """AdamW whose moments are rounded to 8 bits behind each step, where the columns of an adapter make blocks."""

    def __init__(self, of: PlainLora) -> None:
        columns = block_columns(of.spec)
        self.adapters, self.optimizer = of.adapters, of.optimizer
        self.columns = {
            part.name: columns[each.name] for each in parameters(of.spec) for part in each.parts if each.name in columns
        }

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for name in self.adapters.keys() & self.columns.keys():
            moments, columns = self.optimizer.state[self.adapters[name]], self.columns[name]
            first, second = moments["exp_avg"], moments["exp_avg_sq"]
            first.copy_(dequantized(*quantized(first, columns, True), True))
            second.copy_(dequantized(*quantized(second.sqrt(), columns, False), False).square())


def trains(
    groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int]
) -> tuple[list[StepReport], dict[str, Tensor], set[str], int]:
    """Reports, all weights, names of the moments, bytes of gradients in the middle of a step."""
    trainer = trainer_of(groups, members, settings, sizes)
    reports, weights = take_steps(trainer), dict(trainer.export_weights(torch.float32))
    moments = {name for name in named_state(trainer) if not name.startswith("model/")}
    return reports, {name: values.clone() for name, values in weights.items()}, moments, len(named_gradient(trainer))


CASES = [
    ("qwen3", ALL, 1, {}, {}),
    ("llama", SOME, 1, {}, {}),
    ("qwen3", SOME, 2, {}, {"ac": {"mode": "full"}}),
    ("llama", ALL, 2, {"tp": 2}, {}),
    ("qwen3", K_AND_UP, 4, {"tp": 4}, {}),  # two key heads on four slots
    ("llama", SOME, 4, {"tp": 4}, {}),
    ("qwen3", ALL, 2, {"pp": 2}, {}),
    ("llama", SOME, 2, {"pp": 2}, {"pp_schedule": "zero_bubble"}),
    ("qwen3", ALL, 4, {"tp": 2}, {"reduce_every": "step"}),
    ("qwen3", K_AND_UP, 2, {"cp": 2}, {}),
    ("llama", ALL, 4, {"pp": 2, "tp": 2}, {"pp_schedule": "zero_bubble"}),
    ("qwen3", ALL, 2, {"dp_replicate": 2}, {"ac": {"mode": "selective", "targets": ["mlp"]}}),
    ("llama", ALL, 2, {"tp": 2}, {"compile": {"backend": "aot_eager"}}),
    ("qwen3", SOME, 2, {}, {"optim_cpu_offload": True}),
]


@pytest.mark.parametrize(
    ("family", "lora", "num_slots", "sizes", "model"),
    mostly_nightly(CASES, CASES[0], CASES[2], CASES[3], CASES[4], CASES[7], CASES[8]),
)
def test_three_steps_are_those_of_plain_torch(
    folders: dict[str, str],
    family: str,
    lora: dict[str, Any],
    num_slots: int,
    sizes: dict[str, int],
    model: dict[str, Any],
) -> None:
    if model.get("pp_schedule") == "zero_bubble" and not HAS_ZERO_BUBBLE:
        pytest.skip("needs torch 2.13")
    plain = PlainLora(folders[family], lora)
    began = {name: values.detach().clone() for name, values in plain.adapters.items()}
    losses, base = plain.take_steps(), dict(plain.model.named_parameters())
    spec = plain.spec
    for reports, weights, moments, num_gradients in run_ranks(
        num_slots, trains, settings_for(folders[family], lora, **model), sizes
    ):
        assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-5)
        for each in parameters(spec):
            if not each.is_trained:
                assert torch.equal(weights[each.name], base[each.name]), each.name
                continue
            for part, values in zip(each.parts, weights[each.name].split(each.rows), strict=True):
                torch.testing.assert_close(values, plain.adapters[part.name].detach(), atol=1e-5, rtol=1e-4)
                assert not torch.equal(values, began[part.name]), part.name
        assert all(is_adapter(name) for name in moments)
        assert num_gradients == 0


MUON = MuonConfig(type="muon", lr=1e-2, weight_decay=0.1, max_norm=0.5)
OTHERS: dict[str, tuple[OptimConfig, Callable[[PlainLora], PlainOptimizer], set[str]]] = {
    "muon": (MUON, PlainMuon, {"momentum_buffer"}),
    "8bit": (
        OPTIM.model_copy(update={"moments": "8bit"}),
        PlainEightBit,
        {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_is_that_of_each_adapter(folders: dict[str, str], name: str) -> None:
    """Of fused modules each projection's A and B is a matrix of its own. Rank 8, so that Bs, too, have blocks."""
    lora = {"rank": 8, "alpha": 8.0, "target_modules": ["k_proj", "q_proj", "gate_proj", "up_proj", "o_proj"]}
    optim, make, kept = OTHERS[name]
    plain = PlainLora(folders["qwen3"], lora, make)
    losses = plain.take_steps()
    for sizes in ({}, {"tp": 2}):
        num_slots = 2 if sizes else 1
        for reports, weights, moments, _ in run_ranks(
            num_slots, trains, settings_for(folders["qwen3"], lora, optim), sizes
        ):
            assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-4)
            assert {moment.partition("/")[0] for moment in moments} == kept
            for each in parameters(plain.spec):
                for part, values in zip(each.parts, weights[each.name].split(each.rows), strict=True):
                    if each.is_trained:
                        torch.testing.assert_close(values, plain.adapters[part.name].detach(), atol=1e-4, rtol=1e-3)


def test_adapters_begin_as_in_peft_and_with_the_seed(folders: dict[str, str]) -> None:
    spec = read_spec(folders["llama"], lora=LoraConfig(rank=8).spec)
    first, again, other = (dict(first_adapters(spec, seed)) for seed in (1, 1, 2))
    assert first.keys() == {each.name for each in parameters(spec) if each.is_trained}
    assert sum(values.numel() for values in first.values()) == spec.num_trained
    for name, values in first.items():
        assert torch.equal(values, again[name])
        if name.endswith(".lora_B"):
            assert not values.any()
            continue
        assert not torch.equal(values, other[name])
        bound = 1 / sqrt(values.shape[1])
        assert 0.9 * bound < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / sqrt(3), rel=0.2)


def boxes_of(role: TrainRole) -> dict[str, tuple[tuple[int, ...], list[tuple[Any, Tensor]]]]:
    """This slot's own part of state and gradient: each tensor's shape, and boxes with their values."""
    assert role._instance is not None
    trainer = role._instance.trainer
    assert trainer is not None
    found = {}
    for name, local in parts_of(named_state(trainer) | named_gradient(trainer)).items():
        parameter = name.split("/", 1)[1]
        boxes = [(box, trainer.parts.view(parameter, local, box).clone()) for box in trainer.parts.owned(parameter)]
        found[name] = trainer.parts.shape(parameter), boxes
    return found


def whole_state(fleet: Fleet) -> dict[str, bytes]:
    whole: dict[str, Tensor] = {}
    for of_slot in fleet.call(fleet.layout.slots, boxes_of).values():
        for name, (shape, boxes) in of_slot.items():
            tensor = whole.setdefault(name, torch.full(shape, torch.nan))
            for (start, stop), values in boxes:
                tensor[tuple(map(slice, start, stop))] = values
    return {name: tensor.numpy().tobytes() for name, tensor in whole.items()}


def test_every_byte_arrives_in_the_middle_of_a_batch(folders: dict[str, str]) -> None:
    settings = settings_for(folders["llama"], SOME)
    layouts = [
        ParallelLayout.of((0, 1), tp=2),
        ParallelLayout.of((1, 2, 3)),
        ParallelLayout.of((3, 0), (0, 1), pp=2),
        ParallelLayout.of((0, 1, 2, 3), tp=2),
    ]
    with Fleet(settings, range(4)) as fleet:
        fleet.assign_in(layouts[0])
        for number, after in enumerate(layouts[1:]):
            fleet.forward_backward(make_samples((9, 14, 5), seed=number))
            had = whole_state(fleet)
            fleet.resize(after)
            have = whole_state(fleet)
            assert have.keys() == had.keys()
            assert [name for name in had if had[name] != have[name]] == []
            assert {name.partition("/")[0] for name in had} == {"model", "exp_avg", "exp_avg_sq", "gradient"}
            assert all(is_adapter(name) for name in had if not name.startswith("model/"))
            fleet.optim_step(20.0)


def saves(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], path: str) -> list[float]:
    trainer = trainer_of(groups, members, settings, {"tp": 2})
    take_steps(trainer, STEPS[:2])
    save_state(trainer, path)
    return [report.loss for report in take_steps(trainer, STEPS[2:])]


def goes_on(groups: Groups, members: tuple[int, ...], settings: dict[str, Any], path: str) -> list[float]:
    trainer = trainer_of(groups, members, settings | {"seed": 6}, {})
    load_state(trainer, path)
    return [report.loss for report in take_steps(trainer, STEPS[2:])]


def test_a_checkpoint_goes_on_in_another_layout(folders: dict[str, str], tmp_path: Path) -> None:
    settings, path = settings_for(folders["qwen3"], ALL), str(tmp_path / "state")
    expected, _ = run_ranks(2, saves, settings, path)
    for losses in run_ranks(3, goes_on, settings, path):
        assert losses == pytest.approx(expected, rel=1e-5)


OUTGOING: list[OutgoingWeights] = []
"""Updates of this process, which is a slot."""


def sends(role: TrainRole, version: int, base_version: int | None) -> tuple[set[str], SendReport]:
    """Names of the tensors that the slot sends, and its report."""
    assert role._instance is not None
    trainer, reports = role._instance.trainer, list[SendReport]()
    assert trainer is not None
    if not OUTGOING:
        OUTGOING.append(OutgoingWeights(0, 1.0, lambda report: None))
    receivers = (Receiver("http-1", "shared_memory"),)
    update = WeightUpdate(f"u{version}", version, version, receivers, 3000, base_version=base_version)
    with (
        patch.object(outgoing_weights, "WeightSender", MemorySender),
        patch.object(OUTGOING[0], "_tell", reports.append),
    ):
        offer = OUTGOING[0].begin(update, trainer, role._instance.state)
        MemorySender.made[-1].finish(10.0)
        OUTGOING[0].finish(update.update_id, False)
    return {tensor.name for tensor in offer.tensors}, reports[0]


def test_servers_are_sent_adapters_alone_also_after_a_resize(folders: dict[str, str]) -> None:
    settings = settings_for(folders["qwen3"], ALL)
    spec = read_spec(folders["qwen3"], lora=LoraConfig.model_validate(ALL).spec)
    adapters = {each.name for each in parameters(spec) if each.is_trained}
    with Fleet(settings, range(3)) as fleet:
        fleet.assign((0, 1))
        for version, layout in enumerate(
            [None, None, ParallelLayout.of((2, 1), tp=2), ParallelLayout.of((0, 1, 2))], start=1
        ):
            if layout is not None:
                fleet.resize(layout)
            base = version - 1 or None
            replies = fleet.call(fleet.layout.slots, sends, version, base).values()
            reports = [report for _, report in replies]
            everything = {each.name for each in parameters(spec)}
            assert set().union(*(names for names, _ in replies)) == (adapters if base else everything)
            digests = [fleet.call(fleet.layout.slots, digest_of_all)[slot] for slot in fleet.layout.slots]
            assert {total_of(report.digest for report in reports)} == {*digests}
            equal = sum(report.num_bytes_equal for report in reports)
            assert equal == 4 * (spec.num_parameters - spec.num_trained), "so the next one is sent without them"
            fleet.forward_backward(make_samples((9, 14, 5), seed=version))
            fleet.optim_step(20.0)


def digest_of_all(role: TrainRole) -> str:
    assert role._instance is not None
    assert role._instance.trainer is not None
    return whole_digest((name, tensor.clone()) for name, tensor in role._instance.trainer.publish_weights())


PLACE = RoleAssignment(slot=0, layout=ParallelLayout.of((0,)), epoch=1, device="cpu")


def follows_a_trainer(settings: dict[str, Any], lora: dict[str, Any]) -> None:
    """A generator and a scorer, and a generator that joins, have what the trainer has."""
    samples = tuple(make_samples((9, 14), seed=3))
    train = TrainRole(settings, PLACE)
    model = {"name": settings["model"]["name"], "lora": lora, "max_model_len": 64}
    inference = InferenceConfig.model_validate({"model": model}).model_dump()
    generate, score = GenerateRole(inference, PLACE), ScoreRole(settings, replace(PLACE, instance="scorer-0"))
    first = train.handle(Publish(0)).manifest
    train.handle(ForwardBackward((MicroBatch(samples),)))
    train.handle(OptimStep(20.0))
    second = train.handle(Publish(1, with_frozen=False)).manifest
    assert (first.is_whole, second.is_whole) == (True, False)
    assert first.num_bytes >= 20 * second.num_bytes
    assert all(is_adapter(entry.name) for entry in second.tensors)

    assert train._instance is not None
    trainer = train._instance.trainer
    assert trainer is not None
    scored = trainer.score(samples)
    reference = score.handle(Score(samples, "reference")).logprobs
    for role, name in ((generate, "generate"), (score, "score")):
        role.handle(Receive(name, first))
        role.handle(Receive(name, second))
    live = generate.handle(DigestWeights()).live
    assert live.digest == second.digest == whole_digest(trainer.publish_weights())
    by_scorer = score.handle(Score(samples, "policy")).logprobs
    assert score.handle(Score(samples, "reference")).logprobs == reference

    joiner = GenerateRole(inference, replace(PLACE, joining=True))
    with pytest.raises(NotTaken, match="no weights yet"):
        joiner.handle(Receive("generate", second))
    joiner.handle(Receive("generate", generate.handle(OfferWeights("generate")).manifest))

    for number, sample in enumerate(samples):
        expected, mask = np.array(scored[number].array), np.array(sample.loss_mask)
        assert np.abs(expected - reference[number].array).max() > 1e-3
        np.testing.assert_allclose(by_scorer[number].array, expected, atol=1e-5)
        for role in (generate, joiner):
            np.testing.assert_allclose(logprobs_of(role._engine.model, sample), expected, atol=1e-5)  # pyright: ignore
        assert mask.any()
    for role in (joiner, generate, score, train):
        role.close()


def logprobs_of(model: nn.Module, sample: Sample) -> Any:
    """Log-probs of the sample's trained tokens in their places."""
    tokens = torch.tensor(sample.token_ids)
    with torch.no_grad():
        logits = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])) / sample.temperature
    chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return np.concatenate(([0.0], chosen.numpy())) * np.array(sample.loss_mask)


@pytest.mark.parametrize(
    ("rank", "compute_dtype"), mostly_nightly([(4, "float32"), (2, "float32"), (1, "float32")], (4, "float32"))
)
def test_who_has_the_base_is_given_adapters_alone(rank: int, compute_dtype: str) -> None:
    lora = {"rank": rank, "alpha": 8.0}
    settings = settings_for(str(QUICKSTART), lora, compute_dtype=compute_dtype)
    settings["loss"] = GRPOLoss(kl_coef=0.1).model_dump()
    settings["optim"] = AdamWConfig(lr=3e-2).model_dump()
    run_alone(follows_a_trainer, settings, lora)


def exports(
    groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int], path: str
) -> list[Any]:
    trainer = trainer_of(groups, members, settings, sizes)
    take_steps(trainer)
    export_model(trainer, path, "float32")
    return [column.array for column in trainer.score(make_samples((12, 9)))] if "pp" not in sizes else []


@pytest.mark.parametrize(
    ("family", "lora", "num_slots", "sizes"),
    mostly_nightly(
        [
            ("qwen3", K_AND_UP, 2, {"tp": 2}),
            ("llama", ALL, 1, {}),
            ("llama", SOME, 2, {}),
            ("qwen3", ALL, 2, {"pp": 2}),
        ],
        ("qwen3", K_AND_UP, 2, {"tp": 2}),
        ("llama", SOME, 2, {}),
    ),
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_others_read_what_is_exported(
    folders: dict[str, str], tmp_path: Path, family: str, lora: dict[str, Any], num_slots: int, sizes: dict[str, int]
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    target = tmp_path / "model"
    scored, *_ = run_ranks(num_slots, exports, settings_for(folders[family], lora), sizes, str(target))
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(target, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(load(folders[family], dtype=torch.float32), target / "adapter")
    config = json.loads((target / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (lora["rank"], lora["alpha"])
    for number, sample in enumerate(make_samples((12, 9))):
        tokens = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logits, by_peft = (model(tokens).logits[0] for model in (merged, adapted))
            before = load(folders[family], dtype=torch.float32)(tokens).logits[0]
        torch.testing.assert_close(by_peft, logits, atol=1e-4, rtol=1e-4)
        assert (logits - before).abs().max() > 0.05
        if scored:
            ours = (logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]).numpy()
            trained = np.array(sample.loss_mask)[1:]
            np.testing.assert_allclose(scored[number][1:][trained], ours[trained], atol=1e-4)
