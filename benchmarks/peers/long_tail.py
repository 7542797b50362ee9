"""A small model whose completions have a long tail: most are short, some are ten times as long.

A completion is a topic (x or y), a pace (one of `PACES`), and then the pace's letter again and again until it ends; a
slow pace ends seldom. That is a Markov chain, which a tiny model learns from samples within a minute; it then draws
lengths like those of reasoning models, and reinforcement learning can shift its topics without changing its lengths.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tomli_w

from letters import make_tokenizer

PACES = {"a": (0.8, 45), "b": (0.2, 90)}
"""By letter: how often, and how long on average (geometric)."""
REWARD = "def reward(row, completion):\n    return float(completion.startswith('x'))\n"


def make(
    folder: Path,
    run: Callable[[Sequence[str]], object],
    *,
    hidden: int,
    num_layers: int,
    max_tokens: int,
    steps: int = 80,
) -> None:
    """Writes `model/` (Hugging Face), `prompts.jsonl` and `reward.py` to `folder`. `run` runs a command, here one that
    trains."""
    blank = folder / "blank"
    _blank(blank, hidden, num_layers, max_tokens + 64)
    draw = random.Random(0)
    rows = [{"prompt": prompt(draw.randrange(1000)), "completion": _completion(draw, max_tokens)} for _ in range(4000)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "output_dir": str(folder / "sft"),
        "clean": True,
        "max_steps": steps,
        "model": {"name": str(blank), "debug": {"random_init": True}},
        "data": {"path": str(folder / "sft.jsonl"), "batch_size": 64, "seq_len": 4096},
        "deployment": {"num_gpus": 2},
        "optim": {"lr": 3e-3},
        "scheduler": {"type": "linear", "warmup_steps": 10, "decay_steps": steps - 20},
    }
    (folder / "sft.toml").write_text(tomli_w.dumps(config))
    run([sys.executable, "-m", "ductile", "sft", "@", str(folder / "sft.toml")])
    (folder / "sft" / "model").rename(folder / "model")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt(number)}) + "\n" for number in range(1000))
    )
    (folder / "reward.py").write_text(REWARD)


def prompt(number: int) -> str:
    return f"question {number:03d}:"


def _completion(draw: random.Random, max_tokens: int) -> str:
    (letter,) = draw.choices(list(PACES), [share for share, _ in PACES.values()])
    length = 1
    while draw.random() > 1 / PACES[letter][1] and length < max_tokens:
        length += 1
    return draw.choice("xy") + letter * length


def _blank(folder: Path, hidden: int, num_layers: int, max_len: int) -> None:
    from transformers import Qwen3Config

    vocab = make_tokenizer(folder)
    Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        eos_token_id=vocab["<eos>"],
        pad_token_id=vocab["<pad>"],
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
