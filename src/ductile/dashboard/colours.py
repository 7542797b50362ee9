"""The colour of what a slot does, in every chart."""

from ductile.core.scheduling.facts.ledger import Activity

COLOURS: dict[Activity, str] = {
    "train": "#3b6fb6", "generate": "#4c9f70", "score": "#8e6bbf", "publish": "#e0a030", "switch": "#c8503c",
    "idle": "#e6e6e6",
}  # fmt: skip
