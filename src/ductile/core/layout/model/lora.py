"""Low-rank adapters: y = W x + (alpha / rank) B (A x), where W stays and A and B are trained (Hu et al. 2021, LoRA).

Each target has an A [rank, inputs] and a B [outputs, rank]. Our model fuses some projections; their adapters lie one
below the other as the weights do, and each B sees the values of its own A alone.
"""

from dataclasses import dataclass

FUSED: dict[str, tuple[str, ...]] = {
    "attention.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "attention.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
"""Projections of a Hugging Face layer that each linear module of ours is made of, in the order of its rows."""
PROJECTIONS = tuple(name for names in FUSED.values() for name in names)
"""Projections that can have an adapter."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Which projections have an adapter, and of which size."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = PROJECTIONS

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / self.rank

    def among(self, module: str) -> tuple[bool, ...]:
        """Return of each projection that is fused into the module, such as "mlp.gate_up_proj", whether it is a
        target."""
        return tuple(name in self.targets for name in FUSED[module])
