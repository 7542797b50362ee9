"""What `ductile simulate` does with a good config: every arm in virtual time, a table, pictures, JSON."""

from collections.abc import Sequence
from pathlib import Path

from ductile.config.simulate import LognormalLengths, SimulateConfig
from ductile.core.cluster.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.cluster.placement import place
from ductile.core.cluster.state import Limits
from ductile.observe import write_json, write_text
from ductile.sim.arms import Outcome, run_arms
from ductile.sim.scenario import DrawLength, Scenario, WorkLoad, lognormal, recorded
from ductile.sim.timeline import causes, gantt, svg


def compare(config: SimulateConfig) -> list[Outcome]:
    """Prints a table and a picture of the last arm; writes `simulated.json` and an SVG of each arm to `output_dir`.

    Raises PlacementError, ImportPathError, BadDecision, OSError or ValueError, each with a sentence.
    """
    outcomes = _run(scenario_of(config), config)
    _write(Path(config.output_dir), outcomes)
    last = outcomes[-1]
    print(f"\n{last.name}:\n{gantt(last.result.spans)}\n\nWritten: {config.output_dir}/")
    return outcomes


def scenario_of(config: SimulateConfig) -> Scenario:
    """Raises PlacementError, OSError or ValueError when the placement or the file of lengths is no good."""
    cluster, work, speeds, costs = config.cluster, config.work, config.speeds, config.costs
    placement = place(cluster.component_placement)
    return Scenario(
        placement=placement,
        work=WorkLoad(
            num_steps=work.steps,
            groups_per_step=work.prompts_per_step,
            group_size=work.group_size,
            prompt_tokens=work.prompt_tokens,
            max_tokens=work.max_tokens,
            draw=_draw(config),
            alike=work.alike,
            n_minibatches=work.n_minibatches,
            max_async_level=work.max_async_level,
            max_off_policy_steps=work.max_off_policy_steps,
            seq_len=work.seq_len or work.prompt_tokens + work.max_tokens,
            seed=config.seed,
        ),
        speeds=Speeds(
            decode=DecodeSpeed(speeds.decode_step_s, speeds.decode_per_sequence_s, speeds.decode_per_context_s),
            prefill_tokens_per_s=speeds.prefill_tokens_per_s,
            train=TrainSpeed(speeds.train_tokens_per_s, speeds.train_overhead, speeds.micro_step_s),
            score_tokens_per_s=speeds.score_tokens_per_s,
            optim_s=speeds.optim_s,
            publish_s=speeds.publish_s,
            receive_s=speeds.receive_s,
        ),
        costs=SwitchCosts(
            resize_s=costs.resize_s,
            grant_s=costs.grant_s,
            release_s=costs.release_s,
            handoff_s=costs.handoff_s,
            cache_bytes_per_token=costs.cache_bytes_per_token,
            cache_bytes_per_s=costs.cache_bytes_per_s,
        ),
        limits=Limits(
            min_train=cluster.min_train,
            min_score=1 if placement.score else 0,
            max_num_seqs=cluster.max_num_seqs,
            may_share=cluster.may_share,
        ),
        coalesce_s=cluster.coalesce_s,
        score=bool(placement.score),
    )


def _draw(config: SimulateConfig) -> DrawLength:
    lengths = config.work.lengths
    if isinstance(lengths, LognormalLengths):
        return lognormal(lengths.median, lengths.sigma)
    words = Path(lengths.path).read_text(encoding="utf-8").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"work.lengths.path: {lengths.path} must hold whole numbers of tokens, one a line")
    return recorded([int(word) for word in words])


def _run(scenario: Scenario, config: SimulateConfig) -> list[Outcome]:
    work = scenario.work
    print(
        f"{work.num_steps} steps of {work.groups_per_step} x {work.group_size} rollouts on "
        f"{scenario.placement.num_slots} slots\n\n"
        f"{'arm':16}{'train':>9}{'generate':>10}{'wall':>11}{'':>8}{'idle':>8}{'switches':>10}  idle by cause"
    )
    outcomes: list[Outcome] = []
    for outcome in run_arms(scenario, config.arms):
        outcomes.append(outcome)
        result, first = outcome.result, outcomes[0].result
        print(
            f"{outcome.name:16}{len(outcome.placement.train):>9}{len(outcome.placement.generate):>10}"
            f"{result.wall_s:>9.1f} s{f'{first.wall_s / result.wall_s:.2f}x':>8}{result.idle_share:>8.1%}"
            f"{len(result.changes):>10}  {causes(result.idle, result.wall_s * result.num_slots)}",
            flush=True,
        )
    return outcomes


def _write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "simulated.json", {"arms": [outcome.as_json() for outcome in outcomes]})
    for outcome in outcomes:
        title = f"{outcome.name}: {outcome.result.wall_s:.1f} s, {outcome.result.idle_share:.1%} idle"
        write_text(folder / f"{outcome.name}.svg", svg(outcome.result.spans, title))
