"""Do the generator and the trainer's forward pass say the same? For `ductile compare`.

Both are loaded from the model folder into a process of their own (`ductile.generator.compare`), so that this one needs
no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ductile.config.reading.command_line import print_error, require_folder
from ductile.config.reading.errors import ConfigError
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.core.rollouts.provenance import LIMITS
from ductile.dashboard.printable import printable
from ductile.deaths import ending
from ductile.disk import write_whole
from ductile.messages.comparison import Compare, ComparedToken, Comparison, NotCompared
from ductile.roles import Failure, Late, Refused, SlotLost
from ductile.tasks.conversation import first_turn
from ductile.tasks.left_out import LeftOut
from ductile.tasks.rows import prompt_of, read_rows, text_of
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import Tokenizer, TokenizerError

AGREE, DISAGREE, NOT_COMPARED = 0, 1, 2
COMPARE_S = 1800.0
"""Seconds that loading both models and comparing them may take."""


def compare(words: Sequence[str], prompts_file: Path, decode: int, worst: int, json_file: Path | None) -> int:
    """Compare, print what was found, and return the exit status.

    words: the config's, as `parse` takes them. decode: tokens to generate after each prompt. worst: tokens to show.
    json_file: where what was found is written, too."""
    try:
        if json_file is not None:
            require_folder("--json", json_file)
        config = parse(RLConfig, words, writes=False).config
        tokenizer = Tokenizer.of(config.inference.model)
        prompts = read_prompts(prompts_file, tokenizer, config.inference.model.max_model_len - decode)
        found = _found(Compare(config.model_dump(mode="json"), prompts, decode, worst))
    except (ConfigError, TaskError, TokenizerError, OSError, Failure) as error:
        print_error("compare", error)
        return NOT_COMPARED
    limit = LIMITS[found.dtype].largest
    for line in report(found, tokenizer, limit):
        print(printable(line))
    if json_file is not None:
        rows = [{**msgspec.structs.asdict(each), "text": _text(tokenizer, each)} for each in found.worst]
        content = msgspec.structs.asdict(found) | {"worst": rows, "limit": limit, "agree": found.largest <= limit}
        write_whole(json_file, json.dumps(content, indent=2) + "\n")
    return AGREE if found.largest <= limit else DISAGREE


def read_prompts(file: Path, tokenizer: Tokenizer, most: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of each row, as a run would ask it. Raises TaskError for a row that is none, or has more than `most`
    tokens."""
    prompts: list[tuple[int, ...]] = []
    for where, row in read_rows(file):
        if (text := text_of(where, row)) is not None:
            tokens = tokenizer.encode(text)
        else:
            chat = prompt_of(where, row)
            try:
                tokens = first_turn(tokenizer, chat.messages, **chat.variables)
            except (LeftOut, TokenizerError) as error:
                raise TaskError(f"{where}: {error}") from None
        if not 0 < len(tokens) <= most:
            raise TaskError(
                f"{where}: has {len(tokens)} tokens; it must have 1 to {most} (inference.model.max_model_len)"
            )
        prompts.append(tuple(tokens))
    if not prompts:
        raise TaskError(f"{file}: has no prompts")
    return tuple(prompts)


def report(found: Comparison, tokenizer: Tokenizer, limit: float) -> list[str]:
    """The lines that are printed."""
    lines = [f"{'prompt':>6}{'position':>10}{'generator':>12}{'scorer':>12}{'difference':>12}  token"]
    for each in found.worst:
        how = "  (decoded)" if each.is_decoded else ""
        lines.append(
            f"{each.prompt:>6}{each.position:>10}{each.generator:>12.5f}{each.scorer:>12.5f}"
            f"{each.difference:>12.2e}  {json.dumps(_text(tokenizer, each), ensure_ascii=False)}{how}"
        )
    agree = "They agree" if found.largest <= limit else "They do not agree"
    return [
        *lines,
        f"{found.num_positions} places x {found.vocab_size} tokens, and {found.num_decoded} decoded: differences are "
        f"{found.largest:.2e} at most, {found.mean:.2e} on average, {found.share_over:.3%} of them over 1e-3.",
        f"{agree}: {found.dtype} explains {limit:g}.",
    ]


def _text(tokenizer: Tokenizer, token: ComparedToken) -> str:
    return tokenizer.decode([token.token], skip_special_tokens=False)


def _found(asked: Compare) -> Comparison:
    """Return what the process finds. Raises Refused, SlotLost or Late."""
    fd = os.memfd_create("ductile-compare", 0)
    try:
        os.write(fd, msgspec.json.encode(asked))
        command = [sys.executable, "-P", "-m", "ductile.generator.compare", f"/proc/self/fd/{fd}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, pass_fds=(fd,), timeout=COMPARE_S, check=False)
    except subprocess.TimeoutExpired:
        raise Late(f"the models were not loaded and compared within {COMPARE_S:g} s") from None
    finally:
        os.close(fd)
    if done.returncode:
        raise SlotLost(f"the process that compares {ending(done.returncode)}")
    result = msgspec.json.decode(done.stdout, type=Comparison | NotCompared)
    if isinstance(result, NotCompared):
        raise Refused(result.why)
    return result
