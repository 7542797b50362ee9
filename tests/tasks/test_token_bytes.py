"""What tokens add to a text, in bytes, against the tokenizer's own decoder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ductile.tasks.token_bytes import token_text
from ductile.tasks.tokenizer import Tokenizer
from tests.tasks.test_tokenizer import TEXTS, byte_level, metaspace, write
from tests.tiny import make_tokenizer_files


def joined(tokenizer, token_ids):
    return b"".join(tokenizer.token_bytes.of(token, first=place == 0) for place, token in enumerate(token_ids))


def word_pieces(path: Path) -> Path:
    """As BERT: pieces that go on with a word, and spaces that no token has."""
    pieces = ["[UNK]", "[SEP]", "a", "b", "##b", "##c", ".", ",", "'", "n't", "é", "##日"]
    backend = Backend(models.WordPiece(vocab={piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return write(path, backend)


def spaces_alone(path: Path) -> Path:
    """As T5: visible spaces, and no bytes."""
    folder = metaspace(path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def added_words(path: Path) -> Path:
    """Added tokens that are none of the byte alphabet's."""
    folder = byte_level(path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<tool▁call>", "日本", " sp"])
    backend.add_special_tokens(["<｜end｜>"])  # noqa: RUF001
    backend.save(str(folder / "tokenizer.json"))
    return folder


KINDS = [make_tokenizer_files, byte_level, metaspace, word_pieces, spaces_alone, added_words]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[Path], Path] = request.param
    return Tokenizer.from_folder(make(tmp_path_factory.mktemp("bytes") / "m"))


@given(st.lists(st.integers(0, 10**6), max_size=12))
def test_the_bytes_of_a_text_s_tokens_are_the_text(tokenizer: Tokenizer, numbers: list[int]) -> None:
    tokens = [number % tokenizer.vocab_size for number in numbers]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert joined(tokenizer, tokens) == text.encode()


@pytest.mark.parametrize("text", [*TEXTS, "🙂é 日本"])
def test_characters_of_several_tokens_are_whole(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert joined(tokenizer, tokens).decode() == tokenizer.decode(tokens, False)


def test_a_part_of_a_character_has_its_bytes_and_a_spelling_of_its_own(tmp_path: Path) -> None:
    for folder in (byte_level(tmp_path / "a"), metaspace(tmp_path / "b")):
        tokenizer = Tokenizer.from_folder(folder)
        tokens = tokenizer.encode("a🎉", add_special_tokens=False)
        parts = [tokenizer.token_bytes.of(token) for token in tokens]
        assert b"".join(parts).strip() == "a🎉".encode()
        assert token_text(parts[-1]) == r"bytes:\x89"
    assert tokenizer.token_bytes.of(tokenizer.vocab_size + 7) == b""
