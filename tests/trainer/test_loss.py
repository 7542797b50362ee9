"""Each loss against its formula, one token at a time in numpy; and nothing, however extreme, overflows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.config.reading.imports import ImportPathError
from ductile.config.schema.trainer import CustomLoss, DefaultLoss, GRPOLoss, IPOLoss, LossConfig, SFTLoss
from ductile.records import MicroBatch, Sample
from ductile.trainer.collate import collate
from ductile.trainer.loss import LossInputs, LossOutputs, k3, make_loss, required_fields
from tests.nightly import examples

Token = tuple[float, float, float, float, float]
"""log-prob now, as sampled, before the batch, of the reference; advantage"""


def inputs_of(tokens: list[Token]) -> LossInputs:
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*tokens, strict=True)]
    return LossInputs(
        logprobs=columns[0].requires_grad_(),
        entropies=torch.ones(len(tokens)),
        rollout_logprobs=columns[1],
        old_logprobs=columns[2],
        reference=columns[3],
        advantages=columns[4],
        sequences=torch.zeros(len(tokens), dtype=torch.int64),
    )


def dppo(
    token: Token, low: float, high: float, adv_tau: float, kl_tau: float, c: float = 10.0, kl_coef: float = 0.0
) -> float:
    now, sampled, _, _, advantage = token
    ratio, change = math.exp(now - sampled), math.exp(now) - math.exp(sampled)
    dropped = change > high if advantage > 0 else change < -low or (advantage < 0 and ratio > c)
    return (0.0 if dropped else -adv_tau * advantage * ratio) + kl_tau * (now - sampled) ** 2 + kl_coef * kl(token)


def ipo(token: Token, threshold: float, adv_tau: float, kl_tau: float) -> float:
    now, sampled, _, _, advantage = token
    ratio, change = math.exp(now - sampled), math.exp(now) - math.exp(sampled)
    dropped = abs(change) > threshold or (advantage < 0 and ratio > 10)
    return (0.0 if dropped else -adv_tau * advantage * ratio) + kl_tau * (now - sampled) ** 2


def ppo(token: Token, low: float, high: float, kl_coef: float, cap: float = 2.0, c: float = 3.0) -> float:
    now, sampled, old, _, advantage = token
    ratio = math.exp(now - old)
    gain = min(advantage * ratio, advantage * np.clip(ratio, 1 - low, 1 + high))
    if advantage < 0:
        gain = max(gain, advantage * c)
    return -min(cap, math.exp(old - sampled)) * gain + kl_coef * kl(token)


def kl(token: Token) -> float:
    now, _, _, reference, _ = token
    return math.exp(reference - now) - (reference - now) - 1


TABLE: list[tuple[LossConfig, object]] = [
    (DefaultLoss(), lambda t: dppo(t, 0.2, 0.2, 1.0, 1e-3)),
    (DefaultLoss(dppo_mask_low=0.05, dppo_mask_high=0.3, adv_tau=2, kl_tau=0.1), lambda t: dppo(t, 0.05, 0.3, 2, 0.1)),
    (IPOLoss(), lambda t: ipo(t, 0.1, 1.0, 1e-3)),
    (IPOLoss(ipo_threshold=0.4, adv_tau=2.0, kl_tau=0.0), lambda t: ipo(t, 0.4, 2.0, 0.0)),
    (GRPOLoss(), lambda t: ppo(t, 0.2, 0.2, 0.0)),
    (GRPOLoss(clip_low=0.1, clip_high=0.28, kl_coef=0.05), lambda t: ppo(t, 0.1, 0.28, 0.05)),
    (GRPOLoss(importance_cap=5.0), lambda t: ppo(t, 0.2, 0.2, 0.0, 5.0)),
    (GRPOLoss(clip_ratio_c=None), lambda t: ppo(t, 0.2, 0.2, 0.0, c=math.inf)),
    (DefaultLoss(clip_ratio_c=2.0, kl_coef=0.05), lambda t: dppo(t, 0.2, 0.2, 1.0, 1e-3, 2.0, 0.05)),
    (SFTLoss(), lambda t: -t[0]),
]  # fmt: skip

logprob = st.floats(-8.0, 0.0, width=32)
tokens_lists = st.lists(
    st.tuples(logprob, logprob, logprob, logprob, st.floats(-3, 3, width=32)), min_size=1, max_size=9
)


@pytest.mark.parametrize(("config", "formula"), TABLE, ids=[f"{c.type}-{i}" for i, (c, _) in enumerate(TABLE)])
@given(tokens=tokens_lists)
@settings(deadline=None, max_examples=examples(40))
def test_against_the_formula(config: LossConfig, formula, tokens: list[Token]) -> None:
    got = make_loss(config)(inputs_of(tokens)).loss.tolist()
    assert got == pytest.approx([formula(token) for token in tokens], rel=2e-3, abs=1e-4)


CASES = [
    # log p, log q, advantage -> dropped by default, dropped by ipo
    (-0.1, -0.5, 1.0, True, True),  # p rose by 0.30 and should rise: far enough
    (-0.1, -0.5, -1.0, False, True),  # p rose although it should fall: it must be pulled back
    (-0.5, -0.1, -1.0, True, True),
    (-0.5, -0.1, 1.0, False, True),
    (-3.0, -6.0, 1.0, False, False),  # twenty times likelier, but both are rare: no harm
    (-0.5, -0.4, -1.0, False, False),
    (-0.5, -0.1, 0.0, True, True),
]


@pytest.mark.parametrize(("now", "sampled", "advantage", "by_default", "by_ipo"), CASES)
def test_who_is_dropped(now: float, sampled: float, advantage: float, by_default: bool, by_ipo: bool) -> None:
    inputs = inputs_of([(now, sampled, sampled, 0.0, advantage)])
    assert make_loss(DefaultLoss())(inputs).metrics["masked_fraction"].item() == by_default
    assert make_loss(IPOLoss())(inputs).metrics["masked_fraction"].item() == by_ipo


def test_dropped_tokens_still_feel_the_kl() -> None:
    inputs = inputs_of([(-0.1, -0.5, 0.0, 0.0, 5.0)])
    make_loss(DefaultLoss(kl_tau=0.1))(inputs).loss.sum().backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.item() == pytest.approx(2 * 0.1 * 0.4)


@pytest.mark.parametrize("config", [config for config, _ in TABLE], ids=lambda c: c.type)
@pytest.mark.parametrize("log_ratio", [-200.0, -89.0, 89.0, 200.0])
@pytest.mark.parametrize("advantage", [-1e6, 0.0, 1e6])
def test_nothing_overflows(config: LossConfig, log_ratio: float, advantage: float) -> None:
    before, now = (-200.0, -200.0 + log_ratio) if log_ratio > 0 else (0.0, log_ratio)
    inputs = inputs_of([(now, before, before, before, advantage), (-1.0, -1.0, -1.0, -1.0, 1.0)])
    outputs = make_loss(config)(inputs)
    outputs.loss.sum().backward()
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(outputs.loss).all()
    assert torch.isfinite(inputs.logprobs.grad).all()
    assert all(torch.isfinite(values).all() for values in outputs.metrics.values())


def test_who_sampled_an_older_token_is_corrected_for() -> None:
    """At the weights of the batch, sampled under older ones: the gradient is that of the importance-weighted return."""
    inputs = inputs_of([(-1.0, -1.4, -1.0, 0.0, 3.0), (-1.0, -0.5, -1.0, 0.0, 3.0), (-1.0, -1.0, -1.0, 0.0, 3.0)])
    outputs = make_loss(GRPOLoss())(inputs)
    outputs.loss.sum().backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-3 * math.exp(0.4), -3 * math.exp(-0.5), -3.0])
    assert outputs.metrics["importance"].tolist() == pytest.approx([math.exp(0.4), math.exp(-0.5), 1.0])


def test_ppo_takes_no_gradient_where_it_clips() -> None:
    inputs = inputs_of([(-1.0, -2.0, -2.0, 0.0, 1.0), (-1.0, -1.1, -1.1, 0.0, 1.0)])
    outputs = make_loss(GRPOLoss())(inputs)
    outputs.loss.sum().backward()
    assert inputs.logprobs.grad is not None
    clipped, free = inputs.logprobs.grad.tolist()
    assert clipped == 0.0
    assert free == pytest.approx(-math.exp(0.1))
    assert outputs.metrics["clip_fraction"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("config", [GRPOLoss(), DefaultLoss(kl_tau=0), IPOLoss(kl_tau=0)], ids=lambda c: c.type)
def test_no_token_that_was_all_but_impossible_owns_the_gradient(config: LossConfig) -> None:
    """It was sampled at e^-12, has an advantage below 0, and is likely now: its ratio is 98,716."""
    inputs = inputs_of([(-0.5, -12.0, -12.0, 0.0, -1.0), *[(-1.0, -1.0, -1.0, 0.0, 1.0)] * 99])
    make_loss(config)(inputs).loss.sum().backward()
    assert inputs.logprobs.grad is not None
    shares = inputs.logprobs.grad.abs() / inputs.logprobs.grad.abs().sum()
    assert shares.max().item() == pytest.approx(1 / 99)


def test_mismatch_kl_is_r_minus_log_r_minus_1() -> None:
    outputs = make_loss(DefaultLoss())(inputs_of([(-1.0, -1.5, 0.0, 0.0, 0.0)]))
    assert outputs.metrics["mismatch_kl"].item() == pytest.approx(math.exp(0.5) - 0.5 - 1)


@pytest.mark.parametrize("log_ratio", [1e-3, -1e-4])
def test_the_kl_of_all_but_equal_log_probs_is_half_the_square_of_their_difference(log_ratio: float) -> None:
    assert k3(torch.tensor(log_ratio)).item() == pytest.approx(log_ratio**2 / 2, rel=1e-2)


def example_loss(inputs: LossInputs, scale: float) -> LossOutputs:
    return LossOutputs(-scale * inputs.logprobs, {"scaled": inputs.logprobs.detach() * scale})


def test_a_loss_of_the_users_own() -> None:
    loss = make_loss(CustomLoss(import_path=f"{__name__}.example_loss", kwargs={"scale": 3.0}))
    assert loss(inputs_of([(-1.0, 0.0, 0.0, 0.0, 0.0)])).loss.tolist() == [3.0]


def test_a_loss_of_the_users_own_gets_no_zeros_for_log_probs() -> None:
    plain, compared = CustomLoss(import_path="a.b"), CustomLoss(import_path="a.b", needs_reference=True)
    assert required_fields(plain) == ("rollout_logprobs", "advantages")
    assert required_fields(compared) == ("rollout_logprobs", "advantages", "ref_logprobs")
    sample = Sample(
        (1, 2), (False, True), rollout_logprobs=(0.0, -1.0), advantages=(0.0, 1.0), ref_logprobs=(0.0, -2.0)
    )
    zero = torch.zeros(1)
    asked = collate(MicroBatch((sample,)), required_fields(compared)).loss_inputs(zero, zero)
    assert asked.ref_logprobs.tolist() == [-2.0]
    not_asked = collate(MicroBatch((sample,)), required_fields(plain)).loss_inputs(zero, zero)
    with pytest.raises(ValueError, match="needs_reference = true"):
        _ = not_asked.ref_logprobs


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module.loss", "cannot import no.such.module"),
        ("math.no_such_loss", "math has no 'no_such_loss'"),
        ("nodots", "is not an import path"),
        ("missing.py:loss", "there is no file missing.py"),
    ],
)
def test_a_wrong_import_path_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(ImportPathError, match=message):
        make_loss(CustomLoss(import_path=path))
