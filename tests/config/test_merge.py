"""How sources become one config: files, nested files, flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from ductile.config.reading.errors import ConfigError
from ductile.config.reading.flags import read
from ductile.config.reading.key_tree import value_at
from ductile.config.reading.parse import parse
from ductile.config.schema.run import OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.section import Section
from tests.config.stories import furnish


@pytest.fixture(autouse=True)
def _furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    Path("a.toml").write_text(
        "max_steps = 9\nseed = 1\n[orchestrator.sampling]\nstop = ['x', 'y']\ntemperature = 0.5\n"
    )
    Path("b.yaml").write_text("seed: 2\norchestrator:\n  sampling:\n    stop: [z]\n")
    Path("c.json").write_text(json.dumps({"seed": 3, "trainer": {"optim": {"lr": 1e-4, "max_norm": "None"}}}))
    Path("model.toml").write_text("seq_len = 4096\nreduce_dtype = 'bfloat16'\n")
    Path("place.yaml").write_text("actor: 0\nrollout: 1-2\n")


# flags after `@ good.toml`, key, value
RESOLVED: list[tuple[str, str, Any]] = [
    ("", "max_steps", 4),
    # files, left to right
    ("@ a.toml", "seed", 1),
    ("@ a.toml @ b.yaml", "seed", 2),
    ("@ b.yaml @ a.toml", "seed", 1),
    ("@a.toml @b.yaml @c.json", "seed", 3),
    ("@ a.toml @ b.yaml", "orchestrator.sampling.temperature", 0.5),
    ("@ a.toml @ b.yaml", "orchestrator.sampling.stop", ["z"]),
    ("@ c.json", "trainer.optim.max_norm", None),
    # flags
    ("@ a.toml --seed 7", "seed", 7),
    ("--seed 7 @ a.toml", "seed", 7),
    ("--seed 7 --seed 8", "seed", 8),
    ("--seed=7", "seed", 7),
    ("--seed -7", "seed", -7),
    ("--trainer.optim.max-norm None", "trainer.optim.max_norm", None),
    ("--trainer.optim.max_norm 0.5", "trainer.optim.max_norm", 0.5),
    ("--output-dir None", "output_dir", "None"),
    # nested files, over root files wherever they stand
    ("--trainer.model @ model.toml", "trainer.model.seq_len", 4096),
    ("--trainer.model @model.toml", "trainer.model.reduce_dtype", "bfloat16"),
    ("--trainer.model @ model.toml --trainer.model.seq-len 2048", "trainer.model.seq_len", 2048),
    ("--trainer.model.seq-len 8192 --trainer.model @ model.toml", "trainer.model.seq_len", 8192),
    ("--cluster.component-placement @ place.yaml", "cluster.component_placement", {"actor": 0, "rollout": "1-2"}),
    # booleans
    ("--no-orchestrator.shuffle", "orchestrator.shuffle", False),
    ("--orchestrator.no-shuffle", "orchestrator.shuffle", False),
    ("--orchestrator.shuffle", "orchestrator.shuffle", True),
    ("--orchestrator.shuffle false", "orchestrator.shuffle", False),
    ("--orchestrator.shuffle=no", "orchestrator.shuffle", False),
    ("--clean --seed 3", "clean", True),
    ("--clean @ a.toml", "seed", 1),
    ("--no-orchestrator.shuffle @ a.toml", "seed", 1),
    ("--no-wandb @a.toml", "seed", 1),
    # lists
    ("--orchestrator.sampling.stop a b", "orchestrator.sampling.stop", ["a", "b"]),
    ('--orchestrator.sampling.stop ["a","b"]', "orchestrator.sampling.stop", ["a", "b"]),
    ("--orchestrator.sampling.stop []", "orchestrator.sampling.stop", []),
    ("--orchestrator.sampling.stop a @ a.toml", "orchestrator.sampling.stop", ["a"]),
    ("@ a.toml --orchestrator.sampling.stop.1 b", "orchestrator.sampling.stop", ["x", "b"]),
    ("@ a.toml --orchestrator.sampling.stop.2 b", "orchestrator.sampling.stop", ["x", "y", "b"]),
    ("--orchestrator.sampling.stop.0 b", "orchestrator.sampling.stop", ["b"]),
    # tables
    ('--trainer.optim {"lr":2e-4,"eps":1e-9} --trainer.optim.lr 3e-4', "trainer.optim.lr", 3e-4),
    ('--trainer.optim {"lr":2e-4,"eps":1e-9} --trainer.optim.lr 3e-4', "trainer.optim.eps", 1e-9),
    ("--wandb", "wandb.project", None),
    ("--wandb.project p", "wandb.project", "p"),
    ("--wandb.project p --no-wandb", "wandb", None),
    ("--wandb.project p --wandb None", "wandb", None),
    ("--bench", "bench.output_json", None),
    ("--bench.output-json f.json", "bench.output_json", "f.json"),
    ("--trace", "trace.steps", [2, 3]),
    ("--trace.steps 4 5 --trace.slots 1", "trace.steps", [4, 5]),
    # tables of free names
    ('--orchestrator.task.config {"a":1} --orchestrator.task.config.b 2', "orchestrator.task.config", {"a": 1, "b": 2}),
    ("--orchestrator.task.config.b [1,2]", "orchestrator.task.config", {"b": [1, 2]}),
    ("--orchestrator.task.config.b text", "orchestrator.task.config", {"b": "text"}),
    ("--orchestrator.task.config.b", "orchestrator.task.config", {"b": True}),
    # unions
    ("--trainer.optim.type sgd --trainer.optim.momentum 0.5", "trainer.optim.momentum", 0.5),
    ("--trainer.optim.momentum 0.5 --trainer.optim.type sgd", "trainer.optim.momentum", 0.5),
    ("--trainer.optim.lr 1", "trainer.optim.type", "adamw"),
    # other spellings
    ("--orchestrator.group-size 4", "orchestrator.rollouts_per_example", 4),
    ("--orchestrator.group_size 4", "orchestrator.rollouts_per_example", 4),
    ("--clean-output-dir", "clean", True),
    ("--no-clean-output-dir", "clean", False),
    ("--inference.vllm.data-parallel-size 1", "inference.parallel.dp", 1),
    ("--trainer.ckpt.interval 3", "ckpt.interval", 3),
    ("--trainer.trace-path traces", "trace.dir", "traces"),
    ("--inference.server.port 8001 --orchestrator.client.base-url http://h:8001/v1", "inference.server.port", 8001),
    ("--orchestrator.student.client.timeout-s 5", "orchestrator.client.timeout_s", 5.0),
    ("--orchestrator.reward-timeout-s 5", "orchestrator.graders.timeout_s", 5.0),
    ("--orchestrator.num-reward-workers 3", "orchestrator.graders.num_workers", 3),
    ("--orchestrator.max-reward-error-share 1", "orchestrator.graders.max_error_share", 1.0),
    # shared keys
    ("--max-steps 7", "trainer.max_steps", 7),
    ("--seq-len 512", "inference.model.max_model_len", 512),
    ("--seq-len 512 --trainer.model.seq-len 1024", "trainer.model.seq_len", 1024),
    ("--seed 3 --inference.seed 4", "inference.seed", 4),
    ("--seed 3 --inference.seed 4", "trainer.seed", 3),
    ("--resume", "ckpt.resume_step", -1),
    ("--resume --ckpt.resume-step 5", "ckpt.resume_step", 5),
    # derived
    ('--cluster.component-placement {"actor":0,"rollout":"1-3"}', "deployment.num_infer_gpus", 3),
    ("--deployment.num-infer-gpus 2", "inference.parallel.dp", 2),
]


@pytest.mark.parametrize(("flags", "key", "value"), RESOLVED)
def test_resolves(flags: str, key: str, value: Any) -> None:
    config = parse(RLConfig, ["@", "good.toml", *flags.split()]).config
    assert value_at(config, tuple(key.split("."))) == value


def test_resume_goes_on_where_a_file_cleans() -> None:
    Path("clean.toml").write_text("clean = true\n")
    config = parse(RLConfig, ["@", "good.toml", "@", "clean.toml", "--resume"]).config
    assert (config.clean, config.resume, config.ckpt.resume_step) == (False, True, -1)


def test_sft_packs_to_the_data_s_length() -> None:
    assert parse(SFTConfig, ["@", "sft.toml", "--data.seq-len", "512"]).config.model.seq_len == 512


def test_yaml_reads_numbers_as_people_write_them() -> None:
    Path("n.yaml").write_text("trainer: {optim: {lr: 1e-5}}\norchestrator: {task: {config: {x: 3e4}}}\nslurm:\n")
    config = parse(RLConfig, ["@", "good.toml", "@", "n.yaml"]).config
    assert config.trainer.optim.lr == 1e-5
    assert value_at(config, ("orchestrator", "task", "config")) == {"x": 3e4}
    assert config.slurm is None


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--orchestrator.group-size 4", "--orchestrator.group-size is read as --orchestrator.rollouts-per-example"),
        ("@ old.toml", "orchestrator.group_size (old.toml:2) is read as orchestrator.rollouts_per_example"),
    ],
)
def test_another_spelling_gives_a_notice(flags: str, notice: str) -> None:
    Path("old.toml").write_text("[orchestrator]\ngroup_size = 4\n")
    assert parse(RLConfig, ["@", "good.toml", *flags.split()]).notices == (notice,)


def test_the_orchestrator_alone_asks_nothing_of_what_only_training_needs() -> None:
    alone = "--model.name model --client.base-url http://127.0.0.1:8000/v1 --task.type builtin --task.name addition"
    greedy = "--rollouts-per-example 1 --sampling.temperature 0 --task.size 20 --n-minibatches 2"
    why = "has no effect here: `ductile orchestrator` scores completions, and trains nothing"
    assert parse(OrchestratorRunConfig, [*alone.split(), *greedy.split()]).notices == (f"n_minibatches {why}",)


def test_every_value_knows_where_it_came_from() -> None:
    draft = read(RLConfig, ["@", "a.toml", "@", "b.yaml", "--trainer.model", "@", "model.toml", "--seed", "7"]).draft
    where = {
        ("max_steps",): "a.toml:1",
        ("orchestrator", "sampling", "temperature"): "a.toml:5",
        ("orchestrator", "sampling", "stop"): "b.yaml:4",
        ("orchestrator", "sampling", "stop", 0): "b.yaml:4",
        ("trainer", "model", "reduce_dtype"): "model.toml:2",
        ("seed",): "command line",
    }
    assert {path: str(draft.origin(path)) for path in where} == where


def test_a_flag_switches_a_union_over_a_file_with_the_other_variant_s_keys() -> None:
    parsed = parse(SFTConfig, ["@", "sft.toml", *["--data.type", "fake", "--data.length", "variable", "--bench"]])
    assert parsed.config.data.model_dump(include={"type", "length"}) == {"type": "fake", "length": "variable"}
    assert 'data.path is left out: data.type = "fake" (command line) has no such key' in parsed.notices


def test_a_later_file_switches_a_union_and_what_both_variants_have_stays() -> None:
    Path("adamw.toml").write_text("[trainer.optim]\nlr = 0.5\nbetas1 = 0.8\neps = 1e-6\n")
    Path("sgd.toml").write_text('[trainer.optim]\ntype = "sgd"\nmomentum = 0.5\n')
    parsed = parse(RLConfig, ["@", "good.toml", "@", "adamw.toml", "@", "sgd.toml"])
    optim = parsed.config.trainer.optim.model_dump(include={"type", "lr", "momentum"})
    assert optim == {"type": "sgd", "lr": 0.5, "momentum": 0.5}
    said = 'trainer.optim.betas1 and trainer.optim.eps are left out: trainer.optim.type = "sgd" (sgd.toml:2)'
    assert parsed.notices == (f"{said} has no such key",)


def test_keys_of_another_variant_from_the_same_source_as_the_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'belongs to --data.type = "sft", not to "fake"'):
        parse(SFTConfig, ["@", "sft.toml", "--data.type", "fake", "--data.shuffle"])


def test_a_bench_of_sft_needs_no_data() -> None:
    assert parse(SFTConfig, ["--model.name", "model", "--bench"]).config.bench is not None
    with pytest.raises(ConfigError, match=r"data\.path"):
        parse(SFTConfig, ["--model.name", "model"])


BENCHES: list[tuple[type[Section], str]] = [
    (RLConfig, "@ good.toml"),
    (SFTConfig, "@ sft.toml"),
    (TrainerRunConfig, "--model.name model --data.fake --max-steps 10"),
]


@pytest.mark.parametrize(("root", "flags"), BENCHES)
def test_a_bench_takes_its_own_number_of_steps_and_says_so(root: type[Section], flags: str) -> None:
    said = "max_steps has no effect here: --bench takes bench.steps = 3"
    assert said in parse(root, [*flags.split(), "--bench.steps", "3"]).notices
