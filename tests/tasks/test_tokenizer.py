"""Our tokenizer against `transformers`' on the same folder, and what it says of folders that it cannot use."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from ductile.tasks.tokenizer import Tokenizer, TokenizerError
from tests.tiny import BOS, IM_END, VOCAB_SIZE, make_tokenizer_files

TEXTS = (
    "",
    " ",
    "What is 12 + 7?",
    "two\n\nlines and\ttabs  and   spaces ",
    "naïve café 日本語 🙂",
    "<|im_start|>user\nspecials in text<|im_end|>",
    "don't, it 's, they ' ve",
)

MESSAGES = (
    {"role": "system", "content": "You add."},
    {"role": "user", "content": 'What is 1 + 2? <b>"now" & here</b>'},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "é?"},
)

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "bos_and_blocks_on_their_own_lines": """{{ bos_token }}
    {% for m in messages %}
        {% if m.role == 'system' %}
[SYS]{{ m.content | trim }}
            {% continue %}
        {% endif %}
[{{ m.role | upper }}] {{ m.content }}{{ eos_token }}
    {% endfor %}
    {% if add_generation_prompt %}
[ASSISTANT]
    {% endif %}""",
    "json_namespace_and_tools": (
        "{% set ns = namespace(users=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.users = ns.users + 1 %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ messages | tojson(indent=2) }}{{ ns.users }}{% if tools %}tools{% endif %}{{ '!' if tools is none }}"
    ),
    "generation_marks": (
        "{% set last = 'x' %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set last = 'y' %}"
        "{{ m.content }}{{ last }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ last }}{% endfor %}"
    ),
    "variables": (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ messages[0].content }}"
    ),
}


def byte_level(path: Path) -> Path:
    """As Llama 3 and Qwen: byte-level BPE with merges; a bos token that encoding adds."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, "What is this? the answer is 12 " * 5], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return write(path, backend, bos_token={"content": "<|bos|>", "__type": "AddedToken"}, eos_token="<|im_end|>")


def metaspace(path: Path) -> Path:
    """As Llama 2: words joined by a visible space, bytes as the last resort."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz?+'.,12",
    ]
    backend = Backend(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return write(path, backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=None)


def write(path: Path, backend: Backend, **settings: object) -> Path:
    path.mkdir(parents=True)
    backend.save(str(path / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module", params=[make_tokenizer_files, byte_level, metaspace], ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tokenizer") / "m")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(folder: Path, text: str) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    ids = theirs(text).input_ids
    assert ours.encode(text) == ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_equal_those_of_transformers(
    folder: Path, tmp_path: Path, template: str, add_generation_prompt: bool
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATES[template])
    ours, theirs = Tokenizer.from_folder(folder, chat_template=file), AutoTokenizer.from_pretrained(folder)
    keywords = {"chat_template": TEMPLATES[template], "add_generation_prompt": add_generation_prompt}
    for variables in ({}, {"enable_thinking": False}):
        text = theirs.apply_chat_template(list(MESSAGES), tokenize=False, **keywords, **variables)
        ids = theirs.apply_chat_template(list(MESSAGES), return_dict=False, **keywords, **variables)
        assert ours.render_chat(MESSAGES, add_generation_prompt, **variables) == text
        assert ours.apply_chat_template(MESSAGES, add_generation_prompt, **variables) == ids


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    """JSON may hold one, and so may what a policy samples."""
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path))
    assert tokenizer.encode("a\ud83db") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600"), "two halves are one"
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "\udc00"}])
    assert asked == tokenizer.apply_chat_template([{"role": "user", "content": "\ufffd"}])


def test_special_tokens_and_size(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path))
    assert tokenizer.eos_token_ids == (IM_END,)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode([BOS, VOCAB_SIZE + 7, IM_END]) == ""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (IM_END,)),
        ({"generation_config.json": {"eos_token_id": [7, IM_END]}}, (7, IM_END)),
        ({"config.json": {"eos_token_id": 9}}, (9, IM_END)),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": [8]}}, (8, IM_END)),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 9}}, (7, 9, IM_END)),
    ],
)
def test_any_end_token_of_the_folder_ends(tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]) -> None:
    make_tokenizer_files(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("{{ messages[0].content }}", "one"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages | length }}"}], "1"),
    ],
)
def test_template_inside_tokenizer_config(tmp_path: Path, settings: object, expected: str) -> None:
    make_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": settings}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template is not None
    assert tokenizer.render_chat([{"role": "user", "content": "one"}]) == expected


def test_its_own_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    make_tokenizer_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("mine")
    assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user", "content": "one"}]) == "mine"


BROKEN_FOLDERS = {
    "no_tokenizer": ("tokenizer.json", None, "has no tokenizer.json"),
    "not_json": ("tokenizer.json", "{", "tokenizer.json cannot be read"),
    "not_a_tokenizer": ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
    "bad_settings": ("tokenizer_config.json", "{,}", "tokenizer_config.json is not JSON"),
    "settings_not_a_table": ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object, not list"),
    "bad_template": ("chat_template.jinja", "{% for %}", "chat_template.jinja is not a template"),
    "of_another_model": (
        "config.json",
        '{"vocab_size": 50}',
        rf"ids up to {VOCAB_SIZE - 1} \(.*\), but vocab_size in config.json is 50; take the tokenizer that belongs to",
    ),
    "bad_eos": ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id holds '2'; it must be an integer"),
}


@pytest.mark.parametrize(("file", "content", "message"), BROKEN_FOLDERS.values(), ids=BROKEN_FOLDERS)
def test_broken_folder(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    make_tokenizer_files(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


REFUSED_CHATS = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
    "wrong_shape": ("{{ messages[0].content + 1 }}", "refuses the messages: TypeError"),
    "escapes_the_sandbox": ("{{ messages.__class__.__mro__ }}", "refuses the messages: SecurityError"),
    "changes_its_input": ("{{ messages.append(1) }}", "refuses the messages: SecurityError"),
}


@pytest.mark.parametrize(("template", "message"), REFUSED_CHATS.values(), ids=REFUSED_CHATS)
def test_refused_chat(tmp_path: Path, template: str, message: str) -> None:
    make_tokenizer_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])


def test_folder_without_template_says_so(tmp_path: Path) -> None:
    make_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match="has no chat template; add chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def templates(tool_use: str) -> list[dict[str, str]]:
    default = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    return [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"bos_token": "<|pad|>"}, {"special_tokens"}),
        ({"unk_token": "<|pad|>"}, set()),
        ({"split_special_tokens": True}, {"tokenizer"}),
        ({"chat_template": templates("other")}, {"chat_template"}),
    ],
    ids=["token that the template reads", "token that it does not read", "special tokens in texts", "tool use"],
)
def test_what_changes_ids_changes_a_fingerprint(tmp_path: Path, settings: dict[str, object], other: set[str]) -> None:
    make_tokenizer_files(tmp_path)
    found: list[dict[str, object]] = []
    for changed in ({}, settings):
        named = {"bos_token": "<|im_end|>", "unk_token": "<|im_end|>", "chat_template": templates("one")}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, **changed}))
        found.append(Tokenizer.from_folder(tmp_path).fingerprints())
    assert {name for name in found[0] if found[0][name] != found[1][name]} == other
