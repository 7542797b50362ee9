"""The seam between a slot that generates and what samples tokens there.

`ductile.generator.generate_role.GenerateRole` and the HTTP server drive an engine by this Protocol;
`ductile.generator.engine.engine` has ductile's own. What each engine must do is in
`tests/generator/test_generation_engine.py`.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from ductile.generator.engine.kv_transfer import RequestKV
from ductile.generator.engine.step_profiler import StepLoad
from ductile.messages.workers import EngineStats
from ductile.records import GenerateRequest, Generation, KVHandle


class GenerationEngine(Protocol):
    """Samples many requests at once, a step at a time. Calls come from one thread, between two steps."""

    version: int
    """Version of the weights from which the next token is sampled; each token remembers its own."""
    failed: dict[str, Exception]
    """Requests that the last step could not go on with, and why. They are gone; the others do not notice."""
    last_step: StepLoad | None
    """What the last step computed; None when it had nothing to compute."""

    def check(self, *requests: GenerateRequest) -> None:
        """Raise `RequestRefused` when adding these, one after the other, would."""
        ...

    def add(self, request: GenerateRequest, cache: RequestKV | None = None) -> None:
        """Take a request: a new one, or one that another engine began, with what `KVMigration.fetch` returned for it
        just now. Raises `RequestRefused`."""
        ...

    def abort(self, ids: Collection[str] | None = None) -> None:
        """End these (None: all) with what they have; the next step reports them. Unknown ids have ended already."""
        ...

    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        ...

    def step(self) -> list[Generation]:
        """Go on with the requests for a little. Returns those that ended; see also `failed`."""
        ...

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights (all of the model's, by its own names) from the next step on; requests in flight go
        on. Raises `ValueError`, with nothing changed, when names or shapes are not the model's."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights of `version`, by the model's own names."""
        ...

    def num_generated(self) -> Mapping[str, int]:
        """Tokens generated so far, by request in flight."""
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class KVMigration(Protocol):
    """What an engine can do besides whose requests may take their KV caches along to another engine."""

    def fetch(self, handle: KVHandle, request: GenerateRequest) -> RequestKV:
        """What another engine computed of a request's context. Raises `KVUnavailable`, whose text says why it must be
        computed again."""
        ...

    def migrate_out(
        self, ids: Collection[str], with_cache: Collection[str] = ()
    ) -> tuple[list[GenerateRequest], dict[str, RequestKV]]:
        """Forget these and return them as requests that go on where they are; ids that have ended are left out.

        A cache goes along for those in `with_cache` that have one, when all of it is of the live weights.
        """
        ...
