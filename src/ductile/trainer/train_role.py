"""The train role of one slot: commands in, replies out."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ResizeOrder
from ductile.error_text import error_text
from ductile.fabric.groups import Groups
from ductile.kernels.device import DeviceStopwatch
from ductile.kernels.memory_history import MemoryHistory
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate, LeaveOut, UpdateBegun, UpdateSent
from ductile.messages.resizes import Commit, Finalize, Freeze, Prepare, Rollback, TransferState
from ductile.messages.updates import Offer, WeightUpdate
from ductile.messages.workers import (
    Done,
    ExportModel,
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimStep,
    Park,
    Publish,
    Published,
    SaveState,
    Score,
    Scores,
    StateMoved,
    Stepped,
    Unpark,
    Withdraw,
)
from ductile.parallel.distributed_checkpoint import StateError
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.pipeline import check_schedule
from ductile.records import Manifest
from ductile.roles import Later, RoleAssignment, StateKept
from ductile.trainer import checkpoint
from ductile.trainer.export import FolderNotWritten, export_model
from ductile.trainer.joint_publisher import JointPublisher, NotPublished
from ductile.trainer.outgoing_weights import OutgoingWeights
from ductile.trainer.prepare import TrainerPart
from ductile.trainer.resize import Resize
from ductile.trainer.state import StatePlans
from ductile.trainer.trainer import LossFailed, Trainer, spec_of

WITHOUT_STATE = (Park, Unpark, Prepare, Rollback, Finalize, Withdraw, FinishUpdate, LeaveOut)
"""Commands that are carried out while the state is parked. For every other one it is taken back first."""


class TrainRole:
    """Follows `ductile.roles.SlotRole`. Every command but `Withdraw` goes to all slots that train; they work in step.

    A weight update (`BeginUpdate`) sends this slot's part of the weights beside the commands that come after it. Those
    that would change the weights, or move them, wait for it first.

    Where the slot lends its device to another role, its part is parked in host memory meanwhile
    (`ductile.trainer.parking`). The orchestrator asks for nothing then that needs it; whoever does all the same gets it
    back first, and the other role is to be gone by then.

    A resize (`ductile.trainer.resize`) changes which slots these are. A slot that joins, or has left, holds the role
    without a part of the state.

    When one of them fails in the middle of a collective, it abandons its groups, so that the others get an error
    within milliseconds instead of waiting for the timeout. The role is lost then: release it and assign it anew. A loss
    function that raises leaves it whole.
    """

    def __init__(self, settings: Mapping[str, Any], assignment: RoleAssignment) -> None:
        """`settings` is a dumped `TrainerConfig`. Collective over `assignment.layout`, unless the slot is
        `joining`."""
        self._assignment = assignment
        self._config = TrainerConfig.model_validate(settings)
        check_schedule(self._config.model.pp_schedule)
        self._publisher = JointPublisher()
        # A slot that is through waits for the others in a collective, which must not come to its own deadline.
        self._outgoing = OutgoingWeights(
            assignment.slot,
            self._config.dist_timeout_seconds / 2,
            lambda report: assignment.tell(UpdateSent(report)),
        )
        self._plans = StatePlans(spec_of(self._config), self._config)
        self._resize: Resize | None = None
        self._preparing = Lock()
        """Held where a change begins, in a thread of its own, or is taken back."""
        self._taken_back = -1
        """Epoch of the latest change that was taken back."""
        folder, on_gpu = self._config.memory_profiler_path, assignment.device.startswith("cuda")
        self._memory_history = MemoryHistory(folder, assignment.slot) if folder and on_gpu else None
        self._instance: TrainerPart | None = None
        if not assignment.joining:
            self._instance = TrainerPart(Groups.at(assignment, self._config.dist_timeout_seconds), None)
            with self._in_step() as instance:
                context = ParallelContext(instance.groups, assignment.layout)
                instance.attach(Trainer(self._config, context, assignment.device))

    def handle(self, command: Any) -> Any:
        if not isinstance(command, WITHOUT_STATE):
            self._unpark()
        match command:
            case ForwardBackward(micro_batches=micro_batches):
                watch = DeviceStopwatch(self._assignment.device)
                with self._in_step():
                    num_tokens = self._live.forward_backward(micro_batches)
                watch.stop()
                reply = Later(lambda: ForwardBackwardDone(num_tokens, watch.seconds()))
                return reply if watch.is_pending else reply.wait()
            case OptimStep(loss_denominator=loss_denominator):
                self._outgoing.fence("OptimStep")
                with self._in_step():
                    report = self._live.optim_step(loss_denominator)
                if self._memory_history is not None:
                    self._memory_history.write(report.step)
                return Stepped(report)
            case Publish(version=version, with_frozen=with_frozen):
                with self._keeping_state():
                    return Published(self._publish(version, with_frozen))
            case Score(samples=samples):
                with self._in_step():
                    return Scores(tuple(self._live.score(samples)))
            case Withdraw(version=version):
                self._publisher.withdraw(version)
            case BeginUpdate(update=update):
                with self._keeping_state():
                    return UpdateBegun(self._begin_update(update))
            case FinishUpdate(update_id=update_id, aborted=aborted):
                self._outgoing.finish(update_id, aborted)
            case LeaveOut(update_id=update_id, instance=instance, reason=reason):
                self._outgoing.leave_out(update_id, instance, reason)
            case Park():
                self._outgoing.fence("parking")
                return self._park()
            case Unpark():
                return self._unpark()
            case SaveState(path=path):
                with self._keeping_state():
                    self._save(path)
            case LoadState(path=path):
                self._outgoing.fence("LoadState")
                with self._in_step():
                    checkpoint.load_state(self._live, path)
            case ExportModel(path=path, dtype=dtype, chat_format=chat_format):
                with self._keeping_state(), self._in_step():
                    export_model(self._live, path, dtype, chat_format)
            case Prepare(order=order):
                self._prepare(order)
            case Freeze(epoch=epoch, with_gradient=with_gradient):
                self._outgoing.fence("a resize")
                if self._instance is not None and self._instance.trainer is not None:
                    with self._in_step():  # whatever else this slot has to say of the change: the others sum, too
                        self._live.reduce_gradients()
                return self._change(epoch).freeze(with_gradient)
            case TransferState(epoch=epoch, progress=progress):
                return self._change(epoch).transfer_state(progress)
            case Commit(epoch=epoch):
                self._instance = self._change(epoch).commit()
            case Rollback(epoch=epoch):
                self._roll_back(epoch)
            case Finalize(epoch=epoch):
                self._finalize(self._change(epoch))
            case _:
                raise ValueError(f"a train slot does not know the command {type(command).__name__}")
        return Done()

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        with ExitStack() as ending:  # from the last line to the first, whatever one of them raises
            if self._assignment.device.startswith("cuda"):
                ending.callback(torch.cuda.empty_cache)
            ending.callback(self._leave)
            ending.callback(self._publisher.close)
            ending.callback(self._end_resize)
            ending.callback(self._outgoing.close)
            if self._memory_history is not None:
                ending.callback(self._memory_history.close)

    def _end_resize(self) -> None:
        if self._resize is not None:
            self._roll_back(self._resize.order.epoch)

    def _leave(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.destroy()

    def _park(self) -> StateMoved:
        """A failure leaves the trainer where it was."""
        with self._preparing:
            if self._resize is not None and not self._resize.is_committed:
                raise ValueError(f"change {self._resize.order.epoch} is under way: its slots need the state")
            if self._instance is None:
                raise RuntimeError("this slot has no part of the trainer's state: it is joining, or has left")
            return self._instance.park()

    def _unpark(self) -> StateMoved:
        return StateMoved(0, 0, 0.0) if self._instance is None else self._instance.unpark()

    def _prepare(self, change: ResizeOrder) -> None:
        """The main thread may be in the middle of a micro-step meanwhile."""
        with self._preparing:
            if change.epoch <= self._taken_back:
                raise ValueError(f"change {change.epoch} was taken back before this slot had heard of it")
            if self._resize is not None and self._resize.is_committed:
                self._finalize(self._resize)  # what came before the next resize is not taken back
            if self._instance is not None and self._instance.parked is not None:
                raise ValueError("the state is parked: it is to be taken back before a change begins")
            if self._resize is not None:
                raise ValueError(f"change {self._resize.order.epoch} is neither finalized nor rolled back")
            self._resize = Resize(change, self._assignment, self._config, self._plans, self._instance)
            self._resize.prepare()

    def _finalize(self, resize: Resize) -> None:
        self._instance = resize.finalize()
        self._resize = None

    def _roll_back(self, epoch: int) -> None:
        """A slot that has not heard of the change has nothing to take back."""
        with self._preparing:
            self._taken_back = max(self._taken_back, epoch)
            if self._resize is not None and self._resize.order.epoch == epoch:
                self._instance = self._resize.rollback()
                self._resize = None

    def _change(self, epoch: int) -> Resize:
        if self._resize is None or self._resize.order.epoch != epoch:
            raise ValueError(f"this slot has not prepared change {epoch}")
        return self._resize

    def _save(self, path: str) -> None:
        """A disk that is full ends no group: all slots hear of it in the same place, and none has lost anything."""
        full: StateError | None = None
        with self._in_step():
            try:
                checkpoint.save_state(self._live, path)
            except StateError as error:
                full = error
        if full is not None:
            raise full

    def _begin_update(self, update: WeightUpdate) -> Offer:
        trainer = self._live
        assert self._instance is not None, "it has a trainer"
        return self._outgoing.begin(update, trainer, self._instance.state)

    def _publish(self, version: int, with_frozen: bool) -> Manifest | None:
        with self._in_step() as instance:  # no local here has the trainer: with it the sockets of a failure would stay
            return self._publisher.publish(version, self._live, instance.state, with_frozen)

    @property
    def _live(self) -> Trainer:
        if self._instance is None:
            raise RuntimeError("this slot has no part of the trainer's state: it is joining, or has left")
        if self._instance.trainer is None:
            raise RuntimeError("the train role was lost in an earlier failure; release it and assign it anew")
        return self._instance.trainer

    @contextmanager
    def _in_step(self) -> Iterator[TrainerPart]:
        """Guards what slots do in step: a failure inside ends the groups."""
        instance = self._instance
        if instance is None:
            raise RuntimeError("this slot has no part of the trainer's state: it is joining, or has left")
        try:
            yield instance
        except (LossFailed, FolderNotWritten, NotPublished):
            raise  # all slots are in step, and the trainer is as good as before
        except Exception as error:
            instance.drop()
            instance.groups.abandon(error)
            raise

    @contextmanager
    def _keeping_state(self) -> Iterator[None]:
        """Guards a command that changes no state: a failure outside what slots do in step leaves the trainer whole."""
        try:
            yield
        except Exception as error:
            if self._instance is None or self._instance.trainer is None:
                raise
            raise StateKept(error_text(error)) from error
