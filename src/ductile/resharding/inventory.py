"""What a rank holds, by name: modules, optimizers and tensors of any framework, as blocks.

    module                  its state dict: parameters and persistent buffers, under their names
    optimizer               <key>/<parameter>, such as exp_avg/layers.0.weight; its module belongs to the same state
    DTensor, tensor, Block  the name that it has in its mapping; the names of nested mappings are joined by dots
    ShardedTensor           its own key, wherever it lies
    None                    nothing

Values that are no tensors (learning rates, param groups, extra state) do not move; the inventory lists them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ductile.core.transfer.cells import NotReshardable
from ductile.resharding.blocks import Block, KnownBlocks, plain
from ductile.resharding.described import Held, Piece, buffer_name
from ductile.resharding.megatron import MegatronModule, ShardedTensor, ShardedTensorFactory, sharded_block

State = Any
"""What can be resharded: a mapping, a module, an optimizer, a tensor or another description of one, None; or a list of
such parts."""

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of names that activation checkpointing and torch.compile add."""


class Inventory:
    """One rank's part of a state: views of the caller's own memory.

    With `source`, the description of another state, this one is to be overwritten by it: an optimizer that has not
    stepped gets, as zeros, what the source's keeps for its parameters, and a tied tensor counts under its first name
    alone. What lies as it did in the inventory `before` is not described again. Raises `NotReshardable` for what cannot
    be described.
    """

    @torch.no_grad()
    def __init__(self, state: State, source: Sequence[Held] | None = None, before: "Inventory | None" = None) -> None:
        self.tensors: dict[str, list[Block]] = {}
        self.left_out: list[str] = []
        self._once = source is not None
        self._known = KnownBlocks(before._known if before is not None else None)
        self._owners: dict[int, tuple[str, Tensor]] = {}
        """Parameters by their id: (name, the memory that the blocks are views of)."""
        self._names: dict[tuple[int, ...], str] = {}
        """First name of each tensor, by the place and shape of its memory."""
        optimizers: list[torch.optim.Optimizer] = []
        for part in state if isinstance(state, list | tuple) else [state]:
            if isinstance(part, str | bytes | int | float):
                what = "a module, an optimizer, a MegatronModule, a mapping of names to tensors, or a list of these"
                raise NotReshardable(f"a state is {what}, not {part!r}")
            self._add("", part, optimizers)
        self._source = source or ()
        for optimizer in optimizers:
            self._add_optimizer(optimizer)
        self._known.forget()

    def held(self) -> list[Held]:
        """The description of all tensors; those that lie alike share one `Held`."""
        alike: dict[tuple[str, tuple[int, ...], tuple[Piece, ...], bool], list[str]] = {}
        for name, blocks in self.tensors.items():
            dtype = str(blocks[0].data.dtype).removeprefix("torch.")
            pieces = tuple(block.piece for block in blocks if block.data.numel())
            alike.setdefault((dtype, blocks[0].shape, pieces, blocks[0].padded), []).append(name)
        return [Held(tuple(names), *what) for what, names in alike.items() if 0 not in what[1]]

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """Every block that is not empty, by the name of its buffer in an assembled layout."""
        return {
            buffer_name(name, number): block
            for name, blocks in self.tensors.items()
            for number, block in enumerate(block for block in blocks if block.data.numel())
        }

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The blocks' memory, flat, by the name of the buffer."""
        return {name: block.memory for name, block in self.blocks.items()}

    def is_like(self, other: "Inventory") -> bool:
        """Return whether both have the same names in the same memory, cut alike."""
        if self.tensors == other.tensors:  # the same blocks: nothing had to be described again
            return self.left_out == other.left_out
        pairs = zip(self.buffers.items(), other.buffers.items(), strict=True)
        return (
            self.left_out == other.left_out
            and self.held() == other.held()
            and all(a == b and here.data_ptr() == there.data_ptr() for (a, here), (b, there) in pairs)
        )

    def _add(self, name: str, part: State, optimizers: list[torch.optim.Optimizer]) -> None:
        match part:
            case None:
                pass
            case torch.optim.Optimizer():
                optimizers.append(part)
            case nn.Module():
                self._add_module(name, part)
            case MegatronModule():
                for key, parameter, blocks in part.blocks():
                    self._own(_join(name, key), parameter, blocks)
            case Tensor():
                self._own(name, part, self._known.of(name, part))
            case Block():
                self._put(name, [replace(part, data=plain(name, part.data.detach()))])
            case ShardedTensorFactory():
                self._add_parts(part)
            case ShardedTensor():
                self._put(part.key, sharded_block(part))
            case Mapping():
                for key, value in part.items():
                    self._add(_join(name, str(key)), value, optimizers)
            case list() | tuple():
                for index, value in enumerate(part):
                    numbered = isinstance(value, Tensor | Mapping)
                    self._add(_join(name, str(index)) if numbered else name, value, optimizers)
            case _:
                self.left_out.append(name)

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # after a forward pass alone, parameters may still be whole copies
        for key, value in module.state_dict(keep_vars=True).items():
            name = _join(prefix, key)
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if isinstance(value, Tensor) and not name.endswith("_extra_state"):
                self._own(name, value, self._known.of(name, value))
            else:
                self.left_out.append(name)

    def _add_parts(self, factory: ShardedTensorFactory) -> None:
        parts, memory = Inventory(factory.build()), factory.data.untyped_storage().data_ptr()
        for name, blocks in parts.tensors.items():
            if any(block.data.numel() and block.data.untyped_storage().data_ptr() != memory for block in blocks):
                raise NotReshardable(
                    f"{name}: the factory of {factory.key} makes copies; what is moved into them would be lost. "
                    "Describe its parts as views, with Block"
                )
            self._put(name, blocks)

    def _own(self, name: str, tensor: Tensor, blocks: list[Block]) -> None:
        # Tied parameters have several names. Optimizers know them by the first.
        self._owners.setdefault(id(tensor), (name, tensor))
        if self._once and (first := blocks[0].data).numel():
            memory = (first.data_ptr(), *first.shape, *first.stride())
            if self._names.setdefault(memory, name) != name:
                return
        self._put(name, blocks)

    def _put(self, name: str, blocks: Iterable[Block]) -> None:
        for block in blocks:
            others = self.tensors.setdefault(name, [])
            if others and (others[0].shape, others[0].data.dtype) != (block.shape, block.data.dtype):
                raise NotReshardable(
                    f"{name} comes twice: as {others[0].data.dtype} {list(others[0].shape)} and as "
                    f"{block.data.dtype} {list(block.shape)}"
                )
            others.append(block)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._owners:
                    raise NotReshardable(
                        f"an optimizer has a parameter of shape {list(parameter.shape)} that no module of this state "
                        "has; pass the module and its optimizer together, as [module, optimizer]"
                    )
                name, _ = self._owners[id(parameter)]
                if not optimizer.state.get(parameter) and name in self._kinds:
                    optimizer.state[parameter] = {kind.key: kind.zeros(parameter, group) for kind in self._kinds[name]}
                for key, value in optimizer.state.get(parameter, {}).items():
                    self._add_moment(f"{key}/{name}", value, parameter)

    @cached_property
    def _kinds(self) -> dict[str, list["_Kind"]]:
        """What the source's optimizers keep, by the parameter's name."""
        found: dict[str, dict[str, _Kind]] = {}
        for held in self._source:
            for name in held.names:
                key, slash, parameter = name.partition("/")
                if slash:
                    found.setdefault(parameter, {}).setdefault(key, _Kind(key, held.shape, held.dtype))
        return {parameter: list(kinds.values()) for parameter, kinds in found.items()}

    def _add_moment(self, name: str, value: object, parameter: Tensor) -> None:
        if not isinstance(value, Tensor):
            self.left_out.append(name)
            return
        if isinstance(value, DTensor) or value.ndim == 0:
            self._put(name, self._known.of(name, value))
            return
        if isinstance(parameter, DTensor) or (value.shape, value.stride()) != (parameter.shape, parameter.stride()):
            raise NotReshardable(
                f"{name} is a plain tensor of shape {list(value.shape)}, and does not lie as its parameter does: which "
                "part of the whole state it is cannot be told. Pass it yourself, as a Block"
            )
        owner, whole = self._owners[id(parameter)]
        moment = plain(name, value.detach())
        self._put(name, [block.beside(whole, moment) for block in self.tensors[owner]])


class _Kind:
    """One tensor that an optimizer keeps for a parameter."""

    def __init__(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        self.key = key
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, dtype)

    def zeros(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        if self._shape == ():
            # Where torch's own optimizers keep their step counts.
            on_device = group.get("capturable") or group.get("fused")
            return torch.zeros((), dtype=self._dtype, device=parameter.device if on_device else "cpu")
        return torch.zeros_like(parameter.detach(), dtype=self._dtype)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
