"""The trainer behind its Protocol: every command goes to all slots of its layout, one command at a time.

Samples go out in micro-steps. The next one is sent shortly before the one that runs is expected to end: so no slot
waits for the orchestrator, and no change for more than the one that runs. While a change is under way none is sent
ahead. A micro-step is one micro-batch a data-parallel rank, or with pp about as many as fill the pipeline
(`ductile.core.layout.geometry.pipeline_schedule`). Between two of them the trainer may change its layout
(`ductile.elastic.transaction`): what has not gone out by then is packed anew, for the ranks that there are then. All
other commands come between two, too.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from ductile.columns import Floats
from ductile.concurrency.background import finish
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.structured import Pause
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.fleet.trainer.micro_steps import IN_FLIGHT, MicroStep, MicroSteps, PendingSamples, in_steps
from ductile.fleet.trainer.published_versions import PublishedVersions, VersionReceivers
from ductile.fleet.trainer.sending import Sending
from ductile.fleet.trainer.state_parking import StateParking
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate, LeaveOut, UpdateBegun
from ductile.messages.updates import Offer, SendReport, WeightCarrier, WeightUpdate
from ductile.messages.workers import (
    Command,
    Done,
    ExportModel,
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimStep,
    Publish,
    Published,
    SaveState,
    Score,
    Scores,
    StateMoved,
    Stepped,
)
from ductile.records import AS_IN_SOURCE, ChatFormat, Manifest, Sample, StepReport
from ductile.roles import Failure, Late, Refused, SlotLost, StateKept, TrainerLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import R, ask_each
from ductile.transport.mailbox import Died, Mailbox, SlotEvent


class RemoteTrainer:
    """Follows `ductile.roles.TrainerClient` and `ductile.fleet.updates.update_parties.Senders`."""

    carrier: WeightCarrier | None = None

    def __init__(
        self,
        mailbox: Mailbox,
        layout: ParallelLayout,
        deadlines: Deadlines,
        chat_format: ChatFormat = AS_IN_SOURCE,
        receivers: VersionReceivers = "slots",
    ) -> None:
        """chat_format: of the models that are exported. receivers: who gets the versions that are published."""
        self.layout = layout
        """Slots that train."""
        self.epoch = 0
        """Membership epoch of the change that made `layout`, set with it; 0 for the one that the run began with."""
        self.with_gradient = False
        """A gradient has been accumulated since the last optimizer step."""
        self._sending: Sending | None = None
        """Weight update that is not finished yet."""
        self._mailbox, self._deadlines, self._chat_format = mailbox, deadlines, chat_format
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        """Changes and commands that wait for the next boundary."""
        self._num_expecting = 0
        """Changes under way whose messages should not wait for long (`expecting_change`)."""
        self.parking = StateParking(lambda command: self._all(command, StateMoved), float(deadlines.patience_s))
        """Place of the state: all that needs it waits while it is parked."""
        self._kept_parked: int | None = None
        """Version that is kept published because the state is parked."""
        self.pause = Pause()
        """No micro-step begins while the scheduling policy holds training; those in flight end."""
        self._given: list[PendingSamples] = []
        self._micro_steps = MicroSteps(self._send, self._most_in_flight, deadlines.command_s)
        self.on_micro_step = self._micro_steps.on_done
        self._changed = ChangeSignal()
        self._versions = PublishedVersions(mailbox, receivers, self._publish, self._changed)
        self._end: TrainerLost | None = None
        mailbox.subscribe(self._on_event)

    @property
    def version(self) -> int | None:
        """Published version that the weights still are; None before the first, and once the weights have changed."""
        return self._versions.current

    @property
    def is_held(self) -> bool:
        return self.pause.begun.is_set()

    @property
    def num_ranks(self) -> int:
        return self.layout.num_data_parallel

    @property
    def micro_batches_per_rank(self) -> int:
        return PipelineShape.of(self.layout).full_message

    @property
    def pending_samples(self) -> int:
        """Samples that were given to `forward_backward` and are not done yet."""
        return sum(given.num_samples for given in self._given)

    @property
    def pending_tokens(self) -> int:
        """Tokens of the samples that `pending_samples` counts."""
        return sum(given.num_tokens for given in self._given)

    def go_on_in(self, layout: ParallelLayout, epoch: int) -> None:
        """Have the trainer go on in another layout; called within `boundary`."""
        self.layout, self.epoch = layout, epoch
        self._micro_steps.forget()

    def hold_training(self, held: bool) -> None:
        """Hold training, or let it go on."""
        self.pause.set(held)
        self._changed.notify_all()

    async def forward_backward(self, samples: Sequence[Sample], seq_len: int) -> None:
        """Accumulate the samples' gradient, in micro-steps. Raises Late when training is held for too long."""
        packed_for: ParallelLayout | None = None
        left: Sequence[Sample] = samples
        steps: deque[MicroStep] = deque()
        given = PendingSamples(len(samples), sum(map(len, samples)))
        self._given.append(given)
        try:
            while packed_for is None or steps:
                await self._until_not_held(given)
                # A change that waits for a boundary and is cancelled counts in `_num_waiting` until its task has run.
                # `MicroSteps.run` returns at once till then, and a free lock does not suspend: without this line, the
                # loop here would keep that task from ever running.
                await asyncio.sleep(0)
                async with self._turn:
                    self.check()
                    if self.parking.is_parked:
                        continue
                    if packed_for != self.layout:
                        packed_for, pipeline = self.layout, PipelineShape.of(self.layout)
                        packed = pack(left, self.num_ranks, seq_len, pipeline=pipeline)
                        steps = deque(in_steps(packed, pipeline.messages(len(packed[0]))))
                    await self._micro_steps.run(steps, given)
                batches = [micro_batch for step in steps for of_rank in step for micro_batch in of_rank]
                left = [sample for micro_batch in batches for sample in micro_batch.samples]
        finally:
            self._given.remove(given)

    async def optim_step(self, loss_denominator: float) -> StepReport:
        """Waits until servers have the version that is published: it may have to be sent to them again."""
        if loss_denominator:
            await self._until_received()
        async with self.boundary(moves_weights=True):
            if loss_denominator:
                self._versions.end_current()
            replies = await self._all(OptimStep(loss_denominator), Stepped)
            self.with_gradient = False
            return replies[self.layout.first].report

    async def publish(self, version: int) -> Manifest:
        """Make a version available to the run's slots: what is trained of it, where they have the rest. Servers get it
        by `begin_update`, and need no snapshot."""
        async with self.boundary():
            return await self._versions.publish(version)

    async def begin_update(self, update: WeightUpdate) -> list[Offer]:
        """Have the ranks send the weights, which are the update's version, beside training; what would change them
        waits for that. Raises Refused when they are not, or a rank cannot; then no rank sends."""
        async with self.boundary():
            if not self._versions.are(update.version) and update.version <= self._versions.newest:
                raise Refused(f"the trainer has gone on from version {update.version}, and cannot send it")
            self._versions.weights_are(update.version)
            if self._sending is not None:
                self._sending.end()  # each rank ends what it still has of it
            self._sending = Sending(self._mailbox, update, self.layout.slots)
            try:
                begun = await self._all(BeginUpdate(update), UpdateBegun)
            except BaseException:
                with suppress(Failure):
                    await finish(self.finish_update(update.update_id, aborted=True))
                raise
            return [begun[slot].offer for slot in self.layout.slots]

    async def sent(self, update_id: str) -> list[SendReport]:
        """Return each rank's report, once all are through, also if some failed. Raises a Failure."""
        if self._sending is None or self._sending.update.update_id != update_id:
            raise Refused(f"no weight update {update_id} is under way at the trainer")
        return await self._sending.reports()

    async def leave_out(self, update_id: str, instance: str, reason: str) -> None:
        """Have no rank wait for a server which is out of an update. Nothing happens where it is not under way. Raises
        Refused or Late for a rank that lives and cannot."""
        command = LeaveOut(update_id, instance, reason)
        if self._sending is not None and self._sending.update.update_id == update_id:
            await self._sending.tell(command, self.layout.slots, self._deadlines.command_s)

    async def finish_update(self, update_id: str, aborted: bool) -> None:
        """Have the ranks free what they hold for an update, if it is under way, and stop sending where it is aborted;
        one that has left the trainer has done so. Raises Refused or Late, and it is over all the same."""
        sending = self._sending
        if sending is None or sending.update.update_id != update_id:
            return
        try:
            await sending.tell(FinishUpdate(update_id, aborted), self.layout.slots, self._deadlines.command_s)
        finally:
            sending.end()
            self._sending = None if self._sending is sending else self._sending

    async def score(self, samples: Sequence[Sample], version: int) -> Sequence[Floats] | None:
        """Return log-probs of a few samples under a published version, one column each, between two micro-steps. None
        once the weights are another version, while they are parked, or where stages of a pipeline have them, which
        cannot score. Raises Late, SlotLost or Refused."""
        if not self._versions.are(version) or self.layout.dims.pp > 1 or self.parking.is_parked:
            return None
        async with self.boundary():
            if not self._versions.are(version):
                return None
            replies = await self._all(Score(tuple(samples), "policy", role="train"), Scores)
            return replies[self.layout.first].logprobs

    def can_offer(self, version: int) -> bool:
        """Return whether the weights still are this version, or it is still published."""
        return (self._versions.are(version) and not self.parking.is_parked) or self._versions.has_whole(version)

    async def offer(self, version: int) -> Manifest:
        """Publish all of a version, for slots that join. Raises Refused when training has gone on from this
        version."""
        if manifest := self._versions.use_whole(version):
            return manifest
        self.parking.refuse()
        self._versions.check_current(
            version
        )  # before the turn, which may be long in coming: a change has it, and waits for this joiner
        async with self.boundary():
            self._versions.check_current(version)
            return await self._versions.keep(version)

    def want_whole(self) -> None:
        """Publish the next version with what training does not change: somebody waits for it who has none."""
        self._versions.want_whole()

    async def publish_again(self, version: int) -> Manifest | None:
        """Publish the weights as they are now under the number of the live version, which no slot has any more. None
        when a later version is on its way. Raises Refused while they are parked."""
        if not self._versions.is_newest(version):
            return None
        self.parking.refuse()
        async with self.boundary():
            if not self._versions.is_newest(version):
                return None
            self._versions.weights_are(version)
            return await self._versions.keep(version)

    async def park(self, version: int, keeps_weights: bool) -> None:
        """Have the ranks move the state to host memory, once `version` is published. What needs it waits from then on.
        Raises the Failure of a rank that cannot; then all have it as before.

        keeps_weights: keep the weights published meanwhile, for slots that join: nobody else has them.
        """
        while self._versions.newest < version:
            self.check()
            await self._changed.wait()
        async with self.boundary(moves_weights=True):
            kept = self.version if keeps_weights else None
            if kept is not None:
                await self._versions.keep(kept)
            self._kept_parked = kept
            await self.parking.park()

    async def unpark(self) -> None:
        """Have the ranks take it back to their devices, which nobody else uses any more. Nothing happens where it is
        there. Raises a Failure: there is no trainer that could go on then."""
        if self.parking.is_parked:
            async with self._turn:
                self.check()
                await self.parking.unpark()
            self._changed.notify_all()
        if self._kept_parked is not None:
            kept, self._kept_parked = self._kept_parked, None
            await self.withdraw(kept)

    async def withdraw(self, version: int) -> None:
        async with self.boundary(needs_state=False):
            await self._versions.withdraw(version, self.layout.slots, self._deadlines.command_s)

    async def save(self, path: str) -> None:
        async with self.boundary():
            await self._all(SaveState(path), Done)

    async def load(self, path: str) -> None:
        async with self.boundary(moves_weights=True):
            self._versions.end_current()
            await self._all(LoadState(path), Done)
            self.with_gradient = False

    async def export(self, path: str, dtype: str) -> None:
        async with self.boundary():
            await self._all(ExportModel(path, dtype, self._chat_format), Done)

    @asynccontextmanager
    async def boundary(self, moves_weights: bool = False, needs_state: bool = True) -> AsyncGenerator[None]:
        """Hold the trainer between two micro-steps, with none in flight: it gets no other command meanwhile. Raises
        TrainerLost where there is no trainer any more.

        moves_weights: no rank sends its weights then, either; training goes on until they have been sent.
        needs_state: the state is on the devices. Raises Late where these are lent and do not come back.
        """
        while True:
            if needs_state:
                await self.parking.until_back(self._check_alive)
            if moves_weights and self._sending is not None:
                await self._sending.end_of_reading()
            self._num_waiting += 1
            try:
                await self._turn.acquire()
            finally:
                self._num_waiting -= 1
            is_sending = moves_weights and self._sending is not None and self._sending.is_under_way
            if not is_sending and not (needs_state and self.parking.is_parked):
                break
            self._turn.release()
        try:
            self.check()
            yield
        finally:
            self._turn.release()

    @contextmanager
    def keeping(self, version: int) -> Generator[None]:
        """Begin no optimizer step meanwhile, as others are sent the weights. Raises Refused once training has gone
        on."""
        with self._versions.sending(version):
            yield

    @contextmanager
    def expecting_change(self) -> Generator[None]:
        """Have no micro-step wait in the slots meanwhile: the next boundary is where the one that runs ends."""
        self._num_expecting += 1
        try:
            yield
        finally:
            self._num_expecting -= 1

    def lose(self, error: TrainerLost) -> None:
        """Give the trainer up: every later call raises `error`."""
        self._end = error
        if self._sending is not None:
            self._sending.end(error)
        self.parking.look_again()
        self._changed.notify_all()

    @property
    def publishers(self) -> frozenset[int]:
        """Slots that keep a snapshot which is not withdrawn yet. One that has left the trainer may be among them."""
        return self._versions.slots

    def needs(self, slot: int) -> bool:
        """Return whether a part of the state, or a version that others fetch, would be lost with the slot."""
        return slot in self.layout.slots or slot in self.publishers

    async def has_withdrawn(self, slot: int, deadline_s: float) -> None:
        """Returns when no version is left that `slot` keeps for others, or at the deadline."""
        with suppress(TimeoutError):
            await self._changed.wait_for(lambda: slot not in self.publishers, deadline_s)

    def _check_alive(self) -> None:
        """Raises TrainerLost where there is no trainer any more, and SlotLost where a slot of it is lost."""
        self.check()
        for slot in self.layout.slots:
            if slot in self._mailbox.lost:
                raise SlotLost(self._mailbox.lost[slot], slot)

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, Died):
            self.parking.look_again()

    def check(self) -> None:
        """Raise TrainerLost where there is no trainer any more."""
        if self._end is not None:
            raise self._end

    async def _until_received(self) -> None:
        """Wait until nobody is sent the weights any more. Updates of servers have deadlines of their own: past them,
        training goes on all the same."""

        with suppress(TimeoutError):
            await self._changed.wait_for(
                lambda: self._versions.may_change or self._end is not None, self._deadlines.patience_s
            )

    async def _until_not_held(self, given: PendingSamples) -> None:
        def may_go_on() -> bool:
            return not (self.is_held or self.parking.is_parked) or self._end is not None

        try:
            await self._changed.wait_for(may_go_on, self._deadlines.patience_s)
        except TimeoutError:
            raise Late(
                f"the scheduling policy held training back for {said(self._deadlines.patience_s)}, with "
                f"{given.num_samples} samples waiting"
            ) from None

    async def _publish(self, version: int, whole: bool) -> tuple[Manifest | None, int]:
        """Have the ranks publish a version; returns its manifest, and the slot that has the snapshot."""
        first = self.layout.first
        return (await self._all(Publish(version, with_frozen=whole), Published))[first].manifest, first

    def _most_in_flight(self) -> int:
        return 0 if self._num_waiting or self.is_held else 1 if self._num_expecting else IN_FLIGHT

    def _send(self, step: MicroStep, deadline_s: float) -> Coroutine[Any, Any, Mapping[int, ForwardBackwardDone]]:
        self.with_gradient = True
        commands = self.layout.deal([ForwardBackward(of_rank) for of_rank in step])
        return self._ask(commands, ForwardBackwardDone, deadline_s)

    async def _all(self, command: Command, expected: type[R]) -> Mapping[int, R]:
        return await self._ask(dict.fromkeys(self.layout.slots, command), expected)

    async def _ask(
        self, commands: Mapping[int, Command], expected: type[R], deadline_s: float | None = None
    ) -> Mapping[int, R]:
        """Ask each slot its command. deadline_s: that of a command where None; longer for one that waits for others."""
        deadline_s = deadline_s or self._deadlines.command_s
        try:
            try:
                return await ask_each(self._mailbox, commands, deadline_s, expected)
            except StateKept:  # what was in the way, such as a file system, may be well again
                return await ask_each(self._mailbox, commands, deadline_s, expected)
        except Late as error:  # whatever else is asked, saving too, would wait behind this as long again
            self.lose(TrainerLost(str(error)))
            raise
