"""torch.compile, a layer at a time.

1. What stays outside of compiled code: attention, as its kernels and masks are made for one batch, and the collectives
   of tp and cp, which every slot has to run in the order of the program (`outside_graphs`). A layer is cut there: into
   a piece before attention and one behind it, and with tp at every exchange of tokens.
2. What is compiled: each piece, forward and backward. torch keeps compiled code with the functions of the layers'
   classes, so that all layers have the same, and so has the trainer that a resize makes: code for a layout that the
   process has had is found again.
3. Numbers of tokens are symbols: micro-batches of all sizes run the same code, but for a single token, which runs
   uncompiled.
4. Kernels of `ductile.kernels` are never traced: while torch compiles, `dispatch` names plain operations, which the
   compiler fuses by itself. Products are torch's own, on an AMD CPU too.
5. What cannot be compiled runs as it does without: everything where there is no compiler, one piece where that piece
   fails. The slot's log says why, once for each reason. Slots need not agree, as their collectives are outside.

Checkpointing and offloading go around it: what they drop or move is what compiled code keeps for its backward pass.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._dynamo.exc import RestartAnalysis
from torch._guards import CompileContext
from torch.fx import GraphModule

from ductile.config.schema.model import CompileConfig
from ductile.error_text import error_text
from ductile.kernels.dispatch import tell
from ductile.model.attention import Attend
from ductile.model.transformer import Transformer

P = ParamSpec("P")
R = TypeVar("R")

COMPILE = "compile/"
"""Prefix of the names of the counts in a step's report."""
MOST_VARIANTS = 64
"""Most times that torch compiles one piece; then it runs as it does without. Variants are with and without gradients,
and for each kind of layout that the process has been in."""


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function as one that torch never compiles, whoever calls it."""
    disabled: Any = torch.compiler.disable(function, reason="it is among what ductile leaves uncompiled")
    return disabled


@dataclass(slots=True)
class CompileCounters:
    """Counts since they were taken last, of this process, as torch's compiled code is the process's too."""

    num_graphs: int = 0
    """Pieces that were compiled."""
    num_recompiles: int = 0
    """Those of them that had been compiled before, for other sizes, dtypes or modules."""

    def take(self) -> dict[str, int]:
        """Return the counts by the names that a step reports them by, and begin anew."""
        counts = {f"{COMPILE}graphs": self.num_graphs, f"{COMPILE}recompiles": self.num_recompiles}
        self.num_graphs = self.num_recompiles = 0
        return counts


COUNTERS = CompileCounters()


def apply(model: Transformer, config: CompileConfig) -> None:
    """Have every layer of the model run compiled code, which is made when it is run first. Names of parameters stay."""
    for layer in model.layers.values():
        compiled = torch.compile(layer.forward, backend=_BACKENDS[config.backend], dynamic=True)
        vars(layer)["forward"] = _CompiledLayer(compiled, layer.forward, config.backend)


@cache
def why_no_compiler(backend: str, device: torch.device) -> str:
    """Return what keeps this process from compiling for this device; "" if nothing does. It is found out by compiling
    something small, with its gradient, and is told the slot's log."""
    if (backend, device.type) == ("inductor", "cpu"):
        import torch._inductor.config as inductor_config  # takes a second: only where it is used

        inductor_config.compile_threads = 1  # a slot has one core, and no processes beside it
    try:
        # In a thread of its own: the layer that asks may be in a checkpoint, which counts all that its thread saves.
        # torch's settings are of a context.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(copy_context().run, _compile_small, backend, device).result()
    except Exception as error:  # whatever a compiler raises
        reason = _first_line(error)
        tell(f"trainer.model.compile has no effect on this slot: {reason}")
        return reason
    return ""


def _compile_small(backend: str, device: torch.device) -> None:
    x = torch.ones(4, device=device, requires_grad=True)
    torch.compile(_sine, backend=backend, dynamic=True)(x).sum().backward()


def _sine(x: Tensor) -> Tensor:
    return x.sin()


@dataclass(frozen=True)
class _CompiledLayer:
    """A layer's forward pass. All layers are number 0 to compiled code, which is one for all of them."""

    compiled: Callable[..., Tensor]
    uncompiled: Callable[..., Tensor]
    backend: str

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        # To torch 1 is no size like others. Code for a single token, as a rank without samples has it, would be made
        # apart.
        if len(x) < 2 or why_no_compiler(self.backend, x.device):
            return self.uncompiled(x, cos, sin, layer, attend)
        # Here, as torch's settings are of a thread: a resize makes the model in another one than runs it.
        if dynamo_config.recompile_limit < MOST_VARIANTS:
            dynamo_config.recompile_limit = MOST_VARIANTS
        return self.compiled(x, cos, sin, 0, _AttendOutside(attend, layer))


@dataclass(frozen=True)
class _AttendOutside:
    """A layer's attention, as compiled code calls it: which layer and which batch it is of, torch does not look at."""

    attend: Attend
    layer: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(self, q, k, v)


@outside_graphs
def _attend(outside: _AttendOutside, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return outside.attend(outside.layer, q, k, v)


def _compile(name: str, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Return a piece, compiled by torch's backend of this name, or as it is where that fails."""
    try:
        compiled = lookup_backend(name)(graph, inputs)
    except RestartAnalysis:  # torch traces the piece once more, and knows better what to take for a constant
        raise
    except Exception as error:  # whatever a compiler raises
        tell(f"a piece of each layer runs uncompiled: {_first_line(error)}")
        return graph.forward
    compile_id = CompileContext.current_compile_id()
    COUNTERS.num_graphs += 1
    COUNTERS.num_recompiles += bool(compile_id and compile_id.frame_compile_id)
    return compiled


_BACKENDS = {name: partial(_compile, name) for name in ("inductor", "aot_eager")}
"""One object for each name: torch finds compiled code again by its backend."""


def _first_line(error: Exception) -> str:
    return error_text(error).partition("\n")[0]
