"""The command line from outside: what it prints, what it returns, what it does not import."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

import ductile
from ductile.cli import COMMANDS, TOOLS, main
from ductile.orchestrator.ending.progress import Checkpoints, Progress
from ductile.user_files import read_text
from tests.config.stories import MODEL, furnish
from tests.nightly import mostly_nightly

PYTHON = [sys.executable, "-m", "ductile"]


@pytest.fixture(autouse=True)
def _furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)


def ductile_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYTHON, *words], capture_output=True, text=True, timeout=120)


LIGHT = [
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in [*COMMANDS, *TOOLS]),
    ["status", "--run", "nowhere"],
    ["rl", "@", "good.toml", "--dry-run"],
    ["rl", "--no-such-key"],
]
SAY_WHAT_IS_IMPORTED = """
import contextlib, json, sys
from ductile.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        main(words)
    print(json.dumps([words, [name for name in json.loads(sys.argv[2]) if name in sys.modules]]), file=sys.stderr)
"""


def test_help_and_checks_need_no_torch() -> None:
    """Also without what else is slow to import and that they do not need. They follow each other in one process: it is
    the first of them that imports something which is told."""
    slow = json.dumps([*HEAVY, "numpy", "rich.console", "asyncio", "tokenizers"])
    command = [sys.executable, "-c", SAY_WHAT_IS_IMPORTED, json.dumps(LIGHT), slow]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    assert told == [[words, []] for words in LIGHT], done.stderr


def test_check_reads_what_the_config_names_without_torch() -> None:
    """It prepares the run as the run would: with the tokenizer and the task, and without a slot."""
    imported = imported_by("check", "rl", "@", "good.toml")
    assert "ductile.orchestrator.commands.compose" in imported
    assert imported & HEAVY == set()


HEAVY = frozenset({"torch", "transformers", "fastapi", "zmq", "reasoning_gym"})


def imported_by(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ductile", *words], capture_output=True, text=True, timeout=120
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in [*COMMANDS, *TOOLS, "check"])


def test_nothing_said_gets_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "ductile <command>" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ductile {ductile.__version__}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["orchestrate"]) == 2
    assert capsys.readouterr().err.startswith("ductile: there is no command orchestrate. Did you mean orchestrator?\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_config_starts_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--no-such-key", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ductile {name}: ")
    assert "--no-such-key (command line)\n    does not exist." in said
    assert "Traceback" not in said
    assert not Path("runs").exists()


def test_help_narrows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help", "trainer.optim"]) == 0
    said = capsys.readouterr().out
    assert "--trainer.optim.lr" in said
    assert "--trainer.model.seq-len" not in said


def test_help_of_a_part_leaves_out_what_is_not_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help", "ckpt"]) == 0
    said = capsys.readouterr().out
    assert "--ckpt.interval" in said
    assert "Not built yet" not in said
    assert "ductile rl --help-all ckpt shows them." in " ".join(said.split())
    for words in (["--help-all", "ckpt"], ["--help", "ckpt.weights-only"]):
        assert main(["rl", *words]) == 0
        assert "--ckpt.weights-only" in capsys.readouterr().out


def test_help_for_a_key_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help", "trainer.optin"]) == 0
    assert "no key with trainer.optin in its name. Did you mean trainer.optim" in capsys.readouterr().out


def test_help_into_a_closed_pipe() -> None:
    line = f"set -o pipefail; {' '.join(PYTHON)} rl --help | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [["plan", "runs/x"], ["simulate"], ["report", "runs/x"], ["replay", "runs/x"], ["check", "@", "good.toml"]],
)
def test_ctrl_c_in_a_tool_ends_it_in_a_word(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    # `compare` first: it keeps what it finds in `recording` when it is imported.
    monkeypatch.setattr("ductile.sim.compare.compare", interrupted)
    monkeypatch.setattr("ductile.sim.recording.read_recording", interrupted)
    monkeypatch.setattr("ductile.dashboard.run_report.read_run_report", interrupted)
    monkeypatch.setattr("ductile.sim.replay.replay_run", interrupted)
    monkeypatch.setattr("ductile.orchestrator.commands.rehearse.rehearse", interrupted)
    Path("runs/x").mkdir(parents=True)
    assert main(words) == 130
    assert capsys.readouterr().err.endswith("\nductile: Stopped.\n")


@pytest.mark.parametrize("where", ["ductile.sim.recording.read_recording", "ductile.sim.compare.compare"])
def test_a_pipe_that_nobody_reads_is_no_failure(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of `ductile plan runs/x | head -4`."""

    def closed(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(where, closed)
    monkeypatch.setattr("sys.stdout", (tmp_path / "out").open("w"))
    Path("runs/x").mkdir(parents=True)
    assert main(["simulate"] if "compare" in where else ["plan", "runs/x"]) == 141


def test_check_says_where_a_resume_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    for command, config in (("rl", "good.toml"), ("sft", "sft.toml")):
        flags = ["@", config, "--resume", "--output-dir", f"runs/{command}"]
        assert main(["check", command, *flags]) == 0
        assert f"resumes   nothing: runs/{command}/state has no checkpoint yet\n" in capsys.readouterr().out
        checkpoints = Checkpoints(Path(f"runs/{command}/state"))
        checkpoints.commit(checkpoints.begin(2), Progress(2))
        assert main(["check", command, *flags]) == 0
        out = capsys.readouterr().out
        assert f"resumes   runs/{command}/state/step_2\n" in out
        assert f"{' ' * 12}The checkpoint of step 2 is of an earlier version and does not say" in out


def test_check_reads_the_data_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("ductile.tasks.rows.read_text", lambda file: read.append(file) or read_text(file))
    assert main(["check", "sft", "@", "sft.toml", "--resume", "--output-dir", "runs/sft"]) == 0
    assert len(read) == 1


def test_a_dry_run_leaves_the_config_of_a_run_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/rl")
    run.mkdir(parents=True)
    (run / "config.toml").write_text("# Resolved by ductile.\nas it was run")
    (run / "metrics.jsonl").write_text("{}\n")
    for flag in ("--clean", "--resume"):
        assert main(["rl", "@", "good.toml", flag, "--dry-run"]) == 0
        assert "Resolved: runs/rl/config.dry_run.toml\n" in capsys.readouterr().out
        assert (run / "config.toml").read_text() == "# Resolved by ductile.\nas it was run"
        assert main(["check", "@", "runs/rl/config.dry_run.toml", "--clean"]) == 0


def test_check_says_what_clean_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "rl", "@", "good.toml", "--clean"]) == 0
    assert "output    runs/rl\n" in capsys.readouterr().out
    (tmp_path / "runs/rl/model").mkdir(parents=True)
    (tmp_path / "runs/rl/.lock").touch()
    assert main(["check", "rl", "@", "good.toml", "--clean"]) == 0
    out = capsys.readouterr().out
    assert "output    runs/rl, where it deletes the run that is there when its first step is done\n" in out


CHECKED = """\
ductile rl: the config is good.

  files     good.toml < run.toml
  model     model: qwen3, 2 layers of 32, 22.8 k parameters
  output    runs/rl
  steps     4
  task      addition of builtin, 10000 examples
  batch     128 rollouts: 16 prompts, 8 completions each; 2 optimizer steps
  ahead     generation is at most 1 version ahead; completions more than 8 versions old are thrown away and asked again
  lengths   prompt and completion at most 512 tokens, of which the completion 128; micro-batches of 512
  loss      default, adamw with lr 1e-06
  eval      before step 1 and at the end: 1 completion for each of 64 prompts, greedy, at most 128 tokens
            held out: the task's last 64 (orchestrator.eval.num_examples); 9936 examples to train on
  slots     4, as component_placement says
              0  train
              1  generate
              2  generate
              3  generate and score
  mesh      slot 0 has all of the state: 355.5 KiB
  memory    a slot takes about 2.8 MiB in the backward pass of the head
            activations 2.1 MiB, logits 256.0 KiB, optimizer 177.8 KiB, gradients 104.9 KiB, parameters 88.9 KiB
  derived   trainer.model.name = "model": from model.name (good.toml:3)
            inference.model.name = "model": from model.name (good.toml:3)
            trainer.max_steps = 4: from max_steps (good.toml:1)
            orchestrator.max_steps = 4: from max_steps (good.toml:1)
            trainer.model.seq_len = 512: from seq_len (command line)
            inference.model.max_model_len = 512: from seq_len (command line)
            inference.parallel.dp = 3: the generate slots, one copy on each
            deployment.num_infer_gpus = 3: as component_placement says

  The first example, as the model sees it:

    ?
"""


@pytest.mark.parametrize("words", [["check"], ["check", "rl"]])
def test_check_says_what_would_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(
        "[orchestrator]\nn_minibatches = 2\n[cluster.component_placement]\nactor = 0\nrollout = '1-3'\ninference = 3\n"
    )
    assert main([*words, "@", "good.toml", "@", "run.toml", "--seq-len", "512", "--cluster.device", "cpu"]) == 0
    assert capsys.readouterr().out == CHECKED


MESHES = {
    3: """
  mesh      dp_shard 3: 3 data-parallel ranks on 3 slots
              slot  dp_shard  layers                       of the state
                 0         0  0-1, embeddings, head  34.1 %   121.2 KiB
                 1         1  0-1, embeddings, head  34.1 %   121.2 KiB
                 2         2  0-1, embeddings, head  31.8 %   113.0 KiB
  why       dp_shard 3: what the other axes leave of 3 slots
""",
    32: """
  slots     32, as the deployment numbers say
              0-31  train
  mesh      dp_replicate 2 · dp_shard 16: 32 data-parallel ranks on 32 slots
              slot = 16 dp_replicate + dp_shard
              slots  layers                           of the state
              0-31   0-1, embeddings, head  6.25 %   22.2 KiB each
  why       dp_replicate 2: as model.dp_replicate says
            dp_shard 16: what the other axes leave of 32 slots
""",
}


@pytest.mark.parametrize("num_slots", MESHES)
def test_check_shows_where_the_trainer_s_state_lies_and_why(num_slots: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "trainer", "--model.name", "model", "--data.fake.batch-size", "32", "--max-steps", "3"]
    words += ["--deployment.num-gpus", str(num_slots), "--deployment.gpus-per-node", "32"]
    assert main([*words, "--model.dp-replicate", "2"] if num_slots == 32 else words) == 0
    assert MESHES[num_slots] in capsys.readouterr().out + "\n"


MESH_OF_EIGHT = """
  mesh      pp 2 · dp_shard 2 · tp 2: 2 data-parallel ranks on 8 slots
              slot  pp  dp_shard  tp  layers              of the state
                 0   0         0   0  0, embeddings  13.7 %   48.8 KiB
                 1   0         0   1  0, embeddings  13.7 %   48.8 KiB
                 2   0         1   0  0, embeddings  13.7 %   48.8 KiB
                 3   0         1   1  0, embeddings  13.7 %   48.8 KiB
                 4   1         0   0  1, head        13.8 %   49.0 KiB
                 5   1         0   1  1, head        13.8 %   49.0 KiB
                 6   1         1   0  1, head        13.8 %   49.0 KiB
                 7   1         1   1  1, head        13.8 %   49.0 KiB
  why       pp 2: as model.pp says
            tp 2: as model.tp says
            dp_shard 2: what the other axes leave of 8 slots
            stages: 1 and 1 layers, where the output embeddings count as 0.2 (1f1b)
  resizes   slots: 4 as pp 2 · tp 2; none on 1-3,5-7
"""
OF_EIGHT = ["check", "trainer", "--model.name", "model", "--data.fake.batch-size", "32", "--max-steps", "3"]
OF_EIGHT += ["--deployment.num-gpus", "8", "--model.pp", "2"]


def test_check_shows_a_mesh_of_every_kind_of_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OF_EIGHT, "--model.tp", "2"]) == 0
    said = capsys.readouterr()
    assert MESH_OF_EIGHT in said.out + "\n"
    assert "note: model.tp = 2 is more than the 1 key/value heads: 2 neighbours hold the same one\n" in said.err


def test_check_says_what_the_planner_has_chosen_and_what_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OF_EIGHT, "--data.fake.batch-size", "2", "--model.tp", "auto", "--model.cp", "2"]) == 0
    out = capsys.readouterr().out
    assert "  why       pp 2: as model.pp says\n            cp 2: as model.cp says\n            tp 2: auto: " in out
    assert "auto: with tp 1 stages are idle for 50% of the time, as a data-parallel rank has 1 micro-batch; m" in out
    assert "cp_style ring: auto: ring, as ulysses deals the 1 query heads of a slot of tp 2 out to" in out
    assert main([*OF_EIGHT, "--model.cp", "2"]) == 0
    assert "cp_style ulysses: auto: ulysses, as it leaves shared prompts shared\n" in capsys.readouterr().out
    assert main([*OF_EIGHT, "--resize.layouts", '["tp=2","cp=4,dp_shard=1","dp_replicate=3"]']) == 0
    said = capsys.readouterr()
    assert "  why       tp 2: resize.layouts has tp=2\n" in said.out
    assert (
        "resizes   slots: 2 as tp 2; 3 as dp_replicate 3; 4 as dp_shard 2 · tp 2; 6 as dp_shard 3 · tp 2; " in said.out
    )
    assert "note: model.pp = 2: not on 8 slots, for which resize.layouts has 'tp=2'\n" in said.err
    assert (
        "note: resize.layouts: 'cp=4,dp_shard=1' is never taken, as 'tp=2' before it fits as many slots\n" in said.err
    )


def test_check_names_what_has_no_effect_in_any_layout_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    flat = [*OF_EIGHT, "--model.pp", "1", "--model.pp-schedule", "zero_bubble", "--model.cp-style", "ring"]
    assert main([*flat, "--model.vpp", "2", "--resize.layouts", '["tp=2", "dp_replicate=2,tp=2"]']) == 0
    said = capsys.readouterr().err
    assert "note: model.pp_schedule = zero_bubble has no effect without model.pp above 1\n" in said
    assert "note: model.vpp = 2 has no effect without model.pp above 1\n" in said
    assert "note: model.cp_style = ring has no effect without model.cp above 1\n" in said
    assert (
        "note: resize.layouts: 'dp_replicate=2,tp=2' is never taken, as 'tp=2' before it fits as many slots\n" in said
    )
    assert main([*flat, "--resize.layouts", '["pp=2,dp_shard=1", "cp=2,pp=2"]']) == 0
    said = capsys.readouterr().err
    assert "no effect" not in said
    assert "never taken" not in said


def test_check_says_that_a_checkpoint_has_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free_bytes, says in ((2**40, False), (1000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free_bytes: SimpleNamespace(free=free))
        assert main(["check", "rl", "@", "good.toml"]) == 0
        said = capsys.readouterr().err
        assert ("a checkpoint takes about " in said) == says
        assert (", and 1.0 kB are free there. Make room, or give another --output-dir" in said) == says


def test_check_looks_at_memory_where_the_config_says_how_much_a_device_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Most of it is the activations of the model's two layers, which tp divides."""
    auto = [*OF_EIGHT, "--model.pp", "1", "--model.tp", "auto"]
    assert main(auto) == 0
    assert "nothing speaks against it; memory was not looked at, as how much a slot has is" in capsys.readouterr().out
    memory = ["--cluster.device", "cpu", "--cluster.device-memory-gib"]
    assert main([*auto, *memory, "0.01"]) == 0
    said = capsys.readouterr().out
    assert "tp 2: auto: with tp 1 a slot would need about 0.00947 GiB (activations 0.00836, logits 0.0009" in said
    assert ") and has 0.009 GiB\n" in said
    assert "none on 1,3,5,7\n" in said
    assert main([*OF_EIGHT, *memory, "0.003"]) == 0
    said = capsys.readouterr().err
    assert "note: model.tp = 1 is with pp 2 · dp_shard 4 probably too little memory: a slot would need about 0." in said
    assert ") and has 0.0027 GiB: model." in said
    assert "makes it 0.00" in said


def test_check_says_what_a_slot_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "@", "good.toml", "--cluster.device", "cpu", "--trainer.model.seq-len", "1000"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "memory    a slot takes about 5.0 MiB in the backward pass of the head\n" in said
    assert " activations 4.2 MiB, " in said
    assert main([*words, "--cluster.device-memory-gib", "1", "--trainer.model.optim-cpu-offload"]) == 0
    said = capsys.readouterr().out
    assert " of 921.6 MiB in the backward pass of the head; 177.8 KiB in host memory\n" in said


def test_check_refuses_what_has_no_room_in_any_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "@", "good.toml", "--cluster.device", "cpu", "--trainer.model.seq-len", "1000"]
    assert main([*words, "--cluster.device-memory-gib", "0.01"]) == 0
    capsys.readouterr()
    assert main([*words, "--cluster.device-memory-gib", "0.005"]) == 2
    said = capsys.readouterr().err
    assert "--cluster.device-memory-gib = 0.005" in said
    assert "is too little: in whichever layout of the one train slot, one needs at least 0.00" in said
    assert "activations 0.004" in said
    (key, value) = re.findall(r"and has 0.0045 GiB: trainer\.model\.(\S+) = (\S+) makes it", said)[0]
    named = [f"--trainer.model.{key.replace('_', '-')}", value.strip('"')]
    assert main([*words, "--cluster.device-memory-gib", "0.005", *named]) == 0, "what is advised is enough"


def test_check_notes_ranks_that_would_have_no_work(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "trainer", "--model.name", "model", "--data.fake", "--max-steps", "3"]
    assert main([*words, "--deployment.num-gpus", "3"]) == 0
    assert "note: dp_shard = 3 leaves 1 of 3 data-parallel ranks without work" in capsys.readouterr().err


THROUGH_GLOO = "a group that has both goes through gloo and the host's memory, as NCCL takes one rank a GPU"
THROUGH_NCCL = "no two train slots do at the start, so their collectives go through NCCL"


@pytest.mark.parametrize(
    ("device", "actor", "rollout", "said"),
    [
        ("auto", "1-3", "0", f"where there are GPUs, 2 slots share each; train slots 2 and 3 do: {THROUGH_GLOO}"),
        ("cuda", "1-3", "0", f"2 slots share each GPU; train slots 2 and 3 do: {THROUGH_GLOO}"),
        ("cuda", "0,2", "1,3", f"2 slots share each GPU; {THROUGH_NCCL}"),
        ("cuda", "1-2", "0,3", f"2 slots share each GPU; {THROUGH_NCCL}"),
        ("cuda", "1", "0", "2 slots share each GPU"),
    ],
)
def test_check_says_what_slots_that_share_a_gpu_do(
    device: str, actor: str, rollout: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(
        f"[cluster]\ndevice = '{device}'\nslots_per_device = 2\n"
        f"[cluster.component_placement]\nactor = '{actor}'\nrollout = '{rollout}'\n"
    )
    assert main(["check", "rl", "@", "good.toml", "@", "run.toml"]) == 0
    out = capsys.readouterr().out
    assert f"            {said}\n" in out
    assert "inference.gpu_memory_utilization = 0.45: 2 slots share each GPU (cluster.slots_per_device)\n" in out


def test_check_says_which_slots_hold_a_scorer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(
        "[cluster]\ndevice = 'cuda'\nslots_per_device = 2\n"
        "[cluster.component_placement]\nactor = 0\nrollout = 1\ninference = '2-5'\n"
    )
    words = ["check", "rl", "@", "good.toml", "@", "run.toml", "--scorer.tp", "2", "--trainer.loss.type", "grpo"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"            2 slots share each GPU; score slots 2 and 3 do: {THROUGH_GLOO}\n" in said.out
    assert "            2 scorers on 2 slots each\n" in said.out
    Path("run.toml").write_text("")
    assert main(words) == 0
    assert "note: scorer.tp = 2 has no effect here: no slot scores" in capsys.readouterr().err


def test_check_takes_a_bare_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.toml"]) == 0
    assert main(["check", "sft", "sft.toml"]) == 0
    assert "ductile sft: the config is good." in capsys.readouterr().out


@pytest.mark.parametrize("words", [["check"], ["check", "rl"], ["rl"]])
def test_a_config_of_another_command_is_recognised(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text('[data]\npath = "data.jsonl"\n[model]\nname = "model"\n[optim]\nlr = 1e-4\n')
    assert main([*words, "@", "mine.toml"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("a config of `ductile sft`. To check it: ductile check sft @ mine.toml\n")


def test_one_key_that_does_not_exist_is_no_other_command_s_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "@", "good.toml", "--data.path", "data.jsonl"]) == 2
    assert "looks like" not in capsys.readouterr().err


def test_the_example_of_a_task_of_one_s_own_is_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["check", "@", "examples/own_task/rl.toml", "--output-dir", "runs/none"]) == 0
    assert "examples/own_task/questions.jsonl, 32 examples" in capsys.readouterr().out


def test_the_example_for_one_gpu_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    (tmp_path / "qwen3.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '</think>' if not enable_thinking }}"
    )
    words = [
        "--model.chat-template",
        str(tmp_path / "qwen3.jinja"),
        "--model.name",
        "examples/quickstart/model",
        "--seq-len",
        "256",
        "--orchestrator.sampling.max-tokens",
        "64",
    ]
    assert main(["check", "@", "examples/one_gpu/rl.toml", *words, "--output-dir", "runs/none"]) == 0
    assert "0  train and generate" in capsys.readouterr().out


def test_files_that_are_not_there_are_no_other_command_s_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "@", "one.toml", "@", "two.toml"]) == 2
    assert "looks like" not in capsys.readouterr().err


def test_a_complaint_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    steering = "\N{RIGHT-TO-LEFT OVERRIDE}\x1b]0;owned\x07"
    Path("data.jsonl").write_text("{}\n")
    Path(steering).mkdir()
    Path(steering, "data.jsonl").write_text("{}\n")
    assert main(["check", "sft", "@", "sft.toml", "--data.path", f"{steering}/data.jsonl"]) == 2
    assert main(["check", "sft", "@", "sft.toml", "--data.path", f"{steering}/nothing.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "data.jsonl:1: has neither messages" in said
    assert not set(said) & set(steering) - set("]0;owned")


@pytest.mark.parametrize("num_rows", mostly_nightly([500, None], 500))
def test_the_example_of_sft_is_good(num_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many rows of its data; None: with all of them, which takes a while."""
    monkeypatch.chdir(Path(__file__).parents[1])
    with Path("examples/quickstart/sft.jsonl").open() as data:
        (tmp_path / "rows.jsonl").write_text("".join(islice(data, num_rows)))
    words = ["--data.path", str(tmp_path / "rows.jsonl"), "--output-dir", "runs/none"]
    assert main(["check", "sft", "@", "examples/sft/sft.toml", *words]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "",
            "before step 1 and at the end: 1 completion for each of 64 prompts, greedy, at most 128",
        ),
        (
            "--orchestrator.eval.interval 2 --orchestrator.eval.sampling.temperature 0.5",
            ", every 2 steps and at the end",
        ),
        (
            "--orchestrator.eval.samples-per-example 3 --orchestrator.eval.num-examples 9",
            "3 completions for each of 9 prompts",
        ),
        ("--no-orchestrator.eval.enabled", "none, and nothing is held out: orchestrator.eval.enabled is false"),
        ("--bench", "none, and nothing is held out: --bench"),
    ],
)
def test_check_tells_of_the_evaluation(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "@", "good.toml", *flags.split()]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  eval "))
    assert said in line


def test_check_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "trainer", "--model.name", "model", "--data.fake", "--max-steps", "3"]) == 0
    assert main(["check", "inference", "--model.name", "model", "--server.port", "0"]) == 0
    task = ["--task.type", "builtin", "--task.name", "addition"]
    url = "http://127.0.0.1:8000/v1"
    assert main(["check", "orchestrator", "--model.name", "model", *task, "--client.base-url", url]) == 0
    assert "http://127.0.0.1:<a free port>/v1" in capsys.readouterr().out


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


TASK = ["--task.type", "builtin", "--task.name", "addition", "--client.base-url", "http://127.0.0.1:9/v1"]
MINE = "--orchestrator.advantage.type custom --orchestrator.advantage.import-path"
# What a command would refuse at its start, once the config itself is good: how the folder is spoiled, words, sentence.
JSONL = '--orchestrator.task={{"type": "jsonl", "path": "data.jsonl", "reward": "{}"}}'
TASK_OF = """
class Mine:
    name = "mine"
    def messages(self, example): {}
    def __len__(self): return 100
    def reward(self, example, completion): return 1.0
"""
REFUSED_AT_THE_START: list[tuple[Callable[[], object], list[str], str]] = [
    (lambda: Path("model/tokenizer.json").write_text("{}"), ["rl", "@", "good.toml"], "tokenizer.json cannot be read"),
    (lambda: Path("model/tokenizer.json").write_text("{}"), ["sft", "@", "sft.toml"], "tokenizer.json cannot be read"),
    (
        lambda: Path("model/tokenizer.json").write_text("{}"),
        ["inference", "--model.name", "model"],
        "tokenizer.json cannot be read",
    ),
    (
        lambda: Path("model/tokenizer.json").write_text("{}"),
        ["orchestrator", "--model.name", "model", *TASK],
        "tokenizer.json cannot be read",
    ),
    (lambda: _truncate(Path("model/model.safetensors")), ["rl", "@", "good.toml"], "is not a whole safetensors file"),
    (
        lambda: _truncate(Path("model/model.safetensors")),
        ["rl", "@", "good.toml", "--trainer.model.debug.random-init"],  # the generators start from the folder's
        '--model.name = "model" (good.toml:3)\n    has weights that cannot be loaded: model/model.safetensors is not',
    ),
    (
        lambda: _truncate(Path("model/model.safetensors")),
        ["trainer", "--model.name", "model", "--data.fake", "--max-steps", "1"],
        "is not a whole safetensors file",
    ),
    (
        lambda: Path("model/config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 3})),
        ["inference", "--model.name", "model"],
        "does not have model.layers.2.input_layernorm.weight, which config.json calls for",
    ),
    (
        lambda: Path("model/config.json").write_text(json.dumps(MODEL | {"intermediate_size": 48})),
        ["sft", "@", "sft.toml"],
        "has shape [64, 32], but config.json calls for [48, 32]",
    ),
    (lambda: None, ["rl", "@", "good.toml", "--orchestrator.task.name", "additoin"], 'no built-in task "additoin"'),
    (lambda: None, ["rl", "@", "good.toml", "--ckpt.resume-step", "7"], "has no complete checkpoint of step 7"),
    (lambda: None, ["sft", "@", "sft.toml", "--ckpt.resume-step", "7"], "has no complete checkpoint of step 7"),
    (lambda: Path("data.jsonl").write_text("{}\n"), ["sft", "@", "sft.toml"], "data.jsonl:1: has neither messages"),
    (
        lambda: Path("mine.py").write_text(""),
        ["rl", "@", "good.toml", *MINE.split(), "mine.py:f"],
        "names 'f', which mine.py does not define",
    ),
    (
        lambda: Path("mine.py").write_text("def right(row, completion): ..."),
        ["rl", "@", "good.toml", JSONL.format("mine.py")],
        "names a file and nothing in it: write mine.py:name",
    ),
    (
        lambda: Path("mine.py").write_text("\nclass Right:\n    def __init__(self, row, completion): ..."),
        ["rl", "@", "good.toml", JSONL.format("mine.py:Right")],
        "mine.py:Right is a class; a reward is a function, called with (row, completion) (mine.py:2)",
    ),
    *(
        (
            lambda body=body: Path("raising.py").write_text(TASK_OF.format(body)),
            [*words, '{"type": "import", "import_path": "raising.py:Mine"}'],
            said,
        )
        for body, said in (
            ("raise KeyError('solution')", "Mine.messages(0) raised KeyError: 'solution' (raising.py:4)"),
            ("return 'What is 1 + 1?'", "Mine.messages(0) returned 'What is 1 + 1?'; it must return a list of"),
            ("return [{'role': 'user'}]", "Mine.messages(0): message 1 has no content"),
        )
        for words in (
            ["rl", "@", "good.toml", "--orchestrator.eval.enabled", "false", "--orchestrator.task"],
            ["orchestrator", "--model.name", "model", "--client.base-url", "http://127.0.0.1:1/v1", "--task"],
        )
    ),
]


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    REFUSED_AT_THE_START,
    ids=lambda value: "" if callable(value) else str(value)[-40:],  # a function's name has its address, new each time
)
def test_check_finds_what_the_start_would_refuse(
    spoil: Callable[[], object], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil()
    assert main(["check", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_looks_at_the_weights_before_it_starts_anything(capsys: pytest.CaptureFixture[str]) -> None:
    _truncate(Path("model/model.safetensors"))
    assert main(["rl", "@", "good.toml"]) == 2
    assert "model.safetensors is not a whole safetensors file" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_dry_run_writes_what_can_be_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--output-dir", "out", "--clean", "--seed", "5"]
    assert main(["rl", "@", "good.toml", *flags, "--dry-run"]) == 0
    assert capsys.readouterr().out == "The config is good. Resolved: out/config.toml\n"
    first = Path("out/config.toml").read_text()
    assert first.startswith("# Resolved by ductile. Run it again: ductile rl @ out/config.toml\n")
    assert main(["rl", "@", "out/config.toml", "--dry-run"]) == 0
    assert Path("out/config.toml").read_text() == first
    assert [path.name for path in Path("out").iterdir()] == ["config.toml"]


def test_dry_run_into_a_folder_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["rl", "@", "good.toml", "--output-dir", "file/run", "--dry-run"]) == 2
    assert "ductile rl: cannot write the resolved config: " in capsys.readouterr().err


def test_notices_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "@", "good.toml", "--orchestrator.group-size", "4"]) == 0
    said = capsys.readouterr().err
    assert said == "note: --orchestrator.group-size is read as --orchestrator.rollouts-per-example\n"


def test_installed_as_a_program() -> None:
    assert ductile_command("--version").stdout == f"ductile {ductile.__version__}\n"


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}],
    ids=["ascii", "C"],
)
def test_a_terminal_that_lacks_a_character_gets_its_escape(locale: dict[str, str]) -> None:
    """Also from the processes that a command starts."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | locale
    child = "import subprocess, sys; print(chr(246), flush=True)"
    child += "; subprocess.run([sys.executable, '-c', 'print(chr(8594))'])"
    script = f"from ductile import cli; cli._main = lambda words: exec({child!r}); cli.main()"
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=120)
    assert said.stderr == b""
    assert said.stdout.split() == [rb"\xf6", rb"\u2192"]
