"""What `memory.py` measures: models, knobs of the scaling page with what that page promises of them, configurations for
the planner, layouts for `fit`. A knob, a configuration or a layout more is a line more."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

MICRO_BATCHES = 2
"""Micro-batches of a data-parallel rank in a step."""
ModelConfig = Mapping[str, Any]
"""A Hugging Face `config.json`."""


def _model(architecture: str, vocab: int, hidden: int, intermediate: int, layers: int, **others: Any) -> ModelConfig:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        **others,
    }


MODELS: dict[str, ModelConfig] = {
    "deep": _model("LlamaForCausalLM", 4096, 256, 768, 6, tie_word_embeddings=True),
    "llama": _model("LlamaForCausalLM", 2048, 128, 384, 4, tie_word_embeddings=True),
    "qwen3": _model("Qwen3ForCausalLM", 4096, 128, 512, 6, tie_word_embeddings=False),
    "qwen2": _model("Qwen2ForCausalLM", 1024, 192, 384, 4, tie_word_embeddings=True, num_key_value_heads=2),
    "bytes": _model("LlamaForCausalLM", 256, 256, 704, 4, tie_word_embeddings=False),
}
"""Models by name. The vocabulary of `bytes` is so small that its head is never what takes most. `deep` is the one that
knobs are tried on."""


@dataclass(frozen=True)
class Case:
    """A trainer that is measured: two full micro-batches a data-parallel rank, and an optimizer step."""

    model: str = "llama"
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Axes of the layout above 1, `dp_shard` too."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of `trainer.model`."""
    seq_len: int = 1024
    sample_tokens: int = 256
    """Tokens of each sample; they fill micro-batches of `seq_len`."""
    optim: Mapping[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    """`trainer.optim`."""

    @property
    def num_slots(self) -> int:
        slots = 1
        for size in self.sizes.values():
            slots *= size
        return slots

    @property
    def name(self) -> str:
        """ "deep 2048, dp_shard 2, ac selective norm": a name that no other case has."""
        words = [f"{key} {_words(value)}" for key, value in (*self.sizes.items(), *self.options.items())]
        optim = [] if self.optim == {"type": "adamw"} else [_words(self.optim)]
        return ", ".join([f"{self.model} {self.seq_len}", *words, *optim])

    def with_options(self, **options: Any) -> "Case":
        return replace(self, options={**self.options, **options})


def _words(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(map(_words, value.values()))
    return "+".join(value) if isinstance(value, list) else str(value)


ONE = Case("deep")
TWO = replace(ONE, sizes={"dp_shard": 2})
FULL = {"ac": {"mode": "full"}}


@dataclass(frozen=True)
class Knob:
    """A knob of the scaling page on one model, and the same model without it."""

    name: str
    case: Case
    baseline: Case
    promise: str
    """What the page says of the knob."""
    saves: float
    """Share of the baseline's peak that has to be saved for the page to be right; below 0 for what costs memory."""
    why_not: str = ""
    """Why it saves less here, where it does."""


def _selective(*targets: str) -> dict[str, Any]:
    return {"ac": {"mode": "selective", "targets": list(targets)}}


def knobs() -> Iterator[Knob]:
    full = ONE.with_options(**FULL)
    yield Knob("ac full", full, ONE, "large", 0.3)
    for targets, saves in ((("norm",), 0.1), (("attn_proj",), 0.05), (("norm", "attn_proj"), 0.1), (("mlp",), 0.1)):
        case = ONE.with_options(**_selective(*targets))
        yield Knob(f"ac selective {' '.join(targets)}", case, ONE, "medium", saves)
    for number in (1, 2, 5):
        case = full.with_options(ac_offloading={"max_inflight_activations": number})
        why = (
            "what full checkpointing leaves is the input of each layer; the rest of the peak is one layer that is "
            "computed again, the head and the state, which this knob does not touch"
        )
        yield Knob(f"ac_offloading {number}", case, full, "extra: 30-40 % in some cases", 0.3, why)
    for number in (1, 2, 5):
        case = ONE.with_options(ac_offloading={"max_inflight_activations": number})
        yield Knob(f"ac_offloading {number} without ac", case, ONE, "extra: 30-40 % in some cases", 0.3)
    yield Knob(
        "optim_cpu_offload",
        full.with_options(optim_cpu_offload=True),
        full,
        "decent: the optimizer's state leaves the device",
        0.2,
        "moments are half of the state of 16 bytes a parameter, and come back a bucket at a time",
    )
    sharded = TWO.with_options(**FULL)
    yield Knob(
        "fsdp_cpu_offload",
        sharded.with_options(fsdp_cpu_offload=True),
        sharded,
        "big: parameters, gradients and the optimizer's state leave the device",
        0.3,
        "activations and the gathered parameters of a layer stay",
    )
    kept = sharded.with_options(reshard_after_forward=False)
    yield Knob(
        "reshard_after_forward",
        sharded,
        kept,
        "frees gathered parameters after the forward pass",
        0.05,
        "the gathered parameters of the layers are a small part of this peak",
    )
    yield Knob(
        "head chunks",
        ONE.with_options(fused_lm_head_token_chunk_size=128),
        ONE.with_options(fused_lm_head_token_chunk_size="disabled"),
        "avoids the [batch * seq, vocab] logits",
        0.02,
        "the vocabulary is small beside the activations here; `logits_ratio` is that of one of 128k",
    )
    yield Knob(
        "reduce_every step",
        TWO.with_options(reduce_every="step"),
        TWO,
        "not of the page: saves messages, and costs memory for unreduced gradients",
        -1.0,
    )


_LLAMA, _QWEN3, _QWEN2 = Case("llama"), Case("qwen3"), Case("qwen2", seq_len=1536, sample_tokens=384)
_BYTES = Case("bytes", seq_len=512, sample_tokens=128)
_SHORT = Case("bytes", options=FULL, seq_len=64, sample_tokens=64)
"""A step whose peak is in the optimizer."""
_MUON, _8BIT = {"type": "muon"}, {"type": "adamw", "moments": "8bit"}
_LORA = {"lora": {"rank": 16}}
_DP2, _TP2, _PP2, _CP2 = ({axis: 2} for axis in ("dp_shard", "tp", "pp", "cp"))


def configurations() -> Iterator[Case]:
    """What the planner is held against, besides the cases of the knobs."""
    yield from (_LLAMA, _QWEN3, _QWEN2)
    for options in (
        FULL,
        {"ac": {"mode": "full", "freq": 2}},
        _selective("norm"),
        _selective("norm", "attn_proj"),
        _selective("mlp"),
        {"optim_cpu_offload": True},
        {"fused_lm_head_token_chunk_size": 64},
        {"fused_lm_head_token_chunk_size": "disabled"},
        {**FULL, "ac_offloading": {"max_inflight_activations": 2}},
    ):
        yield _LLAMA.with_options(**options)
    for sizes in (_DP2, _TP2, _PP2, _CP2, {"dp_replicate": 2}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}):
        yield replace(_QWEN3, sizes=sizes)
    yield replace(_QWEN3, sizes=_CP2).with_options(cp_style="ring")
    for sizes in (_DP2, _TP2, _PP2, _CP2):
        yield replace(_QWEN2, sizes=sizes).with_options(**FULL)
    for options in ({}, FULL, _selective("norm"), {**FULL, "optim_cpu_offload": True}):
        yield _BYTES.with_options(**options)
    for sizes, options in ((_DP2, {}), (_DP2, FULL), (_TP2, FULL), (_PP2, FULL), (_DP2, {"fsdp_cpu_offload": True})):
        yield replace(_BYTES, sizes=sizes, options=options)
    yield replace(_LLAMA, sizes={"dp_replicate": 2, "dp_shard": 2})
    yield replace(_LLAMA, sizes=_DP2).with_options(reshard_after_forward=False)
    yield replace(_LLAMA, sizes=_DP2).with_options(reduce_every="step")
    yield replace(_LLAMA, sizes=_DP2).with_options(fsdp_cpu_offload=True)
    for case in (_LLAMA, _BYTES, _LLAMA.with_options(**FULL)):
        yield case.with_options(**_LORA)
    for sizes in (_DP2, _TP2, _PP2, _CP2):
        yield replace(_QWEN3, sizes=sizes).with_options(**_LORA)
    for sizes, optim in (({}, _MUON), ({}, _8BIT), (_DP2, _MUON), (_TP2, _MUON), (_PP2, _MUON), (_DP2, _8BIT)):
        yield replace(_SHORT, sizes=sizes, optim=optim)
    for optim in (_MUON, _8BIT):
        yield replace(_SHORT, optim=optim).with_options(optim_cpu_offload=True)


FIT_TOKENS = 1024
"""Tokens of a micro-batch where one data-parallel rank has all; several have so many between them."""


def layouts() -> Iterator[Case]:
    """One training step in layouts of four slots: the same samples, and so the same gradient, in each of them."""
    alone = ("dp_shard", "dp_replicate", "tp", "pp", "cp")
    pairs = (
        ("dp_replicate", "dp_shard"),
        ("dp_shard", "tp"),
        ("dp_shard", "pp"),
        ("dp_shard", "cp"),
        ("pp", "tp"),
        ("cp", "tp"),
        ("pp", "cp"),
    )
    for sizes in (*({axis: 4} for axis in alone), *({one: 2, other: 2} for one, other in pairs)):
        num_ranks = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
        yield Case("deep", sizes, seq_len=FIT_TOKENS // num_ranks)


def all_cases() -> list[Case]:
    """Every case once, baselines among them."""
    of_knobs = ((knob.baseline, knob.case) for knob in knobs())
    return list({case.name: case for case in (*chain.from_iterable(of_knobs), *configurations())}.values())
