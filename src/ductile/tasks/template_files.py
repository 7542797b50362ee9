"""Chat templates of a model folder, whichever of its files they are in, and as they are written when it is saved.

chat_template.jinja                 the template
additional_chat_templates/*.jinja   others by name, of which `tool_use` is taken where there are tools
tokenizer_config.json               chat_template: a text, or a list of names and templates; older than the files
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ductile.tasks.chat_template import ChatTemplate, ChatTemplateError
from ductile.tasks.special_tokens import CONFIG, TokenizerError
from ductile.user_files import NotText, read_text

DEFAULT, WITH_TOOLS = "default", "tool_use"
OF_PROCESSORS = "chat_template.json"


def read_template(folder: Path, settings: Mapping[str, Any], instead: str | Path | None) -> ChatTemplate | None:
    """Return the template of `instead`, a Jinja file, or the folder's own; None where there is none.

    settings: of tokenizer_config.json. Raises TokenizerError.
    """
    if instead is not None:
        texts = {DEFAULT: (str(instead), _read(Path(instead)))}
    else:
        texts = _in_files(folder) or _in_settings(folder, settings)
    if not texts:
        if (folder / OF_PROCESSORS).is_file():
            what = f"{folder} has a chat template in {OF_PROCESSORS} only, which is for processors of images"
            raise TokenizerError(f"{what}; write it into chat_template.jinja, or name a file with model.chat_template")
        return None
    if DEFAULT not in texts:
        known = ", ".join(sorted(texts))
        raise TokenizerError(f"{folder} has chat templates named {known}, and none of them is the {DEFAULT}")
    return _parsed(*texts[DEFAULT], _parsed(*texts[WITH_TOOLS]) if WITH_TOOLS in texts else None)


def with_defaults(template: ChatTemplate, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the template's texts by name, which take `variables` where a caller gives none."""
    known = {name: value for name, value in variables.items() if name.isidentifier()}
    # Jinja reads what Python writes: True, None, 'text', [1, 2], {'a': 1}.
    lines = [
        f"{{% if {name} is not defined or {name} is none %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in known.items()
    ]
    # The line's end belongs to its last tag, and the template still begins a line.
    beginning = "".join(lines) + "\n" if lines else ""
    texts = {DEFAULT: template.text} | ({WITH_TOOLS: template.with_tools.text} if template.with_tools else {})
    return {name: beginning + text for name, text in texts.items()}


Texts = dict[str, tuple[str, str]]
"""The place and the text of each template, by its name."""


def _in_files(folder: Path) -> Texts:
    found = {file.stem: (str(file), _read(file)) for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    file = folder / "chat_template.jinja"
    return found | ({DEFAULT: (str(file), _read(file))} if file.is_file() else {})


def _in_settings(folder: Path, settings: Mapping[str, Any]) -> Texts:
    where, given = f"chat_template in {folder / CONFIG}", settings.get("chat_template")
    if isinstance(given, str):
        return {DEFAULT: (where, given)}
    found: Texts = {}
    for entry in cast(list[Any], given) if isinstance(given, list) else []:
        name, text = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError(f"{where} has {entry!r:.80}, which is no template with a name")
        found[name] = where, text
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except NotText as error:
        raise TokenizerError(f"chat template {error}") from error
    except OSError as error:
        raise TokenizerError(f"chat template {path} cannot be read: {error}") from error


def _parsed(source: str, text: str, with_tools: ChatTemplate | None = None) -> ChatTemplate:
    try:
        return ChatTemplate(text, with_tools)
    except ChatTemplateError as error:
        raise TokenizerError(f"{source} is not a template: {error}") from error
