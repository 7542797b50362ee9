import json

import pytest

from ductile.tasks.conversation import first_turn, next_turn
from ductile.tasks.left_out import LeftOut
from ductile.tasks.tokenizer import Tokenizer
from tests.tiny import IM_END, PAD, make_tokenizer_files

USER = {"role": "user", "content": "hi"}
REPLY = [{"role": "user", "content": "more"}]


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(make_tokenizer_files(tmp_path))


def base_model(folder):
    make_tokenizer_files(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|pad|>"}))
    return Tokenizer.from_folder(folder)


def show(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_first_turn_is_the_template(tokenizer):
    assert show(tokenizer, first_turn(tokenizer, [USER])) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_next_turn_continues_what_was_sampled(tokenizer):
    completion = [*tokenizer.encode("yo"), IM_END]
    between = next_turn(tokenizer, [USER], completion, REPLY)
    assert show(tokenizer, between) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    together = first_turn(tokenizer, [USER]) + completion + between
    conversation = [USER, {"role": "assistant", "content": "yo"}, *REPLY]
    assert together == tokenizer.apply_chat_template(conversation)


def test_next_turn_ends_a_completion_that_did_not_end_itself(tokenizer):
    between = next_turn(tokenizer, [USER], tokenizer.encode("yo"), REPLY)
    assert show(tokenizer, between).startswith("<|im_end|>\n<|im_start|>user\nmore")


def test_a_template_that_rewrites_earlier_completions_does_not_disturb(tokenizer, tmp_path):
    """Qwen3's: a completion loses its thoughts as soon as somebody else speaks."""
    (tmp_path / "think.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = make_tokenizer_files(tmp_path / "m")
    thinker = Tokenizer.from_folder(folder, chat_template=tmp_path / "think.jinja")
    completion = [*thinker.encode("<think>hm</think>yo"), IM_END]
    assert show(thinker, next_turn(thinker, [USER], completion, REPLY)) == (
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_environment_that_repeats_the_placeholders_does_not_disturb(tokenizer):
    reply = [{"role": "user", "content": "0"}, {"role": "tool", "content": "1"}]
    between = next_turn(tokenizer, [USER], [IM_END], reply)
    assert show(tokenizer, between) == (
        "\n<|im_start|>user\n0<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_base_model_s_turn_ends_as_its_template_ends_it(tmp_path):
    """Qwen2.5's base models: a ChatML template, and the end of a text as the only eos."""
    base = base_model(tmp_path)
    assert base.eos_token_ids == (PAD, IM_END)
    completion = [*base.encode("yo"), IM_END]
    together = first_turn(base, [USER]) + completion + next_turn(base, [USER], completion, REPLY)
    assert together == base.apply_chat_template([USER, {"role": "assistant", "content": "yo"}, *REPLY])


def test_what_stands_before_the_last_token_of_a_turn_belongs_to_its_end(tmp_path):
    """Llama 2's template: a space, then the token."""
    template = tmp_path / "llama.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% else %} {{ m['content'] }} "
        "<|im_end|>{% endif %}{% endfor %}"
    )
    llama = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"), chat_template=template)
    assert show(llama, next_turn(llama, [USER], llama.encode("yo <|im_end|>"), REPLY)) == "[more]"


def test_an_eos_in_the_environment_s_words_does_not_disturb(tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}<|im_end|>{% endif %}\n{% endfor %}"
    )
    plain = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"), chat_template=template)
    between = next_turn(plain, [USER], [*plain.encode("yo"), IM_END], REPLY)
    assert show(plain, between) == "more<|im_end|>"


def test_without_a_chat_template_texts_are_lines(tmp_path):
    folder = make_tokenizer_files(tmp_path)
    settings = (folder / "tokenizer_config.json").read_text()
    values = json.loads(settings)
    del values["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    base = Tokenizer.from_folder(folder)
    assert base.chat_template is None
    assert show(base, first_turn(base, [{"role": "system", "content": "Add."}, USER])) == "Add.\nhi"
    assert show(base, next_turn(base, [USER], base.encode("yo"), REPLY)) == "\nmore"
    with pytest.raises(LeftOut, match="need a chat template"):
        first_turn(base, [USER], tools=[{"name": "add"}])


NO_TOOLS = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_words_that_the_template_drops_are_refused(tmp_path):
    """A template that knows no tools renders neither their list nor what they answer."""
    (tmp_path / "no_tools.jinja").write_text(NO_TOOLS)
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path / "m"), chat_template=tmp_path / "no_tools.jinja")
    with pytest.raises(LeftOut, match="leaves out the tool add"):
        first_turn(tokenizer, [USER], tools=[{"type": "function", "function": {"name": "add"}}])
    with pytest.raises(LeftOut, match="leaves out the content of message 3, whose role is tool"):
        next_turn(tokenizer, [USER], [IM_END], [{"role": "tool", "content": "a"}])  # "a" is in "assistant", too


def test_names_that_tell_speakers_apart_are_words(tokenizer):
    users = [{"role": "user", "name": name, "content": "I."} for name in ("Ada", "Bob")]
    with pytest.raises(LeftOut, match="leaves out the name of message 1, whose role is user"):
        first_turn(tokenizer, users)
    assert first_turn(tokenizer, users[:1]) == first_turn(tokenizer, [{"role": "user", "content": "I."}])


def test_a_developer_is_a_system_to_a_template_that_names_none(tokenizer):
    developer, system = ([{"role": role, "content": "Short."}, USER] for role in ("developer", "system"))
    assert first_turn(tokenizer, developer) == first_turn(tokenizer, system)
