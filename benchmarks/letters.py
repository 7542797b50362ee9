"""The tokenizer of the benchmarks' models: a token a printable character, so that a prompt's length is known."""

from pathlib import Path


def make_tokenizer(folder: Path, num_tokens: int = 0) -> dict[str, int]:
    """Writes the files that `transformers` reads it from. Returns the vocabulary, which has words, too, where
    `num_tokens` is more than the characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokens += [f"word{number} " for number in range(num_tokens - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return vocab
