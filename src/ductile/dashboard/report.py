"""A run as one HTML file that needs nothing else: no network, no server, no other file.

Prompts, paths and sentences may hold anything; the template escapes every value that it is given.
"""

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ductile.core.layout.choice.layout_text import compact
from ductile.core.scheduling.policies.names import described
from ductile.dashboard.causes import CAUSES, named
from ductile.dashboard.colours import COLOURS
from ductile.dashboard.curve import FIELD, curves
from ductile.dashboard.ownership import ownership
from ductile.dashboard.run_report import Row, RunReport
from ductile.dashboard.view import duration

MOST_EVENTS = 2000
"""Rows of each list that the page shows, the first ones; a list of events says how many more there are."""


def render(report: RunReport) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html.j2")
    spent = report.seconds()
    total_s = sum(spent.values())
    return page.render(
        report=report,
        facts=list(_facts(report)),
        settings=list(_settings(report.config)),
        ownership=ownership(report.spans),
        step_ends=[(profile.step, profile.start_s, profile.end_s) for profile in report.profiles],
        ends_s={profile.step: profile.end_s for profile in report.profiles},
        spent=[
            (
                activity,
                named(cause or ""),
                seconds,
                seconds / total_s,
                COLOURS[activity],
                CAUSES[cause] if cause else "",
            )
            for (activity, cause), seconds in spent.items()
        ],
        curves=curves(report.metrics),
        field=FIELD,
        colours=COLOURS,
        publishes=[row for row in report.steps if row.get("seconds/publish") is not None],
        most=MOST_EVENTS,
        compact=compact,
    )


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    """The run in a dozen lines."""
    steps = report.steps
    if steps:
        of = f" of {report.setting.num_steps}" if report.setting else ""
        yield "steps", f"{steps[-1]['step']}{of}"
        wall_s = sum(row.get("step_s") or 0.0 for row in steps)
        yield "time in steps", f"{duration(wall_s)}, {wall_s / len(steps):.2f} s a step"
        for name, key in (("reward", "reward_mean"), ("held-out reward", "eval_reward")):
            values = [row[key] for row in report.metrics if row.get(key) is not None]
            if values:
                yield name, f"{values[0]:.3f} first, {values[-1]:.3f} last"
    if report.setting is not None:
        setting = report.setting
        roles = (("train", setting.home.train), ("generate", setting.home.generate), ("score", setting.home.score))
        yield "slots at the start", ", ".join(f"{role} {compact(slots)}" for role, slots in roles if slots)
        nodes = setting.rules.topology.by_node(sorted(setting.home.slots))
        if len(nodes) > 1:
            yield "nodes", ", ".join(f"node {node} has slots {compact(slots)}" for node, slots in nodes.items())
        options = setting.use_pre_process_policy, setting.use_wait_before_last_iter_policy
        yield "policy", described(setting.policy, *options)
        yield "a step", f"{setting.groups_per_step} prompts with {setting.group_size} completions each"
    if report.profiles:
        yield "idle", f"{report.idle_share:.1%} of all slots' time"
        yield "changes of roles completed", str(sum(profile.num_switches for profile in report.profiles))


def _settings(config: Row, path: str = "") -> Iterator[tuple[str, str]]:
    """Every key with its value, dotted."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", str(value)
