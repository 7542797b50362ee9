"""A run's folder, written down by a simulated run: what `plan`, `report` and `simulate --run` read."""

from ductile.config.checks.named_policy import named_policy
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.scheduling import OrdersGiven
from ductile.events.slots import SlotStarted
from ductile.events.steps import StepProfiled, WorkBegan
from ductile.observe import Recorder
from ductile.sim.run import simulate
from ductile.tasks.prompts import ExampleOrder


def record_run(folder, scenario, policy="static", **setting):
    """Simulates the scenario and writes what a real run would have written of it. Returns what came out."""
    work = scenario.work
    result = simulate(scenario, named_policy(policy))
    record = Recorder(folder, clock=lambda: 1e9)
    try:
        said = Setting(
            scenario.placement,
            scenario.limits,
            policy,
            work.num_steps,
            work.groups_per_step,
            work.group_size,
            work.max_tokens,
            work.seq_len,
            work.n_minibatches,
            work.max_async_level,
            work.max_off_policy_steps,
            on_gpu=scenario.on_gpu,
            rules=scenario.rules,
            **setting,
        )
        record.event(WorkBegan(said, sentence=f"{policy} decides."))
        for slot in scenario.placement.slots:
            roles = scenario.placement.roles(slot)
            record.event(SlotStarted(slot, roles, "cpu", 1, sentence=f"Slot {slot} runs."))
        for change in result.changes:
            record.event(OrdersGiven(change.at_s, sentence=f"{change.decision.reason}."))
        start_s, order = 0.0, ExampleOrder(range(work.num_steps * work.groups_per_step), work.seed)
        for step, seconds in enumerate(result.step_s, 1):
            end_s = start_s + seconds if step < work.num_steps else result.wall_s
            groups = [order[(step - 1) * work.groups_per_step + place] for place in range(work.groups_per_step)]
            names = [f"train/{epoch}/{example}" for epoch, example in groups]
            profile = StepProfile(
                step=step,
                start_s=start_s,
                end_s=end_s,
                spans=tuple(span for span in result.spans if start_s < span.end_s <= end_s),
                lengths=tuple(work.length(name, f"{name}/{k}/0") for name in names for k in range(work.group_size)),
                prompt_tokens=float(work.prompt_tokens),
                speeds=scenario.speeds,
                costs=scenario.costs,
            )
            record.event(StepProfiled(profile, sentence=f"Step {step} took {seconds:.2f} s."))
            record.metrics(
                step,
                {
                    "reward_mean": step / 10,
                    "length_mean": 90.0 + step,
                    "step_s": seconds,
                    "groups_equal": 0.0,
                    "tokens_per_s_generate": 100.0,
                    "tokens_per_s_train": 200.0,
                },
            )
            start_s = end_s
    finally:
        record.close()
    return result
