"""What a model is made of, as plain numbers: `ModelSpec`, read from a Hugging Face `config.json`.

Everything that the model cannot do is refused here, by name, before a byte of weights is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from ductile.core.layout.model.lora import LoraSpec

Family = Literal["llama", "qwen2", "qwen3"]
Value = TypeVar("Value", int, float, bool)
KINDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false"}
"""What a value of each kind must be, in words."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


LARGEST = {
    "vocab_size": 10_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 10_000,
}
"""Largest values that are read, beyond those of any model: a slip in a `config.json` is told before memory is asked
for."""
MOST_PARAMETERS = 10**13


NEUTRAL: dict[str, object] = {
    "pretraining_tp": 1,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_parallel_residual": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "attention_chunk_size": None,
    "attn_temperature_tuning": False,
    "clip_qkv": None,
    "no_rope_layers": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "scale_emb": 1,
    "use_bidirectional_attention": False,
}
"""Keys that change what some model of these families or their relatives computes, and the only value that ours does:
one that a config has is refused with any other, never dropped."""
NEEDED_BY = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}
"""Keys that a table of rotary positions has for each `rope_type`, beside those that each of them may have."""
ALLOWED_BY_ALL = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)


class SpecError(ValueError):
    """A `config.json` that we cannot build a model from. The text names the key, the value and what is possible."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts. Absent in most models."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    """Context length before stretching. Only `llama3` reads it and the two factors for low and high frequencies."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Whether the projections of q, k and v have a bias."""
    output_bias: bool = False
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k goes through an RMSNorm before the rotation."""
    max_position: int = 2048
    """Longest sequence that the model was trained for; nothing here enforces it."""
    initializer_range: float = 0.02
    """Standard deviation of random weights."""
    lora: LoraSpec | None = None
    """Adapters beside the weights, which alone are trained; None: there are none, and all weights are."""

    def __post_init__(self) -> None:
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
        }
        for key, value in sizes.items():
            if value < 1:
                raise SpecError(f"{key} is {value}; it must be at least 1")
            if value > LARGEST[key]:
                raise SpecError(f"{key} is {_short(value)}; it must be at most {LARGEST[key]:,}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}; "
                "each key/value head serves equally many query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise SpecError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if self.head_dim > LARGEST["head_dim"]:
            raise SpecError(f"head_dim is {_short(self.head_dim)}; it must be at most {LARGEST['head_dim']:,}")
        if self.num_parameters > MOST_PARAMETERS:
            raise SpecError(
                f"its sizes make {self.num_parameters:.3g} parameters; at most {MOST_PARAMETERS:.0e} are read"
            )

    @property
    def base(self) -> "ModelSpec":
        """The model without its adapters."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's projections, by their Hugging Face names."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key)}
        mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        return attention | {"o_proj": (query, hidden)} | mlp

    @property
    def num_of_adapters(self) -> int:
        """Number of the adapters' parameters."""
        if self.lora is None:
            return 0
        return self.num_layers * self.lora.rank * sum(sum(self.projections[name]) for name in self.lora.targets)

    @property
    def num_trained(self) -> int:
        """Number of parameters that training changes."""
        return self.num_parameters if self.lora is None else self.num_of_adapters

    @property
    def num_parameters(self) -> int:
        """Number of parameters, those of adapters included; tied embeddings count once."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = (query + 2 * key) * (self.hidden_size + self.attention_bias)
        attention += query * self.hidden_size + self.hidden_size * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size + self.num_of_adapters


def _short(number: int) -> str:
    text = str(number)
    return text if len(text) <= 20 else f"a number of {len(text)} digits"


def spec_from_hf(config: Mapping[str, object]) -> ModelSpec:
    """Read a `config.json` of transformers 4 or 5. Raises `SpecError` on anything that we would compute differently."""
    family = _family(config)
    _refuse_the_unsupported(config, family)
    hidden_size, num_heads = _read(config, "hidden_size", int), _read(config, "num_attention_heads", int)
    theta, scaling = _rope(config)
    biased = _read(config, "attention_bias", bool, False)
    if config.get("head_dim") is not None:
        head_dim = _read(config, "head_dim", int)
    elif family == "qwen3":
        head_dim = 128  # Qwen3Config's default, which does not follow from the other sizes
    elif num_heads > 0 and hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise SpecError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return ModelSpec(
        family=family,
        vocab_size=_read(config, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_read(config, "intermediate_size", int),
        num_layers=_read(config, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=_read(config, "num_key_value_heads", int, num_heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=_read(config, "rms_norm_eps", float, 1e-6),
        tie_embeddings=_read(config, "tie_word_embeddings", bool, False),
        attention_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        mlp_bias=family == "llama" and _read(config, "mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        max_position=_read(config, "max_position_embeddings", int, 2048 if family == "llama" else 32768),
        initializer_range=_read(config, "initializer_range", float, 0.02),
    )


def _family(config: Mapping[str, object]) -> Family:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        name = str(cast(list[object], architectures)[0])
        if name in ARCHITECTURES:
            family, model_type = ARCHITECTURES[name], config.get("model_type")
            if model_type not in (None, family):
                raise SpecError(
                    f"architectures is {name!r} and model_type is {model_type!r}, which are different models; write "
                    f"{family!r} if it is one"
                )
            return family
        raise SpecError(f"architectures is {name!r}; ductile has {', '.join(ARCHITECTURES)}")
    for family in ARCHITECTURES.values():
        if config.get("model_type") == family:
            return family
    raise SpecError(
        f"neither architectures nor model_type ({config.get('model_type')!r}) names a model that ductile has; "
        f"architectures must be one of {', '.join(ARCHITECTURES)}"
    )


def _refuse_the_unsupported(config: Mapping[str, object], family: Family) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise SpecError(f"hidden_act is {activation!r}; ductile computes 'silu' only")
    for key, neutral in NEUTRAL.items():
        if config.get(key) not in (None, neutral):
            which = f"{key} = {neutral!r} only" if neutral is not None else f"models without {key} only"
            raise SpecError(f"{key} is {config[key]!r}; ductile computes {which}")
    layer_types = config.get("layer_types")
    others = {*map(str, cast(list[object], layer_types))} - {"full_attention"} if isinstance(layer_types, list) else ()
    if config.get("use_sliding_window") or "sliding_attention" in others:
        raise SpecError(
            "sliding-window attention is not supported; set use_sliding_window to false and drop layer_types"
        )
    if others:
        raise SpecError(f"layer_types has {min(others)!r}; ductile has layers of 'full_attention' only")
    if family == "llama" and config.get("sliding_window") and "use_sliding_window" not in config:
        raise SpecError(
            f"sliding_window is {config['sliding_window']!r}; sliding-window attention is not supported. Where the "
            "model has none, take the key out"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise SpecError(f"{key}: quantised weights are not supported; save the model in bfloat16 first")
    auto_map = config.get("auto_map")
    if isinstance(auto_map, Mapping) and "AutoModelForCausalLM" in auto_map:
        code = cast(Mapping[str, object], auto_map)["AutoModelForCausalLM"]
        raise SpecError(
            f"auto_map has {code!r}, code of the model's own; ductile computes {'/'.join(ARCHITECTURES)} only"
        )


def _rope(config: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` beside an optional `rope_scaling`."""
    key, rope = _rope_table(config)
    theta = _read(rope if "rope_theta" in rope else config, "rope_theta", float, 10_000.0)
    if "rope_theta" in rope and config.get("rope_theta") not in (None, rope["rope_theta"]):
        raise SpecError(
            f"rope_theta is {config['rope_theta']!r}, and {rope['rope_theta']!r} in {key}; write one of them"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise SpecError(f"{key}.type is {rope['type']!r}, and {key}.rope_type is {kind!r}; write one of them")
    if _read(rope, "partial_rotary_factor", float, 1.0) != 1.0:
        raise SpecError(
            f"{key}.partial_rotary_factor is {rope['partial_rotary_factor']!r}; ductile rotates whole heads only"
        )
    if kind not in NEEDED_BY:
        raise SpecError(f"{key}.rope_type is {kind!r}; ductile has 'default', 'linear' and 'llama3'")
    if surplus := sorted({name for name in rope if rope[name] is not None} - NEEDED_BY[str(kind)] - ALLOWED_BY_ALL):
        said = "" if "rope_type" in rope or "type" in rope else ", the default,"
        raise SpecError(f"{key}.{surplus[0]} is {rope[surplus[0]]!r}; rope_type {kind!r}{said} does not have it")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _positive(rope, "factor"))
    scaling = RopeScaling(
        "llama3",
        factor=_positive(rope, "factor"),
        low_freq_factor=_positive(rope, "low_freq_factor"),
        high_freq_factor=_positive(rope, "high_freq_factor"),
        original_max_position=_read(rope, "original_max_position_embeddings", int),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise SpecError(
            f"{key}.high_freq_factor is {scaling.high_freq_factor}; it must be larger than low_freq_factor, "
            f"which is {scaling.low_freq_factor}"
        )
    return theta, scaling


def _rope_table(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """The key that has the table of rotary positions, and the table; an empty one where the config has none."""
    tables: dict[str, Mapping[str, object]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"{key} is {value!r}; it must be a table with rope_type")
        if value:
            tables[key] = cast(Mapping[str, object], value)
    for key, table in tables.items():
        if any(isinstance(entry, Mapping) for entry in table.values()):
            raise SpecError(f"{key} has one table a layer type; ductile has one kind of layer")
    if len(tables) == 2 and tables["rope_parameters"] != tables["rope_scaling"]:
        raise SpecError("rope_parameters and rope_scaling say different things; write one of them")
    nothing: Mapping[str, object] = {}
    return next(iter(tables.items()), ("rope_parameters", nothing))


def _read(config: Mapping[str, object], key: str, kind: type[Value], default: Value | None = None) -> Value:
    value = config.get(key)
    if value is None:
        if default is None:
            raise SpecError(f"{key} is missing")
        return default
    accepted = int | float if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise SpecError(f"{key} is {value!r}; it must be {KINDS[kind]}")
    try:
        return kind(value)
    except OverflowError:
        raise SpecError(f"{key} is too large for a number of this machine") from None


def _positive(config: Mapping[str, object], key: str) -> float:
    value = _read(config, key, float)
    if value <= 0:
        raise SpecError(f"{key} is {value}; it must be above 0")
    return value
