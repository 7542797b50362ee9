"""Settings that do not do what they say, and their sentences. The formats are asked whether it is so."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ductile.config.checks.numeric_traps import SIGNIFICANT_BITS
from ductile.config.checks.weight_numbers import share_standing_still
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig, SFTConfig

QUICKSTART, SFT, MODEL = "examples/quickstart/rl.toml", "examples/sft/sft.toml", "examples/quickstart/model"


def rl(*flags: str) -> tuple[str, ...]:
    return parse(RLConfig, ["@", QUICKSTART, "--cluster.device", "cpu", *flags]).notices


def sft(*flags: str) -> tuple[str, ...]:
    return parse(SFTConfig, ["@", SFT, *flags]).notices


BFLOAT16 = ("--trainer.model.optimization-dtype", "bfloat16", "--trainer.optim.lr", "1e-6")
DEFAULT_LOSS = ("--trainer.loss.type", "default", "--orchestrator.advantage.type", "default")
TRAPS: dict[str, tuple[tuple[str, ...], str]] = {
    "updates_round_away": (
        BFLOAT16,
        'trainer.model.optimization_dtype = "bfloat16" has 8 significant bits, so that a step of about lr = 1e-06 '
        "rounds away for each weight of 0.00049 or more: about 9",
    ),
    "also_in_float32": (("--trainer.optim.lr", "1e-11"), "has 24 significant bits, so that a step of about lr = 1e-11"),
    "sgd": (
        (*BFLOAT16, "--trainer.optim.type", "sgd"),
        "a step of at most lr max_norm / (1 - momentum) = 1e-05 rounds away for each weight of 0.0039 or more",
    ),
    "sgd_of_nothing": (
        ("--trainer.optim.type", "sgd", "--trainer.optim.lr", "1e-200", "--trainer.optim.max-norm", "1e-200"),
        "a step of at most lr max_norm / (1 - momentum) = 0 rounds away for each weight of 0 or more: about 100% of",
    ),
    "second_moment": (
        BFLOAT16,
        "trainer.optim.betas2 = 0.999 lets the second moment fall by 0.001 of itself a step, and bfloat16, which "
        "trainer.model.optimization_dtype has it kept in, rounds away what is below 0.002: it never falls",
    ),
    "rounded_when_read": (BFLOAT16, f'"bfloat16" rounds the weights of {MODEL}, which are float32, when they are read'),
    "weight_decay": (
        ("--trainer.optim.weight-decay", "0.01", "--trainer.optim.lr", "1e-6"),
        "trainer.optim.weight_decay = 0.01 has no effect: a step takes lr weight_decay = 1e-08 of a weight, and "
        "float32 rounds away what is below 3e-08",
    ),
    "second_moment_of_muon": (
        (*BFLOAT16, "--trainer.optim.type", "muon", "--trainer.optim.betas2", "0.999"),
        "trainer.optim.betas2 = 0.999 lets the second moment fall by 0.001 of itself a step, and bfloat16",
    ),
    **{
        f"weight_decay_of_{name}": (
            (*BFLOAT16, "--trainer.optim.type", name, "--trainer.optim.weight-decay", "0.01"),
            "trainer.optim.weight_decay = 0.01 has no effect: a step takes lr weight_decay = 1e-08 of a weight",
        )
        for name in ("muon", "sign_sgd")
    },
    "eps": (
        ("--trainer.optim.eps", "1e-2"),
        "trainer.optim.eps = 0.01 outweighs the gradient: clipped to trainer.optim.max_norm = 1 it has 0.00",
    ),
    "decay_that_rises": (
        ("--trainer.scheduler.type", "cosine", "--trainer.scheduler.min-lr", "0.1"),
        "trainer.scheduler.min_lr = 0.1 is above trainer.optim.lr = 0.0001: what is called decay makes the learning",
    ),
    "head_of_one_side": (
        (
            "--trainer.model.compute-dtype",
            "bfloat16",
            "--inference.model.dtype",
            "bfloat16",
            "--trainer.model.fp32-lm-head",
        ),
        "trainer.model.fp32_lm_head is true and inference.model.fp32_lm_head is false: one side rounds logits",
    ),
    "two_dtypes": (
        ("--inference.model.dtype", "bfloat16"),
        "trainer.model.compute_dtype is float32 and inference.model.dtype is bfloat16: bfloat16 rounds weights and "
        "activations by up to 0.2%",
    ),
    "no_advantage": ((*DEFAULT_LOSS, "--trainer.loss.adv-tau", "0"), "trainer.loss.adv_tau = 0: advantages count for"),
    "mask_of_one": (
        (*DEFAULT_LOSS, "--trainer.loss.dppo-mask-high", "1"),
        "trainer.loss.dppo_mask_high = 1 has no effect: a probability changes by less than 1",
    ),
    "ipo_of_one": (("--trainer.loss.type", "ipo", "--trainer.loss.ipo-threshold", "2"), "ipo_threshold = 2 has no eff"),
    "clip_of_one": (
        ("--trainer.loss.type", "grpo", "--trainer.loss.clip-low", "1"),
        "trainer.loss.clip_low = 1 has no effect: a ratio is never below 0",
    ),
    "pairs": (
        ("--orchestrator.advantage.type", "grpo", "--orchestrator.rollouts-per-example", "2"),
        "the deviation of two rewards is their difference over sqrt(2), so that advantages are +-0.71",
    ),
    "past_the_end": (
        ("--orchestrator.sampling.ignore-eos", "true"),
        "completions go on to max_tokens behind their end",
    ),
    "greedy_samples": (
        ("--orchestrator.eval.samples-per-example", "4", "--orchestrator.eval.sampling.temperature", "0"),
        "orchestrator.eval.samples_per_example = 4 with orchestrator.eval.sampling.temperature = 0: greedy completions",
    ),
}


@pytest.mark.parametrize(("flags", "expected"), TRAPS.values(), ids=TRAPS)
def test_a_trap_is_told(flags: tuple[str, ...], expected: str) -> None:
    assert [notice for notice in rl(*flags) if expected in notice], rl(*flags)


def test_sft_has_the_same_keys_without_a_prefix() -> None:
    told = sft("--model.optimization-dtype", "bfloat16", "--optim.lr", "1e-6")
    assert [notice for notice in told if notice.startswith('model.optimization_dtype = "bfloat16" has 8 significant')]


def test_a_config_that_says_another_dtype_than_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    said = f"{folder}/config.json says bfloat16, and the weights are float32"
    told = f'{said}: ckpt.export_dtype = "auto" goes by the weights'
    assert told in sft("--model.name", str(folder))
    assert told not in sft("--model.name", str(folder), "--ckpt.export-dtype", "bfloat16")


PARTS = ("slurm",)
"""Examples that are written after another one."""


@pytest.mark.parametrize(
    "path", sorted(path for path in Path("examples").glob("*/*.toml") if path.stem not in PARTS), ids=str
)
def test_the_examples_have_no_trap(path: Path) -> None:
    root = SFTConfig if path.stem == "sft" else RLConfig
    here = {
        RLConfig: ["--model.name", MODEL, "--seq-len", "256", "--orchestrator.sampling.max-tokens", "64"],
        SFTConfig: ["--model.name", MODEL, "--data.seq-len", "256"],
    }[root]
    absent = path.parent.name in ("smollm2", "one_gpu", "multinode")
    assert parse(root, ["@", str(path), *(here if absent else ()), "--cluster.device", "cpu"]).notices == ()


@pytest.mark.parametrize("lr", [1e-3, 1e-5, 1e-6])
def test_as_many_weights_stand_still_as_the_format_says(lr: float) -> None:
    weights = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    moved = (weights.float() + lr).bfloat16() != weights
    told = share_standing_still(weights.float().numpy(), lr, SIGNIFICANT_BITS["bfloat16"])
    assert told == pytest.approx(1 - moved.float().mean().item(), abs=0.01)
    assert share_standing_still(np.zeros(3, np.float32), lr, 8) == 0


def test_what_is_said_of_adamw_is_so() -> None:
    """A second moment in bfloat16 does not fall, and a weight does not decay, where the notes say so."""
    weight = torch.nn.Parameter(torch.full((8,), 0.02, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW([weight], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    weight.grad = torch.ones_like(weight)
    adamw.step()
    highest = adamw.state[weight]["exp_avg_sq"].clone()
    weight.grad.zero_()
    for _ in range(100):
        adamw.step()
    assert torch.equal(adamw.state[weight]["exp_avg_sq"], highest)
    weights = torch.nn.Parameter(torch.rand(100))
    before = weights.detach().clone()
    adamw = torch.optim.AdamW([weights], lr=1e-6, weight_decay=0.01, fused=True)
    for _ in range(100):
        weights.grad = torch.zeros_like(weights)
        adamw.step()
    assert torch.equal(weights, before)
