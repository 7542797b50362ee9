"""Control of a server by its fleet: which process it is, which weights it has and gets, and who may pause it."""

import asyncio
import secrets
import time
from contextlib import ExitStack

from ductile.fabric.process import host
from ductile.generator.engine.limits import Overloaded
from ductile.generator.server.pause_gate import PauseGate
from ductile.generator.server.runner import EngineRunner
from ductile.generator.server.update_machine import UpdateMachine
from ductile.generator.server.weight_donor import WeightDonor
from ductile.generator.server.weight_receiver import WeightReceiver
from ductile.messages.updates import LiveDigest, PauseServer, ResumeServer, ServerState, model_fingerprint
from ductile.weights.live_weights import LiveWeights, VersionTensors

HEARD_WITHIN_S = 6.0
"""Longest time in which a fleet asks again for the state, as it does every 5 s (`health_check_interval_seconds`)."""


class FleetControl:
    """Made in the loop that serves; `close` at the end."""

    def __init__(self, runner: EngineRunner, live: LiveWeights, stage_weights: bool, model_name: str = "") -> None:
        self.incarnation = secrets.token_hex(8)
        self.is_leaving = False
        self.told_at, self.has_told = float("-inf"), False
        """Time at which the state was last asked for, by `time.monotonic`; and whether it said that it is leaving."""
        self.gate = PauseGate(runner)
        self._runner = runner
        self._live = live
        self._model_name = model_name
        self._model = model_fingerprint(live.current.specs(), runner.engine.config.model.adapters)
        self._machine = UpdateMachine()
        self.receiver = WeightReceiver(runner, live, self._machine, self.gate, not stage_weights)
        self.donor = WeightDonor(live, can_keep=stage_weights)

    def leave(self) -> None:
        """Take no more requests, and say so to those that ask."""
        self.is_leaving = True

    @property
    def is_heard_out(self) -> bool:
        """True where a fleet has heard that it is leaving, or none looks after it, and all its requests have ended."""
        stats = self._runner.engine.stats()
        is_watched = self._machine.epoch > 0 and time.monotonic() - self.told_at < HEARD_WITHIN_S
        return (self.has_told or not is_watched) and not (is_watched and stats.num_running + stats.num_waiting)

    def tell_state(self) -> ServerState:
        """Return the state, for one who asks for it: a fleet that looks after this server."""
        self.told_at, self.has_told = time.monotonic(), self.is_leaving
        return self.state()

    def state(self) -> ServerState:
        engine, last = self._runner.engine, self._machine.last
        stats = engine.stats()
        return ServerState(
            self.incarnation,
            self._model,
            engine.version,
            self._runner.digest,
            self._machine.epoch,
            paused=self.gate.paused,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=engine.config.max_num_seqs,
            max_model_len=engine.limits.max_model_len,
            host=host(),
            serving=not self.gate.torn,
            num_sampled=stats.num_tokens,
            update=last.progress() if last else None,
            model_name=self._model_name,
            leaving=self.is_leaving,
        )

    def refuse_unable(self) -> None:
        """Raise `Overloaded` where the server is leaving, or there are no weights to generate with, and none are on
        their way."""
        if self.is_leaving:
            raise Overloaded("this server is leaving, and takes nothing new")
        last = self._machine.last
        if self.gate.torn and last is not None and not last.under_way:
            raise Overloaded(f"this server has the weights of no version, until it is given some: {last.reason}")

    async def pause(self, message: PauseServer) -> ServerState:
        self._machine.see(message.epoch)
        await self.gate.pause(message)
        return self.state()

    def resume(self, message: ResumeServer) -> ServerState:
        if message.epoch:
            self._machine.see(message.epoch)
        self.gate.resume()
        return self.state()

    async def live_digest(self) -> LiveDigest:
        """Read the weights that are sampled from."""
        with ExitStack() as pin:

            def look() -> VersionTensors:
                held, engine = pin.enter_context(self._live.pinned()), self._runner.engine
                tensors = {name: each.data for name, each in engine.weights()}
                return VersionTensors(engine.version, tensors, held.dtypes)

            found = await self._runner.between_steps(look)
            return await asyncio.to_thread(found.read, self._runner.digest)

    def close(self) -> None:
        self.receiver.close()
        self.donor.close()
