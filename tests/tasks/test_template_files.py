"""Chat templates in the files of a folder: which is taken, and what the folder of a trained model says."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ductile.config.schema.model import ChatModelConfig
from ductile.model.checkpoint import load_model, save_model
from ductile.tasks.tokenizer import Tokenizer, TokenizerError
from tests.tiny import IM_END, PAD, make_model_folder, make_tokenizer_files

CHAT = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    make_tokenizer_files(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | files.pop("settings", {})))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"settings": {"chat_template": "plain"}},
        {"settings": {"chat_template": NAMED}},
        {"settings": {"chat_template": NAMED}, "chat_template.jinja": "file"},
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
        {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "others"},
        {"chat_template.jinja": "file", "chat_template.json": '{"chat_template": "a processor\'s"}'},
    ],
)
def test_the_template_is_the_one_that_transformers_take(files: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, dict(files))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        assert ours.render_chat(CHAT, tools=tools) == theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"settings": {"chat_template": NAMED[1:]}}, "chat templates named tool_use, and none of them is the default"),
        ({"settings": {"chat_template": ["x"]}}, "tokenizer_config.json has 'x', which is no template with a name"),
        ({"additional_chat_templates/rag.jinja": "x"}, "named rag, and none of them is the default"),
        ({"chat_template.json": "{}"}, "in chat_template.json only"),
        ({"additional_chat_templates/a.jinja": "{%", "chat_template.jinja": "{% x %}"}, "jinja is not a template"),
    ],
)
def test_templates_of_which_none_can_be_taken_are_refused(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=told):
        Tokenizer.from_folder(folder_with(tmp_path, dict(files)))


OTHER = (
    "\n  {% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|pad|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{{ think }}{{ (style or 0) | tojson }}{% endif %}"
)
VARIABLES = {"think": False, "style": {"a": [1, None, 'é"\n\U0001f642%}'], "b": -1e-5}}


@pytest.mark.parametrize("source", [{}, {"settings": {"chat_template": NAMED}}, {"chat_template.jinja": OTHER}])
@pytest.mark.parametrize("variables", [{}, VARIABLES])
@pytest.mark.parametrize("template", [None, OTHER])
def test_a_saved_folder_renders_and_ends_as_the_policy_was_trained(
    source: dict[str, Any], variables: dict[str, Any], template: str | None, tmp_path: Path
) -> None:
    folder = folder_with(make_model_folder(tmp_path / "source"), dict(source))
    file = None if template is None else tmp_path / "other.jinja"
    if file is not None and template is not None:
        file.write_text(template)
    config = ChatModelConfig(name=str(folder), chat_template=file and str(file), chat_template_kwargs=variables)
    if variables and OTHER not in (template, source.get("chat_template.jinja")):
        with pytest.raises(TokenizerError, match="does not read think; leave it out of chat_template_kwargs"):
            Tokenizer.of(config)
        return
    trained = Tokenizer.of(config)
    model = load_model(folder)
    saved = tmp_path / "saved"
    save_model(saved, model.spec, dict(model.named_parameters()), folder, chat_format=trained.chat_format)
    ours, theirs = Tokenizer.from_folder(saved), AutoTokenizer.from_pretrained(saved)
    ends = GenerationConfig.from_pretrained(saved).eos_token_id
    assert set(ours.eos_token_ids) == set(trained.eos_token_ids) == set(ends if isinstance(ends, list) else [ends])
    assert ({IM_END, PAD} if template or source.get("chat_template.jinja") else {IM_END}) == set(ours.eos_token_ids)
    if trained.chat_template is None:
        assert ours.chat_template is None
        assert theirs.chat_template is None
        return
    for tools in (None, TOOLS):
        for given in ({}, {"think": "hard"}):
            for prompt in (True, False):
                whole = trained.render_chat(CHAT, prompt, tools=tools, **given)
                assert ours.render_chat(CHAT, prompt, tools=tools, **given) == whole
                assert whole == theirs.apply_chat_template(
                    CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt, **given
                )
