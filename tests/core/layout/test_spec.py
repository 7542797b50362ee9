"""`config.json` of transformers 4 and 5 to `ModelSpec`, and which ones are refused."""

import pytest
from transformers import AutoModelForCausalLM

from ductile.core.layout.model.spec import ModelSpec, RopeScaling, SpecError, spec_from_hf
from tests.tiny import hf_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_reads_every_number() -> None:
    assert spec_from_hf(LLAMA) == ModelSpec(
        family="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        max_position=4096,
    )


@pytest.mark.parametrize(
    ("old", "new", "scaling"),
    [
        ({"rope_theta": 7.0}, {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, None),
        ({"rope_theta": 7.0, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 7}}, None),
        (
            {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 4.0}},
            RopeScaling("linear", 4.0),
        ),
        (
            {"rope_theta": 7.0, "rope_scaling": LLAMA3_ROPE},
            {"rope_parameters": {"rope_theta": 7.0, **LLAMA3_ROPE}},
            RopeScaling("llama3", 8.0, 1.0, 4.0, 1024),
        ),
    ],
)
def test_rope_is_read_from_both_spellings(
    old: dict[str, object], new: dict[str, object], scaling: RopeScaling | None
) -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    spec = spec_from_hf(plain | old)
    assert spec == spec_from_hf(plain | new)
    assert (spec.rope_theta, spec.rope_scaling) == (7.0, scaling)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 6, "num_key_value_heads": 1}),
        ("qwen2", {"num_hidden_layers": 3}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 20, "tie_word_embeddings": False}),
    ],
)
def test_counts_parameters_as_transformers_does(family: str, overrides: dict[str, object]) -> None:
    config = hf_config(family, **overrides)
    spec = spec_from_hf(config.to_dict() | {"architectures": None})
    assert spec.num_parameters == AutoModelForCausalLM.from_config(config).num_parameters()


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "unknown_architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "architectures is 'GPT2LMHeadModel'; ductile has LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "no_architecture": (
        {"architectures": None, "model_type": "bert"},
        r"neither architectures nor model_type \('bert'\) names",
    ),
    "missing_key": ({"hidden_size": None}, "hidden_size is missing"),
    "wrong_type": ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
    "true_is_not_one": ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be an integer"),
    "not_a_number": ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'; it must be a number"),
    "not_a_flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
    "no_layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    "too_many_layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 10,000"),
    "too_many_words": ({"vocab_size": 10**400}, "vocab_size is a number of 401 digits; it must be at most 10,000,000"),
    "too_wide_a_head": ({"head_dim": 10**6}, "head_dim is 1000000; it must be at most 10,000"),
    "too_many_parameters": (
        {"hidden_size": 800_000, "num_hidden_layers": 9_000, "head_dim": 128},
        r"its sizes make .* parameters; at most 1e\+13 are read",
    ),
    "no_such_float": ({"rms_norm_eps": 10**400}, "rms_norm_eps is too large"),
    "groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads 8 is not a multiple of num_key_value_heads 3; each key/value head serves equally many",
    ),
    "heads": ({"num_attention_heads": 7}, "hidden_size 64 is not a multiple of num_attention_heads 7"),
    "odd_head": ({"head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; ductile computes 'silu' only"),
    "window": ({"use_sliding_window": True}, "sliding-window attention is not supported"),
    "window_by_layer": (
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "sliding-window attention is not supported",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
    "slices": ({"pretraining_tp": 2}, "pretraining_tp is 2; ductile computes pretraining_tp = 1 only"),
    "other_code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}},
        "auto_map has 'modeling_x.XForCausalLM', code of the model's own",
    ),
    "other_model_type": (
        {"model_type": "mistral"},
        "architectures is 'LlamaForCausalLM' and model_type is 'mistral', which are different models; write 'llama'",
    ),
    "window_of_a_relative": ({"sliding_window": 4096}, "sliding_window is 4096; sliding-window attention is not supp"),
    "layers_of_another_kind": (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types has 'linear_attention'; ductile has layers of 'full_attention' only",
    ),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1; ductile computes attention_dropout = 0 only"),
    "soft_cap": (
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0; ductile computes models without final_logit_softcapping only",
    ),
    "scaled_logits": ({"logits_scaling": 8.0}, "logits_scaling is 8.0; ductile computes logits_scaling = 1 only"),
    "part_of_a_head_on_top": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5; ductile computes partial_rotary_factor = 1 only",
    ),
    "rope_said_twice": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"rope_type": "default"}},
        "rope_parameters and rope_scaling say different things; write one of them",
    ),
    "theta_said_twice": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        "rope_theta is 10000.0, and 1000000.0 in rope_parameters; write one of them",
    ),
    "rope_types": (
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
        "rope_scaling.type is 'linear', and rope_scaling.rope_type is 'default'; write one of them",
    ),
    "rope_without_type": (
        {"rope_scaling": {"factor": 4.0}},
        "rope_scaling.factor is 4.0; rope_type 'default', the default, does not have it",
    ),
    "rope_sections": (
        {"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}},
        r"rope_scaling.mrope_section is \[1, 2, 3\]; rope_type 'default' does not have it",
    ),
    "rope_type": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling.rope_type is 'yarn'; ductile has 'default', 'linear' and 'llama3'",
    ),
    "rope_not_a_table": ({"rope_parameters": 3}, "rope_parameters is 3; it must be a table with rope_type"),
    "rope_by_layer_type": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters has one table a layer type"),
    "rope_without_factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope_factor": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0; it must be above 0"),
    "rope_bands": (
        {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor is 1.0; it must be larger than low_freq_factor, which is 1.0",
    ),
    "part_of_a_head": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor is 0.5; ductile rotates whole heads only",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_hf(LLAMA | change)


def test_what_changes_nothing_is_taken() -> None:
    """Of SmolLM2's config, of Qwen2.5's, and of the library's own dumps."""
    harmless: dict[str, object] = {
        "attention_dropout": 0.0,
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"kv_cache_dtype": {}},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rope_scaling": {},
        "auto_map": {"AutoConfig": "configuration_x.XConfig"},
        "logits_scaling": 1.0,
    }
    assert spec_from_hf(LLAMA | harmless) == spec_from_hf(LLAMA)
