"""The gate before the engine, which is shut for all clients at once: by `/pause`, for a lease, and by an update that is
loaded in place, until it is committed."""

import asyncio
import logging

from ductile.generator.server.runner import EngineRunner
from ductile.messages.updates import PauseServer

LOG = logging.getLogger(__name__)

LONG_S = 1.0
"""A pause that takes longer than this is told of in the log."""


class PauseGate:
    """Made in the loop that serves."""

    def __init__(self, runner: EngineRunner) -> None:
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._lease: asyncio.TimerHandle | None = None
        self._began_s: float | None = None
        """Time at which the pause began, by the loop's clock; None where there is none."""
        self._long: asyncio.TimerHandle | None = None
        self.torn = False
        """True while the live tensors are of no version, since one that is loaded in place is not committed."""

    @property
    def paused(self) -> bool:
        return self._lease is not None

    async def pause(self, message: PauseServer) -> None:
        """Return when nothing runs any more: the lease begins then. A pause of one that is paused begins its lease
        anew. Where a drain takes longer than the lease, the pause has never been."""
        self._begin_lease(message.lease_s)
        if self._began_s is None:
            self._began_s = self._loop.time()
            self._long = self._loop.call_later(LONG_S, self._say_long, message)
        try:
            await self._runner.pause(message.mode, message.lease_s)
        except TimeoutError:
            self.resume()
        else:
            if self.paused:  # else somebody has resumed it meanwhile
                self._begin_lease(message.lease_s)

    def resume(self) -> None:
        self._end_lease()
        if self._long is not None:
            self._long.cancel()
        if self._began_s is not None and (took_s := self._loop.time() - self._began_s) >= LONG_S:
            LOG.info("resumed after a pause of %.1f s", took_s)
        self._began_s = None
        if not self.torn:
            self._runner.resume()

    async def close_for_loading(self, deadline_s: float) -> None:
        """Return when no step is under way, which would read the tensors that are overwritten."""
        self.torn = True
        await self._runner.pause("keep", deadline_s)

    def stay_closed(self) -> None:
        """Tell those who wait that nothing is to come of what was being loaded."""
        if self.torn:
            self._runner.end_all()

    def open_after_loading(self) -> None:
        if self.torn:
            self.torn = False
            if not self.paused:
                self._runner.resume()

    def _begin_lease(self, lease_s: float) -> None:
        self._end_lease()
        self._lease = self._loop.call_later(lease_s, self._lapse)

    def _lapse(self) -> None:
        LOG.warning("nobody has resumed this server: the lease of its pause is over")
        self.resume()

    def _say_long(self, message: PauseServer) -> None:
        LOG.info(
            "paused for %g s by now (epoch %d, mode %s): it goes on when it is resumed, or %g s after all have stopped",
            *(LONG_S, message.epoch, message.mode, message.lease_s),
        )

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None
