"""The same weights in `transformers` and here give the same logits, packed or one document at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.transformer import Transformer
from tests.tiny import VOCAB_SIZE, make_model_folder

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that, with heads of 16, pairs fall on both sides of the bands and between them.
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama2_tied": ("llama", {"num_key_value_heads": 4}),
    "llama3_gqa": (
        "llama",
        {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": False}),
    "llama3_rope_tied": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama_linear_rope": ("llama", {"rope_parameters": LINEAR}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_one_kv_head_wide_heads": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama_eps": ("llama", {"rms_norm_eps": 0.3, "num_hidden_layers": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("qwen2", {}),
    "qwen2_mha_deep": ("qwen2", {"num_key_value_heads": 4, "num_hidden_layers": 4}),
    "qwen2_theta": ("qwen2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3_tied": ("qwen3", {}),
    "qwen3_wide_heads": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3_biases": ("qwen3", {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3_llama3_rope": ("qwen3", {"head_dim": 16, "rope_parameters": LLAMA3}),
}
LENGTHS = (37, 1, 120, 8)


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Without token 0: it is their padding, whose embedding gets no gradient there."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def packed_logits(model: Transformer, batch: list[Tensor]) -> list[Tensor]:
    lengths = [len(document) for document in batch]
    positions = torch.cat([torch.arange(length, device=batch[0].device) for length in lengths])
    return list(model(torch.cat(batch), positions, PackedAttention(lengths)).split(lengths))


@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(config: str, tmp_path: Path) -> None:
    family, overrides = CONFIGS[config]
    folder = make_model_folder(tmp_path / "m", family, **overrides)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), load_model(folder)
    batch = documents()
    for document, logits in zip(batch, packed_logits(ours, batch), strict=True):
        expected = theirs(document[None]).logits[0]
        assert expected.std() > 0.3  # far from the flat logits for which everything agrees
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(packed_logits(ours, [document])[0], logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", ["llama3_rope", "qwen2", "qwen3_tied"])
def test_gradients_equal_those_of_transformers(config: str, tmp_path: Path) -> None:
    family, overrides = CONFIGS[config]
    folder = make_model_folder(tmp_path / "m", family, **overrides)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), load_model(folder)
    for document, logits in zip(batch := documents(), packed_logits(ours, batch), strict=True):
        logits.logsumexp(-1).sum().backward(retain_graph=True)
        theirs(document[None]).logits[0].logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected = theirs_of(ours, name, gradients)
        torch.testing.assert_close(parameter.grad, expected, atol=1e-4 * float(expected.abs().max()), rtol=0, msg=name)


def theirs_of(model: Transformer, name: str, tensors: dict[str, Any]) -> Tensor:
    """A tensor of theirs under our name, spelt out: the twin of `core/layout/model/parameters.py`."""
    name = name.replace("attention_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
    name = name.replace("attention.", "self_attn.").replace("embed.", "embed_tokens.")
    name = name if name.startswith("lm_head") else "model." + name
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if fused in name:
            return torch.cat([tensors[name.replace(fused, part)] for part in parts])
    return tensors[name]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", family)
    ours = load_model(folder, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16)
    exact = load_model(folder)
    batch = documents()
    for document, logits, reference in zip(batch, packed_logits(ours, batch), packed_logits(exact, batch), strict=True):
        assert logits.dtype == torch.bfloat16
        their_error = (theirs(document[None]).logits[0].float() - reference).abs().mean()
        assert (logits.float() - reference).abs().mean() < 1.5 * their_error


@pytest.mark.parametrize("changed", range(4))
@torch.inference_mode()
def test_a_document_never_changes_anothers_logits(changed: int, tmp_path: Path) -> None:
    model = load_model(make_model_folder(tmp_path / "m"))
    before, after = documents(), documents()
    after[changed] = documents(seed=1)[changed]
    pairs = zip(packed_logits(model, before), packed_logits(model, after), strict=True)
    for index, (logits, changed_logits) in enumerate(pairs):
        assert torch.equal(logits, changed_logits) == (index != changed)


@torch.inference_mode()
def test_a_token_never_changes_earlier_logits(tmp_path: Path) -> None:
    model = load_model(make_model_folder(tmp_path / "m"))
    before, after = documents((30,)), documents((30,))
    after[0][20] = (after[0][20] + 1) % VOCAB_SIZE
    (logits,), (changed_logits,) = packed_logits(model, before), packed_logits(model, after)
    assert torch.equal(logits[:20], changed_logits[:20])
    assert (logits[20:] != changed_logits[20:]).any(-1).all()


def test_the_head_sees_the_last_hidden_states_and_the_output_embeddings(tmp_path: Path) -> None:
    for tied in (True, False):
        model = load_model(make_model_folder(tmp_path / str(tied), tie_word_embeddings=tied))
        ids = documents((9,))[0]
        attend = PackedAttention([9])

        def last_row(hidden: Tensor, weight: Tensor) -> Tensor:
            return hidden[-1] @ weight.t()

        whole = model(ids, torch.arange(9), attend)
        torch.testing.assert_close(model(ids, torch.arange(9), attend, last_row), whole[-1])
        assert (model(ids, torch.arange(9), attend, lambda _, weight: weight) is model.embed.weight) == tied


def test_no_tokens_still_reach_every_parameter(tmp_path: Path) -> None:
    """A rank without work runs forward and backward all the same, so that collectives match."""
    model = load_model(make_model_folder(tmp_path / "m", tie_word_embeddings=False, attention_bias=True))
    nothing = torch.empty(0, dtype=torch.int64)
    model(nothing, nothing, PackedAttention([])).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_a_gpu_computes_the_same(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    batch = documents()
    on_gpu = packed_logits(load_model(folder, device="cuda"), [document.cuda() for document in batch])
    for logits, expected in zip(on_gpu, packed_logits(load_model(folder), batch), strict=True):
        torch.testing.assert_close(logits.cpu(), expected, atol=1e-3, rtol=0)
