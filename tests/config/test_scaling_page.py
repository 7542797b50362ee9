"""The scaling page of prime-rl is accepted as it stands, but for experts; what excludes each other is refused with the
reason. What its SLURM and deployment blocks do is in `tests/cluster/test_launch_page.py`.

`scaling_page.txt` has the page's command lines and TOML blocks under its headings, character by character.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ductile.cli import main
from ductile.config.reading.parse import parse
from ductile.config.schema.model import ActivationCheckpointing
from ductile.config.schema.run import RLConfig
from tests.config.stories import GOOD, furnish

PAGE = Path(__file__).with_name("scaling_page.txt").read_text()


@dataclass(frozen=True)
class Later:
    """A part of the page that is not built yet, and what is said of it until then."""

    key: str
    """Flag that is refused."""
    value: str
    says: str


LATER = (
    Later("--trainer.model.ep", "8", "Not built yet: expert parallelism."),
    Later("--trainer.model.ep-comm-backend", "deepep", "Not built yet: expert parallelism."),
    Later("--trainer.model.deepep-num-sms", "24", "Not built yet: expert parallelism."),
    Later("--trainer.model.deepep-token-chunk-size", "512", "Not built yet: expert parallelism."),
)
"""All of the page that is refused today. Who builds one takes its line out."""

RL = ["rl", "@", "rl.toml"]
BASES = {"rl": RL, "sft": ["sft", "@", "sft.toml"], "trainer": ["trainer", "@", "train.toml", "--data.fake"]}
MODEL, TASK = '[model]\nname = "model"\n', '[task]\ntype = "builtin"\nname = "addition"\n'
FILES = {
    "rl.toml": f"{GOOD}[deployment]\nnum_train_gpus = 4\n",
    "base_rl.toml": GOOD,
    "my_config.toml": GOOD,
    "train.toml": f"max_steps = 4\n{MODEL}",
    "infer.toml": MODEL,
    "orch.toml": f'{MODEL}[client]\nbase_url = "http://localhost:8000/v1"\n{TASK}',
}
"""Files that the page's command lines name and that it does not have."""


def sections() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each heading, with a language, and the blocks in that language below it."""
    for part in re.split(r"^#+ (?=.*\n\n```)", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, rest = part.partition("\n")
        blocks = re.findall(r"^```(\w+) theme=\{null\}\n(.*?)^```$", rest, flags=re.MULTILINE | re.DOTALL)
        for language in ("bash", "toml"):
            if found := [text for its_language, text in blocks if its_language == language]:
                yield heading, language, found


def command_lines() -> list[list[str]]:
    """Return the words of each line of the page's shell blocks."""
    blocks = [text for _, language, texts in sections() if language == "bash" for text in texts]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = {
    f"{heading} {number}": text
    for heading, language, texts in sections()
    if language == "toml"
    for number, text in enumerate(texts)
}
"""The page's TOML blocks, by heading and number there."""
OF_SFT = "`[deployment]` Block 1"
SLURM_OVERLAY = "Activation 0"
OURS = [words for words in command_lines() if words[0] != "bash"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    template = {"path/to/my_template.sbatch.j2": "#!/bin/bash\n"}
    for name, text in {**FILES, "my_slurm.toml": BLOCKS[SLURM_OVERLAY], **template}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what `ductile check` refuses of a command, by key; nothing where it accepts the command."""
    status = main(["check", *words])
    said = capsys.readouterr().err
    found = dict(re.findall(r"^(--[\w.-]+).*\n    (.*)$", said, flags=re.MULTILINE))
    assert status == (2 if found else 0), said
    return found


def assert_only_later(found: dict[str, str]) -> None:
    """Assert that nothing is refused but what a later issue builds, with the sentence that says so."""
    says = {later.key: later.says for later in LATER}
    assert {key: what for key, what in found.items() if not what.startswith(says.get(key, "never"))} == {}


def test_the_page_is_all_there() -> None:
    assert len(BLOCKS) == 10
    assert len(OURS) == 13
    assert [words[:2] for words in command_lines() if words[0] == "bash"] == [["bash", "scripts/tmux.sh"]] * 2


@pytest.mark.parametrize("line", OURS, ids=shlex.join)
def test_a_command_line_of_the_page(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = list(line)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words[:2] == ["uv", "run"], "which is `ductile` for us"
    if "..." in words:  # what the reader has
        at = words.index("...")
        words[at : at + 1] = ["@", "sft.toml"]
    words = words[2:]
    if words[0] == "torchrun":
        words = words_under_torchrun(words[1:])
    assert_only_later(refused(words, capsys))


def words_under_torchrun(words: list[str]) -> list[str]:
    """Return the words of the `ductile` command that a line of torchrun starts. Its own flags are torch's to read; the
    page's script is `-m ductile sft` for us."""
    asked = get_args_parser().parse_args(words)
    assert (asked.nproc_per_node, asked.local_ranks_filter) == ("8", "0")
    assert asked.training_script == "src/prime_rl/trainer/sft/train.py"
    return ["sft", *asked.training_script_args]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_page(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.toml").write_text(BLOCKS[block])
    base = BASES["sft"] if block == OF_SFT else RL
    assert_only_later(refused([*base, "@", "page.toml"], capsys))


@pytest.mark.parametrize(
    ("block", "flags"),
    [
        ("Expert Parallelism 0", "--trainer.model.ep-comm-backend deepep"),
        ("Context Parallelism 0", "--trainer.model.attn fa3"),
        ("Context Parallelism 0", "--trainer.model.attn fa4"),
        ("Context Parallelism 0", "--trainer.model.attn flash_attention_3"),
        ("Context Parallelism 0", "--trainer.model.attn flash_attention_4"),
        ("Context Parallelism 0", "--trainer.model.cp-style ring"),
        ("Optimizer Offloading 0", "--trainer.optim.type sgd"),
        ("Optimizer Offloading 0", "--trainer.optim.type muon"),
        ("LM Head Chunking 0", "--trainer.model.fused-lm-head-token-chunk-size 1024"),
        ("LM Head Chunking 0", "--trainer.model.fused-lm-head-token-chunk-size disabled"),
    ],
)
def test_what_a_block_names_instead(block: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.toml").write_text(BLOCKS[block])
    assert_only_later(refused([*RL, "@", "page.toml", *flags.split()], capsys))


@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.model.dp-replicate 2",
        "--trainer.model.reshard-after-forward false",
        "--trainer.model.reshard-after-forward true",
        "--trainer.model.fsdp-cpu-offload",
        "--trainer.model.optim-cpu-offload",
        "--trainer.model.ac",
        "--trainer.model.ac.mode selective",
        "--trainer.model.ac.mode selective --trainer.model.pp-schedule zero_bubble",
        "--trainer.model.compile",
        "--trainer.model.compile --trainer.model.ac --trainer.model.ac-offloading",
        "--trainer.model.compile --trainer.model.pp-schedule zero_bubble",
        "--trainer.model.attn flex",
        "--trainer.model.attn flex --trainer.model.compute-dtype float32",
        "--trainer.model.ac-offloading",
        "--trainer.model.ac-offloading.max-inflight-activations 5",
        "--trainer.model.impl auto",
        "--bench --bench.output-json figures.json",
    ],
)
def test_a_knob_of_the_page_s_tables(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused([*RL, *flags.split()], capsys) == {}


@pytest.mark.parametrize("later", LATER, ids=lambda later: later.key)
def test_what_is_not_built_yet_is_refused_until_then(later: Later, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused([*RL, later.key, later.value], capsys)
    assert list(found) == [later.key]
    assert found[later.key].startswith(later.says)


@pytest.mark.parametrize("on", ["--trainer.model.ac", "@ bare.toml", "@ bare.toml --trainer.model.ac.mode full"])
def test_a_bare_table_turns_checkpointing_on(on: str) -> None:
    Path("bare.toml").write_text("[trainer.model.ac]\n")
    assert parse(RLConfig, ["@", "rl.toml", *on.split()]).config.trainer.model.ac == ActivationCheckpointing()


@pytest.mark.parametrize("off", ["--trainer.model.ac None", "--no-trainer.model.ac", "@ none.toml"])
def test_none_turns_checkpointing_off(off: str) -> None:
    Path("bare.toml").write_text("[trainer.model.ac]\n")
    Path("none.toml").write_text('[trainer.model]\nac = "None"\n')
    assert parse(RLConfig, ["@", "rl.toml", "@", "bare.toml", *off.split()]).config.trainer.model.ac is None


EXCLUDED = (
    (
        "--trainer.model.fsdp-cpu-offload --trainer.model.optim-cpu-offload",
        "--trainer.model.optim-cpu-offload",
        "contradicts fsdp_cpu_offload, which keeps the optimizer's state in host memory already",
    ),
    (
        "--trainer.model.optim-cpu-offload --trainer.max-concurrent-runs 2",
        "--trainer.model.optim-cpu-offload",
        "cannot be with max_concurrent_runs = 2: it moves the moments of one optimizer, and each of several runs has",
    ),
    (
        "--trainer.max-concurrent-runs 2",
        "--trainer.max-concurrent-runs",
        "Not built yet: several adapters in one run.",
    ),
    (
        "--trainer.model.fsdp-cpu-offload --trainer.optim.type muon",
        "--trainer.model.fsdp-cpu-offload",
        'cannot be with optim.type = "muon": it orthogonalizes whole matrices on the device',
    ),
    (
        "--trainer.model.ac.mode selective --trainer.model.ac.targets []",
        "--trainer.model.ac.targets",
        'must be a list of one or more of "norm", "attn_proj", "mlp"',
    ),
    (
        "--trainer.model.ac.mode selective --trainer.model.ac.targets norm routed_experts",
        "--trainer.model.ac.targets.1",
        'does not fit: --{}model.ac.targets must be a list of one or more of "norm", "attn_proj", "mlp"',
    ),
    (
        "--trainer.model.ac.mode selective --trainer.model.pp-schedule zero_bubble --trainer.model.pp auto",
        "--trainer.model.ac.mode",
        'cannot be with pp_schedule = "zero_bubble", whose backward pass runs a layer twice',
    ),
    (
        "--trainer.model.ac.mode selective --trainer.model.pp-schedule zero_bubble --trainer.resize.layouts pp=2",
        "--trainer.model.ac.mode",
        'cannot be with pp_schedule = "zero_bubble", whose backward pass runs a layer twice',
    ),
    (
        "--trainer.model.compile --trainer.model.ac.mode selective",
        "--trainer.model.compile",
        'cannot be with ac.mode = "selective", which decides for each operator',
    ),
    (
        "--trainer.model.compile --trainer.model.pp-schedule zero_bubble --trainer.model.pp auto",
        "--trainer.model.compile",
        'cannot be with pp_schedule = "zero_bubble", which makes gradients of weights after',
    ),
    (
        "--trainer.model.attn flex --cluster.device cpu",
        "--trainer.model.attn",
        'is a kernel for GPUs, and cluster.device is "cpu"',
    ),
    (
        "--trainer.model.attn flex --trainer.model.cp-style ring",
        "--trainer.model.attn",
        'cannot be with cp_style = "ring", which puts attention together',
    ),
    (
        "--trainer.model.attn flex --trainer.model.ac.mode selective",
        "--trainer.model.attn",
        'cannot be with ac.mode = "selective", which knows attention by its operator',
    ),
    (
        "--trainer.model.attn fa3 --cluster.device cpu",
        "--trainer.model.attn",
        'is a kernel for GPUs, and cluster.device is "cpu"',
    ),
    (
        "--trainer.model.attn flash_attention_2 --trainer.model.compute-dtype float32",
        "--trainer.model.attn",
        'computes in numbers of 16 bits, and {}model.compute_dtype is "float32"',
    ),
)


@pytest.mark.parametrize(
    ("command", "flags", "key", "reason"),
    [
        pytest.param(command, *excluded, id=f"{command} {excluded[0]}")
        for command in BASES
        for excluded in EXCLUDED
        if command != "sft" or "max-concurrent-runs" not in excluded[0]  # which `ductile sft` does not have
    ],
)
def test_what_excludes_each_other_is_refused_with_the_reason(
    command: str, flags: str, key: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = "trainer." if command == "rl" else ""
    words = [*BASES[command], *flags.replace("--trainer.", f"--{root}").split()]
    assert refused(words, capsys)[key.replace("trainer.", root)].startswith(reason.format(root))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_moments_of_any_optimizer_may_lie_in_host_memory(optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused([*RL, "--trainer.model.optim-cpu-offload", "--trainer.optim.type", optimizer], capsys)
    assert "--trainer.model.optim-cpu-offload" not in found


@pytest.mark.parametrize(
    ("flags", "is_noted"),
    [
        ("--trainer.model.ac-offloading.pin-memory --cluster.device cpu", True),
        ("--trainer.model.ac-offloading.pin-memory false --cluster.device cpu", False),
        ("--trainer.model.ac-offloading.pin-memory --cluster.device cuda", False),
        ("--trainer.model.ac-offloading --cluster.device cpu", False),
    ],
)
def test_pinned_memory_on_a_cpu_is_noted(flags: str, is_noted: bool) -> None:
    notices = parse(RLConfig, ["@", "rl.toml", *flags.split()]).notices
    noted = [notice for notice in notices if "trainer.model.ac_offloading.pin_memory" in notice]
    assert len(noted) == is_noted
    assert all("has no effect on a CPU" in notice for notice in noted)
