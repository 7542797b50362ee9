"""Special tokens outside `tokenizer.json`: as `AutoTokenizer` has them, or refused with file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ductile.tasks.tokenizer import Tokenizer, TokenizerError
from tests.tiny import VOCAB_SIZE, make_tokenizer_files

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NEXT = VOCAB_SIZE
TEXTS = ("a<tool>b <x>c", "<|im_start|>x<|im_end|> <a> <b>", "  <think>  hi C <image>", "<sep><bos2><eos><c>")

FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {},
    "added tokens": {ADDED: {"<tool>": NEXT, "<x>": NEXT + 1}},
    "added tokens, one special": {ADDED: {"<x>": NEXT, "<tool>": NEXT + 1}, CONFIG: {"extra_special_tokens": ["<x>"]}},
    "added tokens, one of the map": {ADDED: {"<tool>": NEXT}, MAP: {"additional_special_tokens": ["<tool>"]}},
    "the map's eos": {MAP: {"eos_token": "<|pad|>"}},
    "the map's eos as a table": {MAP: {"eos_token": {"content": "<|pad|>", **PLAIN}}},
    "the map's null": {MAP: {"eos_token": None}},
    "the map beside a decoder": {MAP: {"eos_token": "<|pad|>"}, CONFIG: {"added_tokens_decoder": {}}},
    "new ones in the map": {MAP: {"sep_token": "<sep>", "additional_special_tokens": ["<a>", "<b>"]}},
    "extra ones in both": {MAP: {"extra_special_tokens": ["<a>"]}, CONFIG: {"extra_special_tokens": ["<c>"]}},
    "additional in the map": {MAP: {"additional_special_tokens": ["<a>"]}, CONFIG: {"extra_special_tokens": ["<c>"]}},
    "additional in both": {MAP: {"additional_special_tokens": ["<a>"]}, CONFIG: {"additional_special_tokens": ["<c>"]}},
    "an extra one that strips": {
        CONFIG: {"extra_special_tokens": [{"content": "<a>", **PLAIN, "lstrip": True, "__type": "AddedToken"}]}
    },
    "an extra one that the map knows as a table": {MAP: {"extra_special_tokens": [{"content": "<a>", **PLAIN}]}},
    "an extra one with a name": {CONFIG: {"extra_special_tokens": {"image_token": "<image>"}}},
    "a name of its own": {CONFIG: {"image_token": "<image>"}},
    "a name of its own in the map": {MAP: {"image_token": "<image>"}},
    "a name of its own in both": {MAP: {"image_token": "<image>"}, CONFIG: {"image_token": "<x>"}},
    "additional, one known": {CONFIG: {"additional_special_tokens": ["<a>", "<|im_start|>"]}},
    "a decoder": {
        CONFIG: {
            "added_tokens_decoder": {
                str(NEXT): {"content": "<think>", "special": True, **PLAIN, "lstrip": True},
                str(NEXT + 1): {"content": "<tool>", "special": False, **PLAIN, "normalized": True},
            }
        }
    },
    "a special one made plain": {
        CONFIG: {"added_tokens_decoder": {"2": {"content": "<|im_start|>", "special": False, **PLAIN}}}
    },
    "a plain one made special": {CONFIG: {"added_tokens_decoder": {"40": {"content": "C", "special": True, **PLAIN}}}},
    "bos and eos that are not added": {CONFIG: {"add_bos_token": True, "add_eos_token": True}},
    "a new eos": {CONFIG: {"eos_token": "<eos>"}},
    "no eos": {CONFIG: {"eos_token": None}},
    "a new bos as a table": {CONFIG: {"bos_token": {"content": "<bos2>", **PLAIN, "__type": "AddedToken"}}},
    "special tokens as text": {CONFIG: {"split_special_tokens": True}},
}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    make_tokenizer_files(folder)
    for name, content in files.items():
        there = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(there | content))
    return folder


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_special_tokens_are_those_of_transformers(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path, files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    template = "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ image_token }}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = theirs(text, add_special_tokens=add_special_tokens).input_ids
            assert ours.encode(text, add_special_tokens) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        chat = [{"role": "user", "content": text}]
        whole = theirs.apply_chat_template(chat, chat_template=template, return_dict=False)
        assert ours.apply_chat_template(chat, False) == whole


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({ADDED: {"<tool>": NEXT + 5}}, rf"{ADDED} gives '<tool>' the id {NEXT + 5}, and .* it is {NEXT}"),
        ({ADDED: {"<tool>": "7"}}, rf"{ADDED}: <tool> is '7'"),
        (
            {CONFIG: {"added_tokens_decoder": {str(NEXT + 3): {"content": "<think>"}}}},
            rf"{CONFIG}: added_tokens_decoder gives '<think>' the id {NEXT + 3}",
        ),
        ({CONFIG: {"added_tokens_decoder": {"7": "x"}}}, rf"{CONFIG}: added_tokens_decoder\.7 is 'x'"),
        ({CONFIG: {"added_tokens_decoder": [1]}}, rf"{CONFIG}: added_tokens_decoder is \[1\]"),
        ({CONFIG: {"eos_token": 7}}, rf"{CONFIG}: eos_token is 7, which is no token"),
        ({CONFIG: {"extra_special_tokens": [{"text": "x"}]}}, rf"{CONFIG}: extra_special_tokens\.0 is "),
        ({MAP: {"bos_token": {"content": "x", "lstrip": 1}}}, rf"{MAP}: bos_token is .*, which is no token"),
        ({CONFIG: {"additional_special_tokens": "<a>"}}, rf"{CONFIG}: additional_special_tokens is '<a>', which is no"),
    ],
)
def test_special_tokens_that_cannot_be_are_refused(files: dict[str, dict[str, Any]], told: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=told):
        Tokenizer.from_folder(write(tmp_path, files))
