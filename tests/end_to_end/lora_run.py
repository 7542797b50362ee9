"""Adapters learn what full training learns: `make lora`, under ten minutes on two cores.

GRPO of the quickstart, and fine-tuning of its model on worked examples, three seeds each way: the held-out reward rises
as much with adapters as without, within the spread of the seeds. One of the runs is resized while it trains.
"""

import json
from pathlib import Path
from statistics import mean

import pytest

from ductile.columns import TokenIds
from ductile.config.reading.parse import parse
from ductile.config.schema.orchestrator import to_sampling
from ductile.config.schema.run import RLConfig
from ductile.generator.generate_role import load_engine
from ductile.orchestrator.control.control import Run as LiveRun
from ductile.records import GenerateRequest
from ductile.tasks.build import build_task
from ductile.tasks.prompts import prompt_ids, split
from ductile.tasks.tokenizer import Tokenizer
from tests.end_to_end.runs import Run
from tests.ranks import run_alone

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SEEDS = (1, 2, 3)
RANK, ALPHA = 4, 8
RL_STEPS, SFT_STEPS = 16, 40
WORKED = 2048
"""Worked examples that are fine-tuned on."""
LEAST_RATIO = 20
RUN_S = 200

pytestmark = [pytest.mark.timeout(900)]


SFT = """
model.name = "{model}"
output_dir = "{folder}"
cluster.device = "cpu"
data = {{ path = "{data}", batch_size = 64, seq_len = 1024 }}
max_steps = {steps}
"""


def rl_config(folder: Path) -> Path:
    """The quickstart's config, for a run in `folder`/run."""
    folder.mkdir()
    text = (QUICKSTART / "rl.toml").read_text().replace('"examples/quickstart/', f'"{QUICKSTART}/')
    lines = [line for line in text.splitlines() if not line.startswith(("output_dir", "clean"))]
    config = folder / "rl.toml"
    config.write_text("\n".join([f'output_dir = "{folder / "run"}"', *lines]))
    return config


def runs(start, folder: Path, seed: int, adapted: bool, resized: bool = False) -> tuple[float, float, Run]:
    """The held-out reward before and after GRPO."""
    flags = ["--seed", str(seed), "--max-steps", str(RL_STEPS), "--orchestrator.eval.interval", str(RL_STEPS)]
    if adapted:
        flags += [*adapters("trainer.model"), "--trainer.optim.lr", "2e-3"]
    run = start(rl_config(folder), *flags)
    if resized:
        run.until_step(4)
        LiveRun(run.folder).resize([0, 4])
    assert run.ends(within_s=RUN_S) == 0, run.said()
    rewards = [row["eval_reward"] for row in run.metrics() if row.get("eval_reward") is not None]
    return rewards[0], rewards[-1], run


def adapters(section: str) -> list[str]:
    return [f"--{section}.lora.rank", str(RANK), f"--{section}.lora.alpha", str(ALPHA)]


def published_bytes(run: Run) -> set[float]:
    return {row["published_bytes"] for row in run.metrics() if row["step"] and "published_bytes" in row}


def evaluate(folder: str) -> float:
    """Held-out reward of a model, measured as the quickstart measures it."""
    config = parse(RLConfig, ["@", str(QUICKSTART / "rl.toml"), "--model.name", folder]).config
    assert config.orchestrator.task is not None
    task, tokenizer = build_task(config.orchestrator.task), Tokenizer.of(config.inference.model)
    engine = load_engine(config.inference, "cpu", tokenizer)
    sampling = to_sampling(config.orchestrator.eval.sampling)
    _, held_out = split(len(task), config.orchestrator.eval.num_examples)
    for example in held_out:
        engine.add(GenerateRequest(str(example), TokenIds(prompt_ids(task, tokenizer, example)), sampling))
    rewards: list[float] = []
    while engine.has_work():
        for generation in engine.step():
            reward = task.reward(int(generation.id), tokenizer.decode(list(generation.token_ids)))
            rewards.append(reward[0] if isinstance(reward, tuple) else reward)
    return mean(rewards)


def fine_tunes(start, folder: Path, data: Path, seed: int, adapted: bool) -> float:
    """The held-out reward after fine-tuning."""
    folder.mkdir()
    config = folder / "sft.toml"
    config.write_text(SFT.format(model=QUICKSTART / "model", folder=folder / "run", data=data, steps=SFT_STEPS))
    flags = ["--seed", str(seed), "--optim.lr", "2e-3" if adapted else "1e-4"]
    flags += adapters("model") if adapted else []
    run = start(config, *flags, command="sft")
    assert run.ends(within_s=RUN_S) == 0, run.said()
    return run_alone(evaluate, str(run.folder / "model"))


def table(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<44}{value}")


def test_grpo_of_adapters_raises_the_reward_as_full_training_does(start, tmp_path: Path) -> None:
    full = [runs(start, tmp_path / f"full-{seed}", seed, adapted=False) for seed in SEEDS]
    adapted = [runs(start, tmp_path / f"lora-{seed}", seed, adapted=True, resized=seed == SEEDS[0]) for seed in SEEDS]
    (whole,), given = published_bytes(full[0][2]), max(published_bytes(adapted[0][2]))
    of_full, of_adapted = ([after - before for before, after, _ in each] for each in (full, adapted))
    table(
        f"GRPO of the quickstart, {RL_STEPS} steps, adapters of rank {RANK}",
        [
            ("gain in held-out reward, full training", " ".join(f"{gain:.3f}" for gain in of_full)),
            ("gain in held-out reward, adapters", " ".join(f"{gain:.3f}" for gain in of_adapted)),
            ("bytes of a version, full and adapters", f"{whole:,.0f} {given:,.0f}"),
        ],
    )
    assert mean(of_adapted) >= min(of_full)
    assert min(of_adapted) > 0
    assert whole >= LEAST_RATIO * given
    assert len(adapted[0][2].events("resized")) == 1


def test_fine_tuning_of_adapters_raises_the_reward_as_full_training_does(start, tmp_path: Path) -> None:
    lines = (QUICKSTART / "sft.jsonl").read_text().splitlines()
    rows = [line for line in lines if "=" in json.loads(line)["completion"]]
    data = tmp_path / "worked.jsonl"
    data.write_text("\n".join(rows[:WORKED]) + "\n")
    before = run_alone(evaluate, str(QUICKSTART / "model"))
    full, adapted = (
        [fine_tunes(start, tmp_path / f"{is_adapted}-{seed}", data, seed, is_adapted) - before for seed in SEEDS]
        for is_adapted in (False, True)
    )
    table(
        f"Fine-tuning of the quickstart's model, {SFT_STEPS} steps, adapters of rank {RANK}",
        [
            ("held-out reward before", f"{before:.3f}"),
            ("gain, full training", " ".join(f"{gain:.3f}" for gain in full)),
            ("gain, adapters", " ".join(f"{gain:.3f}" for gain in adapted)),
        ],
    )
    assert mean(adapted) >= min(full)
    assert min(adapted) > 0
