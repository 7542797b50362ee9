"""The published set-up of dynamic scheduling, simulated: 64 and 128 GPUs, 512 x 16 answers of up to 28,672 tokens.

    python benchmarks/published.py --json benchmarks/results/published.json

All inputs are in `published.toml`, each with its source. The table has the gain of `rules` (with both optional
policies) and of `model` over the best static split and over the collocated run of the same simulator, beside the
published one. What differs is said below the table.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from ductile.core.cluster.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.cluster.placement import Placement
from ductile.core.cluster.state import Limits
from ductile.sim.arms import run_arms
from ductile.sim.scenario import Scenario, WorkLoad, lognormal
from provenance import provenance

INPUTS = Path(__file__).with_name("published.toml")
ARMS = ("best_static", "collocated", "rules", "rules_policies", "model")
DIFFERS = """\
What differs from the published comparison:
- Here all arms are one system at the same speeds; there the baselines are other systems (verl, RLinf), whose engines
  and kernels differ too. A gain over another system is not a gain of scheduling alone.
- Here the static baseline is the best of all splits, found by trying them; there it is one placement.
- Speeds of training and prefill are estimates from the hardware; nobody published them. The less time training takes
  beside the tail of generation, the less any scheduling can gain over a collocated run.
- Log-probs are recomputed by the trainer's slots here (part of the training speed), by slots of their own there."""


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
            grant_s=costs["grant_s"],
            release_s=costs["release_s"],
            handoff_s=costs["handoff_s"],
        ),
        limits=Limits(max_num_seqs=speeds["max_num_seqs"]),
        coalesce_s=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=["1.5B", "7B", "32B"])
    arguments = parser.parse_args()
    inputs = tomllib.loads(INPUTS.read_text())
    rows: list[dict[str, Any]] = []
    print(f"{'':12}" + "".join(f"{arm:>16}" for arm in ARMS) + f"{'rules gain':>14}{'model gain':>14}{'published':>12}")
    for gpus in (64, 128):
        for model in inputs["model"]:
            if model["name"] not in arguments.models:
                continue
            outcomes = {each.name: each for each in run_arms(scenario(inputs, model, gpus, arguments.steps), ARMS)}
            step_s = {name: each.result.wall_s / arguments.steps for name, each in outcomes.items()}
            published = next(p for p in inputs["published"] if p["gpus"] == gpus and model["name"] in p["models"])
            gains = {
                name: [step_s["best_static"] / step_s[name], step_s["collocated"] / step_s[name]]
                for name in ("rules_policies", "model")
            }
            rows.append(
                {
                    "model": model["name"],
                    "gpus": gpus,
                    "best_static_train_slots": len(outcomes["best_static"].placement.train),
                    "step_s": step_s,
                    "idle_share": {name: each.result.idle_share for name, each in outcomes.items()},
                    "gain_over_static_and_collocated": gains,
                    "published_gain": published["gain"],
                    "published_source": published["source"],
                }
            )
            print(
                f"{model['name']:>5} {gpus:>4} "
                + " "
                + "".join(f"{seconds:>14.1f} s" for seconds in step_s.values())
                + "".join(f"{f'{a:.2f}x {b:.2f}x':>14}" for a, b in gains.values())
                + f"{'-'.join(f'{gain:.2f}' for gain in dict.fromkeys(published['gain'])):>11}x",
                flush=True,
            )
    print("\nGains: over the best static split, then over the collocated run.\n" + DIFFERS)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, **provenance("numpy")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
