"""Stories of wrong input: what stood in which file, what was typed, and all that ductile says.

    # A learning rate below zero
    --- run.toml
    [trainer.optim]
    lr = -1
    $ ductile rl @ good.toml @ run.toml
    --trainer.optim.lr = -1 (run.toml:2)
        must be a number of more than 0

`python -m tests.config.stories` writes what ductile says now into the file, for a person to read in the diff.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.cli import main
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import spec_from_hf

FILE = Path(__file__).with_name("wrong_configs.txt")

GOOD = """\
max_steps = 4
[model]
name = "model"
[orchestrator.task]
type = "builtin"
name = "addition"
"""
"""A config with nothing wrong in it, for stories to lay something over."""

GOOD_SFT = """\
max_steps = 4
[model]
name = "model"
[data]
path = "data.jsonl"
"""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": {"<end>": 0, "?": 1}, "unk_token": "?"},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def weights(config: dict[str, Any]) -> bytes:
    """A whole safetensors file of the model, all zeros."""
    header: dict[str, Any] = {}
    end = 0
    for part in (part for parameter in parameters(spec_from_hf(config)) for part in parameter.parts):
        start, end = end, end + 2 * math.prod(part.shape)
        header[part.name] = {"dtype": "BF16", "shape": part.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@dataclass(frozen=True)
class Story:
    title: str
    files: dict[str, str]
    command: str
    said: str


def read_stories() -> list[Story]:
    return [_story(text) for text in re.split(r"^# ", FILE.read_text(), flags=re.MULTILINE)[1:]]


def _story(text: str) -> Story:
    title, _, rest = text.partition("\n")
    files: dict[str, str] = {}
    before, _, after = ("\n" + rest).partition("\n$ ")
    for part in before.split("\n--- ")[1:]:
        name, _, content = part.partition("\n")
        files[name] = content + "\n" if content else ""
    command, _, said = after.partition("\n")
    return Story(title, files, command, said.strip("\n"))


def furnish(folder: Path) -> None:
    """What every story finds: a good model, good data, good configs."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    (folder / "model/tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    (folder / "model/model.safetensors").write_bytes(weights(MODEL))
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    (folder / "good.toml").write_text(GOOD)
    (folder / "sft.toml").write_text(GOOD_SFT)


def tell(story: Story, folder: Path) -> tuple[int, str]:
    """Play the story in `folder`, the current directory: the exit status, and what ductile said on stderr."""
    furnish(folder)
    for name, content in story.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(["check", *shlex.split(story.command)[1:]])  # so that nothing starts, whatever is found
    return status, errors.getvalue().strip("\n").replace(str(folder), "<here>")


def rewrite() -> None:
    out: list[str] = []
    for story in read_stories():
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            try:
                _, said = tell(story, Path(folder))
            finally:
                os.chdir(before)
        files = "".join(f"--- {name}\n{content}" for name, content in story.files.items())
        out.append(f"# {story.title}\n{files}$ {story.command}\n{said}\n")
    FILE.write_text("\n".join(out))


if __name__ == "__main__":
    rewrite()
