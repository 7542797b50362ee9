"""Rewards are given all that was said in a turn, whatever the tokenizer calls special, and nothing that ended it."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ductile.records import FinishReason, Generation, Sampling
from ductile.tasks.chat_template import ChatTemplate
from ductile.tasks.tokenizer import Tokenizer
from ductile.tasks.turn_text import TurnText, sampled_text
from tests.tiny import IM_END, make_tokenizer_files

USER = [{"role": "user", "content": "2+2"}]
TAG, END = "<answer>", "<end>"


def bytes_with(*special: str, template: str | None = None) -> Tokenizer:
    """A token a byte, and these special tokens; the last of them ends a turn."""
    backend = Backend(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    ends = [backend.token_to_id(token) for token in special[-1:]]
    return Tokenizer(backend, {}, ends, None if template is None else ChatTemplate(template))


def said(tokenizer: Tokenizer, text: str, ended: FinishReason, **sampling: object) -> str:
    ids = tokenizer.encode(text)
    generation = Generation("r", ids, [0.0] * len(ids), [0] * len(ids), ended)
    return TurnText(tokenizer).said(tokenizer.encode("2+2="), generation, Sampling(**sampling))


@pytest.mark.parametrize(
    ("sampled", "ended", "sampling", "expected"),
    [
        ("<answer>4<end>", "stop", {}, "<answer>4"),
        ("<answer>4<end>", "stop", {"skip_special_tokens": True}, "4"),
        ("<answer>4", "length", {}, "<answer>4"),
        ("4<end>", "length", {"ignore_eos": True}, "4<end>"),
        ("4<end>", "stop", {"ignore_eos": True, "stop": ("<end>",)}, "4"),
        ("4<answer>", "stop", {"stop_token_ids": "<answer>"}, "4"),
        (" 4 <answer>", "stop", {"stop": ("<answer>",)}, " 4 "),
        ("a 4 b", "stop", {"stop": (" 4", "a 4")}, ""),
        ("<answer>ST<answer>OP", "stop", {"stop": ("STOP",)}, "<answer>"),
        ("<answer>ST", "stop", {"stop": ("ST",), "include_stop_str_in_output": True}, "<answer>ST"),
        ("STOP", "length", {"stop": ("STOP",)}, "STOP"),
        ("", "abort", {}, ""),
    ],
)
def test_only_what_ended_the_turn_is_left_out(
    sampled: str, ended: FinishReason, sampling: dict[str, object], expected: str
) -> None:
    tokenizer = bytes_with(TAG, END)
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": tuple(tokenizer.encode(TAG))}
    assert said(tokenizer, sampled, ended, **{"skip_special_tokens": False, **sampling}) == expected


def test_half_a_character_at_the_limit_is_shown_as_such() -> None:
    tokenizer = bytes_with(END)
    ids = tokenizer.encode("né")[:-1]
    assert sampled_text(tokenizer, tokenizer.encode("é"), ids) == "n\ufffd"


@pytest.mark.parametrize("skip", [False, True])
def test_the_space_that_a_turn_begins_with_stays(skip: bool) -> None:
    """Decoders of sentencepiece's kind drop it where a text begins."""
    pieces = ["<unk>", "<end>", "▁", *"abc"]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in pieces[:2]])
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, {}, [1], None)
    assert tokenizer.decode([2, 3]) == "a"
    assert sampled_text(tokenizer, [1, 4, 4], [2, 3], skip) == " a"


HEAD = "{% for m in messages %}<|{{ m.role }}|>"
THINKS_AT_LAST = (
    HEAD + "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
)
OPENED = {
    "a header": (HEAD + "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}", ""),
    "nothing": (HEAD + "{{ m.content }}<end>{% endfor %}", ""),
    "a header that looks like a tag": (
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}",
        "",
    ),
    "thoughts": (
        HEAD + "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        "<think>\n",
    ),
    "thoughts, which the last turn has": (THINKS_AT_LAST + "<think>\n{% endif %}", "<think>\n"),
    "closed thoughts": (THINKS_AT_LAST + "<think>\n\n</think>\n\n{% endif %}", ""),
    "thoughts, which every turn has": (
        HEAD + "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        "<think>\n",
    ),
    "closed thoughts, which every turn has": (
        HEAD + "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}",
        "",
    ),
    "thoughts in brackets, behind an end that a silent prompt has": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant][THINK]{% else %}<end>{% endif %}",
        "[THINK]",
    ),
    "thoughts, of a template that wants no assistant": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
        "",
    ),
}


@pytest.mark.parametrize(("template", "expected"), OPENED.values(), ids=OPENED)
def test_what_the_template_opens_belongs_to_the_turn(template: str, expected: str) -> None:
    text = TurnText(bytes_with(END, template=template))
    assert text.opened(USER) == expected
    assert text.opened([*USER, {"role": "assistant", "content": "5"}, *USER] if expected else USER) == expected


def test_a_base_model_opens_nothing(tmp_path: Path) -> None:
    (make_tokenizer_files(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert TurnText(tokenizer).opened(USER) == ""
    assert tokenizer.decode([IM_END], skip_special_tokens=False) == "<|im_end|>"
