"""Tiny Hugging Face folders with random weights, written by `transformers` and `tokenizers`, not by our own code.

folder = make_model_folder(tmp_path / "m")                        # Qwen3, 2 layers of 32, tied embeddings
folder = make_model_folder(tmp_path / "m", "llama", tie_word_embeddings=False, num_hidden_layers=3)
"""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SPECIALS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
PAD, BOS, IM_START, IM_END, UNK = range(len(SPECIALS))
"""`<|im_end|>` ends a turn and is the end-of-sequence token."""

CHARACTERS = (*(chr(code) for code in range(32, 127)), "\n", "\t")
VOCAB_SIZE = len(SPECIALS) + len(CHARACTERS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
}


def make_tokenizer_files(path: str | Path) -> Path:
    """One token a character, plus `SPECIALS`; a chat template in ChatML. Any other character is `<|unk|>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate(SPECIALS + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return path


def writes_date(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the chat template begin with today's date. Returns how to set the day of November 2026."""

    def set_day(day: int) -> None:
        monkeypatch.setattr(
            "ductile.tasks.chat_template.datetime", SimpleNamespace(now=lambda: datetime(2026, 11, day))
        )

    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    dated = "{{ 'It is ' + strftime_now('%d %b %Y') + '.' }}" + settings["chat_template"]
    file.write_text(json.dumps(settings | {"chat_template": dated}))
    return set_day


def may_think(folder: Path) -> Path:
    """Give the folder's template a variable, as Qwen3's has it."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    mute = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    settings["chat_template"] = settings["chat_template"].replace("{% endif %}", mute + "{% endif %}")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def hf_config(family: str = "qwen3", **overrides: Any) -> Any:
    """A small `transformers` config of the family; `overrides` are its own keys. Without `transformers` a test is
    skipped here."""
    transformers = pytest.importorskip("transformers")
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    keys = SMALL | ({"head_dim": 8} if family == "qwen3" else {}) | overrides
    return classes[family](**keys)


def make_hf_model(family: str = "qwen3", seed: int = 0, **overrides: Any) -> Any:
    """A random `transformers` model. Weights are ten times larger than usual, so that attention is far from uniform;
    norms and biases are random too, so that leaving one out shows."""
    import torch

    transformers, config = pytest.importorskip("transformers"), hf_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.5)
                else:
                    parameter.normal_(0.0, 0.2)
    return model.eval()


def make_model_folder(path: str | Path, family: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """A whole folder: config.json, generation_config.json, model.safetensors, tokenizer files. Returns `path`."""
    path = Path(path)
    make_hf_model(family, seed, **overrides).save_pretrained(path)
    return make_tokenizer_files(path)
