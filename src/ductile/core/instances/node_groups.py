"""Placement by groups of nodes: `{actor: {node_group: a, placement: 0-3}}` as slots of the whole run.

Slots are counted from 0 at the group's first node; several groups are counted through in the order in which they are
named. What is found is given to `ductile.core.instances.placement.place`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ductile.core.instances.placement import PlacementError, SlotsGiven, is_all, slot_numbers
from ductile.core.layout.choice.layout_text import compact

ALL_NODES = "cluster"
"""The group that all nodes are in."""


@dataclass(frozen=True, slots=True)
class InGroup:
    """Slots of groups of nodes."""

    groups: tuple[str, ...]
    slots: SlotsGiven


def groups_of_nodes(groups: Sequence[tuple[str, SlotsGiven]], num_nodes: int) -> dict[str, tuple[int, ...]]:
    """Return the nodes of each group, ascending. groups: label and `node_ranks` of each. Raises PlacementError, with
    every violation."""
    found: dict[str, tuple[int, ...]] = {ALL_NODES: tuple(range(num_nodes))}
    violations: list[str] = []
    for label, given in groups:
        if label in found:
            why = "is all nodes already" if label == ALL_NODES else "is there twice"
            violations.append(f"The node group `{label}` {why}: give each group a label of its own.")
            continue
        try:
            found[label] = tuple(range(num_nodes)) if is_all(given) else slot_numbers("node_ranks", given)
        except PlacementError as error:
            violations.extend(error.violations)
            continue
        if beyond := [node for node in found[label] if node >= num_nodes]:
            last = f"{num_nodes} (cluster.num_nodes), numbered from 0"
            violations.append(f"The node group `{label}` has node {compact(beyond)}, and there are {last}.")
    if violations:
        raise PlacementError(violations)
    return found


def without_groups(
    entries: Mapping[str, SlotsGiven | InGroup], nodes: Mapping[str, Sequence[int]], per_node: int
) -> dict[str, SlotsGiven]:
    """Return the entries with slots of the whole run in the place of those of groups. Raises PlacementError, with every
    violation."""
    found: dict[str, SlotsGiven] = {}
    violations: list[str] = []
    for names, entry in entries.items():
        if not isinstance(entry, InGroup):
            found[names] = entry
            continue
        if unknown := [label for label in entry.groups if label not in nodes]:
            violations.append(
                f"`{names}` names the node group `{unknown[0]}`, which is not there: cluster.node_groups has "
                f"{', '.join(sorted(nodes))}."
            )
            continue
        of_group = [
            node * per_node + place for label in entry.groups for node in nodes[label] for place in range(per_node)
        ]
        try:
            numbers = range(len(of_group)) if is_all(entry.slots) else slot_numbers(names, entry.slots)
        except PlacementError as error:
            violations.extend(error.violations)
            continue
        if beyond := [number for number in numbers if number >= len(of_group)]:
            violations.append(
                f"`{names}` goes past slot {len(of_group) - 1}, the last one of node group {', '.join(entry.groups)}: "
                f"{compact(beyond)} is not there. A node has {per_node} slots (deployment.gpus_per_node)."
            )
            continue
        found[names] = compact(sorted(of_group[number] for number in numbers))
    if violations:
        raise PlacementError(violations)
    return found
