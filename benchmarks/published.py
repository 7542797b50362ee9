"""The published set-up of dynamic scheduling, simulated: 64 and 128 GPUs, 512 x 16 completions of up to 28,672 tokens.

    python benchmarks/published.py --json benchmarks/results/published.json

All inputs are in `published.toml`, each with its source. Every row has the seconds of a step of three ways that stay as
they are (the placement that RLinf ships, the best split into train and generate slots, collocated) and of three that
move slots (`rules`, with both optional policies, `model`), and the gains of these over those, beside the published one.
`floor` is the longest completion decoded alone: no schedule of an on-policy step is faster. What differs is said below.

Slots are GPUs, and do what a run on GPUs may do (`core.scheduling.facts.cluster_state.may_share`): one that trains has
no memory for a generator besides. To change roles it gives one up and takes the other on, at the cost of the resize, or
of weights from a peer and a new cache. Only collocated slots hold both roles, as their placement says so; each step
they move the trainer's state to the host and back, at the least that this can cost.
"""

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ductile.core.instances.placement import Placement
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.sim.arms import collocate, run_arms
from ductile.sim.run import simulate
from ductile.sim.scenario import Scenario, WorkLoad, lognormal
from provenance import provenance, write

INPUTS = Path(__file__).with_name("published.toml")
STILL = ("shipped_static", "best_static", "collocated")
MOVING = ("rules", "rules_policies", "model")
DIFFERS = """\
What differs from the published comparison:
- Here all arms are one system at the same speeds; there the baselines are other systems (verl, RLinf), whose engines
  and kernels differ too. A gain over another system is not a gain of scheduling alone.
- There the static baseline is one placement; here it is the one that RLinf ships, and besides the best of all splits,
  found by trying them. Over the best split there is less to gain.
- The published decoding times leave little room: a step is hardly longer than its longest completion, which no
  scheduling shortens. Whatever gains more over a collocated run with these lengths has gained it elsewhere.
- A slot has room for one role. There the trainer keeps a process and its communicators on every GPU, and engines leave
  them room; with `use_pre_process_policy` the trainer's state is offloaded while its GPUs generate. ductile offloads
  nothing: train slots generate only after they have left the trainer, and that option lends none.
- The collocated arm moves the trainer's state to the host and back, at what pinned copies were measured to take: less
  than any of the systems is known to need. ductile itself would have to hold both roles in a GPU's memory.
- Speeds of training and prefill are estimates from the hardware; nobody published them. The less time training takes
  beside the tail of generation, the less any scheduling can gain over a collocated run.
- `rules` are those of RLinf's public code: they give a generator away as soon as the others could hold its rollouts by
  number, and the others decode the longer for it. The paper's trigger (cache use, a predictor of throughput) is in
  neither of its public branches; `model` is nearer to it.
- Here slots change roles one by one and at every micro-step; there in sizes that divide the batch, between optimizer
  steps."""


def scenario(inputs: dict[str, Any], model: dict[str, Any], gpus: int, steps: int) -> Scenario:
    work, costs, speeds = inputs["work"], inputs["costs"], inputs["speeds"]
    num_slots = gpus // model["slot_gpus"]
    half = num_slots // 2
    return Scenario(
        placement=Placement(tuple(range(half)), tuple(range(half, num_slots)), (), "half and half"),
        work=WorkLoad(
            num_steps=steps,
            groups_per_step=work["prompts_per_step"],
            group_size=work["group_size"],
            prompt_tokens=work["prompt_tokens"],
            max_tokens=work["max_tokens"],
            draw=lognormal(work["length_median"], work["length_sigma"]),
            alike=work["alike"],
            n_minibatches=work["n_minibatches"],
            max_async_level=work["max_async_level"],
            seq_len=work["prompt_tokens"] + work["max_tokens"],
        ),
        speeds=Speeds(
            decode=DecodeSpeed(model["decode_step_s"], model["decode_per_sequence_s"], model["decode_per_context_s"]),
            prefill_tokens_per_s=model["prefill_tokens_per_s"],
            train=TrainSpeed(model["train_tokens_per_s"], speeds["train_overhead"], speeds["micro_step_s"]),
            optim_s=costs["optim_s"],
            publish_s=model["publish_s"],
            receive_s=model["receive_s"],
        ),
        costs=SwitchCosts(
            resize_s=model["resize_s"],
            assign_s=model["receive_s"] + costs["cache_s"],
            release_s=costs["release_s"],
            migration_s=costs["migration_s"],
        ),
        limits=Limits(min_train=model["min_train"], max_num_seqs=model["max_num_seqs"], may_share=False),
        coalesce_s=1.0,
        on_gpu=True,
    )


def shipped(split: Scenario, speeds: dict[str, Any]) -> Scenario:
    """The same work on the placement that RLinf ships, with log-probs on slots of their own."""
    num_slots = split.placement.num_slots
    train = round(num_slots * speeds["shipped_train"])
    score = train + round(num_slots * speeds["shipped_generate"])
    slots = tuple(range(num_slots))
    train_tokens_per_s = split.speeds.train.tokens_per_s
    there = split.at(Placement(slots[:train], slots[train:score], slots[score:], "as RLinf ships it"))
    return replace(
        there,
        speeds=replace(
            there.speeds,
            train=replace(there.speeds.train, tokens_per_s=train_tokens_per_s * speeds["train_speed_up"]),
            score_tokens_per_s=train_tokens_per_s * speeds["score_speed_up"],
        ),
        limits=replace(there.limits, min_score=1),
        score=True,
    )


def collocated(split: Scenario, model: dict[str, Any]) -> Scenario:
    """All slots in both roles. In each step each makes room for its generator, and then for the trainer's state again:
    with the weights that it publishes and receives, as nobody else works meanwhile."""
    there, speeds = split.at(collocate(split.placement)), split.speeds
    publish_s, receive_s = speeds.publish_s + model["offload_s"], speeds.receive_s + model["onload_s"]
    return replace(there, speeds=replace(speeds, publish_s=publish_s, receive_s=receive_s))


def floor_s(split: Scenario) -> float:
    """The longest completion alone, and the weights that it waits for."""
    work, speeds = split.work, split.speeds
    context = work.prompt_tokens + work.max_tokens / 2
    return work.max_tokens * speeds.decode.seconds(1, context) + speeds.publish_s + speeds.receive_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["1.5B", "7B", "32B"])
    arguments = parser.parse_args()
    inputs = tomllib.loads(INPUTS.read_text())
    rows: list[dict[str, Any]] = []
    print(f"{'seconds a step':12}" + "".join(f"{arm:>16}" for arm in (*STILL, *MOVING, "floor")))
    for gpus in (64, 128):
        for model in inputs["model"]:
            if model["name"] in arguments.models:
                rows.append(_row(inputs, model, gpus, arguments.steps))
    print(f"\n{'gain of':20}" + "".join(f"{arm:>16}" for arm in MOVING) + f"{'published':>14}")
    for row in rows:
        for still in STILL:
            gains = "".join(f"{row['gain'][moving][still]:>15.2f}x" for moving in MOVING)
            published = "-".join(f"{gain:.2f}" for gain in dict.fromkeys(row["published_gain"]))
            print(f"{row['model']:>4} {row['gpus']:>3} {still:14}{gains}{published:>13}x")
    print("\n" + DIFFERS)
    write(arguments.json, {"rows": rows, **provenance("numpy")})


def _row(inputs: dict[str, Any], model: dict[str, Any], gpus: int, steps: int) -> dict[str, Any]:
    split = scenario(inputs, model, gpus, steps)
    results = {
        "shipped_static": simulate(shipped(split, inputs["speeds"]), Static()),
        "collocated": simulate(collocated(split, model), InTurns()),
    }
    outcomes = {each.name: each for each in run_arms(split, ("best_static", *MOVING))}
    results |= {name: each.result for name, each in outcomes.items()}
    step_s = {name: result.wall_s / steps for name, result in results.items()}
    least_s = floor_s(split)
    print(
        f"{model['name']:>6} {gpus:>4}   "
        + "".join(f"{step_s[arm]:>16.1f}" for arm in (*STILL, *MOVING))
        + f"{least_s:>16.1f}",
        flush=True,
    )
    published = next(p for p in inputs["published"] if p["gpus"] == gpus and model["name"] in p["models"])
    return {
        "model": model["name"],
        "gpus": gpus,
        "best_static_train_slots": len(outcomes["best_static"].placement.train),
        "step_s": step_s,
        "floor_s": least_s,
        "idle_share": {name: result.idle_share for name, result in results.items()},
        "num_switches": {name: len(result.changes) for name, result in results.items()},
        "gain": {moving: {still: step_s[still] / step_s[moving] for still in STILL} for moving in MOVING},
        "published_gain": published["gain"],
        "published_source": published["source"],
    }


if __name__ == "__main__":
    main()
