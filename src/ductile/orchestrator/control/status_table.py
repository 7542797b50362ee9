"""What `ductile status` prints."""

from rich.console import Console, Group, RenderableType
from rich.table import Table

from ductile.core.layout.geometry.parallel_layout import AXES, ONE_SLOT_RANK, ParallelLayout
from ductile.core.scheduling.resize_rulings import describe
from ductile.messages.control import FleetStatus, RunStatus

ACTIVITIES = ("train", "generate", "score", "publish", "switch", "idle")
MOST_WIDTH = 1000
NUM_CHANGES = 5
"""Resizes that are shown: the latest ones."""


def show(known: RunStatus) -> None:
    _print(status_table(known))


def print_fleet(known: FleetStatus) -> None:
    _print(Group(*filter(None, [known.sentence]), fleet_table(known)))


def _print(status: RenderableType) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    needed = console.measure(status, options=console.options.update(width=MOST_WIDTH)).maximum
    if needed > console.width:  # the terminal breaks the lines, and no column is cut
        console = Console(soft_wrap=True, highlight=False, markup=False, width=needed)
    console.print(status)


def status_table(known: RunStatus) -> RenderableType:
    """The status of a run, for people to read."""
    title = f"{known.command}: step {known.step}/{known.max_steps}, membership epoch {known.epoch}, pid {known.pid}"
    trainer = f"trainer: {describe(known.trainer)}"
    if known.changing:
        trainer += f" (changing: {known.changing})"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    activities = [name for name in ACTIVITIES if any(name in slot.seconds for slot in known.slots)]
    on_gpus = any(slot.device != "cpu" for slot in known.slots)
    on_nodes = len({slot.node for slot in known.slots}) > 1
    for name in ("slot", *(["node"] if on_nodes else []), "pid", *(["device"] if on_gpus else [])):
        table.add_column(name, no_wrap=True)
    table.add_column("roles", min_width=len("generate,"))  # one below the other where there is no room: no name is cut
    table.add_column("doing", no_wrap=True)
    axes = _axes(known.trainer)
    for name in (*axes, *activities):
        table.add_column(name, justify="right", no_wrap=True)
    for slot in known.slots:
        seconds = [_seconds(slot.seconds.get(name, 0.0)) for name in activities]
        at = known.trainer.coordinates(slot.slot) if slot.slot in known.trainer.slots else {}
        place = [str(at[axis]) if at else "" for axis in axes]
        roles = ", ".join(slot.roles) or "-"
        device = [slot.device] if on_gpus else []
        node = [str(slot.node)] if on_nodes else []
        table.add_row(str(slot.slot), *node, str(slot.pid), *device, roles, slot.doing, *place, *seconds)
    parts: list[RenderableType] = [title, trainer, table]
    parts += [fleet_table(known.fleet)] if known.fleet else []
    parts += [f"step {change.step}: {change.sentence}" for change in known.changes[-NUM_CHANGES:]]
    parts += [f"lost: {sentence}" for sentence in known.lost.values()]
    parts += [f"went back: {sentence}" for sentence in known.went_back[-NUM_CHANGES:]]
    parts += [f"canary: {sentence}" for sentence in known.disagreed[-NUM_CHANGES:]]
    return Group(*parts)


def fleet_table(known: FleetStatus) -> RenderableType:
    """The servers of a run, for people to read."""
    version = "no version yet" if known.version is None else f"version {known.version}"
    num = sum(server.status != "absent" for server in known.servers)
    title = f"servers: {num}, membership epoch {known.epoch}, {version}"
    if known.under_way:
        title += f" (under way: {known.under_way})"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("server", "state", "for"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")
    for server in known.servers:
        has = "-" if server.version is None else str(server.version)
        unfinished = str(server.num_unfinished)
        table.add_row(server.id, server.status, _seconds(server.since_s), has, unfinished, server.reason)
    return Group(title, *([table] if known.servers else []))


def _axes(layout: ParallelLayout) -> list[str]:
    """Axes whose coordinates are shown: those above 1 of a mesh that is more than data parallelism."""
    if layout.dims.rank_shape == ONE_SLOT_RANK:
        return []
    return [axis for axis in AXES if getattr(layout.dims, axis) > 1]


def _seconds(seconds: float) -> str:
    """ "4.1 s", "123 s"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
