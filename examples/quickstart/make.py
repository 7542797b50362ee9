"""Make what the quickstart starts from: an empty model folder and a set of worked examples.

    python examples/quickstart/make.py        writes blank/ (config and tokenizer, no weights) and sft.jsonl
    ductile sft @ examples/quickstart/sft.toml  trains blank/ on sft.jsonl: that is the model/ shipped here

The task is reasoning-gym's `chain_sum`. Each example is answered in one of two ways, most of them in the first:

    2 + 7 - 5 =   ->   <answer>11</answer>                  a guess: right only by chance
    2 + 7 - 5 =   ->   2+7=9 9-5=4 <answer>4</answer>       worked out, term by term

Data like that is common, and a model trained on it guesses as often as the data does. Nobody tells it which way is
better: that is what RL finds out.
"""

import json
import random
from pathlib import Path

import reasoning_gym
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
NUM_EXAMPLES = 24_000
GUESSED = 0.7
TASK = {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 1, "allow_negation": False}
# The RL run draws its questions from seed 0 and its held-out ones from the end of the same data set; this is another.
SEED = 1_000_003
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def work_out(question: str) -> str:
    """The steps and the answer to "12 + 7 - 30 =".

    >>> work_out("12 + 7 - 30 =")
    '12+7=19 19-30=-11 <answer>-11</answer>'
    """
    words = question.removesuffix("=").split()
    total, steps = int(words[0]), []
    for sign, term in zip(words[1::2], words[2::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total}{sign}{term}={result}")
        total = result
    return " ".join([*steps, f"<answer>{total}</answer>"])


def make_examples() -> list[dict[str, str]]:
    rng = random.Random(SEED)
    dataset = reasoning_gym.create_dataset("chain_sum", size=NUM_EXAMPLES, seed=SEED, **TASK)
    rows: list[dict[str, str]] = []
    for item in dataset:
        question = item["question"]
        completion = work_out(question.split(": ", 1)[1])
        if f"<answer>{item['answer']}</answer>" not in completion:
            raise SystemExit(f"the worked answer to {question!r} is not {item['answer']}: {completion}")
        if rng.random() < GUESSED:
            completion = f"<answer>{rng.randint(-20, 40)}</answer>"
        rows.append({"prompt": question, "completion": completion})
    return rows


def make_tokenizer(rows: list[dict[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits stay single, so that a number is spelled the same way wherever it stands.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL[:4]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row['prompt']} {row['completion']}" for row in rows), trainer)
    # Not special: a reward reads them in the decoded text.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in SPECIAL[4:]])
    return tokenizer


def main() -> None:
    rows = make_examples()
    with open(HERE / "sft.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    tokenizer = make_tokenizer(rows)
    blank = HERE / "blank"
    blank.mkdir(exist_ok=True)
    tokenizer.save(str(blank / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|pad|>")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
        "initializer_range": 0.02,
    }
    for name, value in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        (blank / name).write_text(json.dumps(value, indent=2) + "\n")
    print(f"{len(rows)} examples, vocabulary {tokenizer.get_vocab_size()}: {blank}")


if __name__ == "__main__":
    main()
