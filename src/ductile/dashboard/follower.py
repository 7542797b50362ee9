"""Turns what a run reports into a `ViewState`: its `RunState`, its metrics, and what its slots do this moment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ductile.core.scheduling.facts.ledger import Activity, SlotLedger
from ductile.dashboard.view import SlotView, ViewEvent, ViewState
from ductile.events.run_state import RunState
from ductile.observe import Listener

NUM_EVENTS = 6


class Follower(Listener):
    """Keeps the view up to date. `state` may be read from another thread."""

    def __init__(self, title: str, max_steps: int, run: RunState, clock: Callable[[], float], began_s: float) -> None:
        """clock: that of the slots' accounts. began_s: Unix time of now."""
        self._run, self._clock = run, clock
        self._began_s, self._began_unix_s = clock(), began_s
        self._state = ViewState(title, max_steps)
        self._slots: dict[int, tuple[tuple[str, ...], SlotLedger]] = {}

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        state = self._state
        self._state = replace(
            state,
            step=step,
            rewards=_longer(state.rewards, metrics, "reward_mean"),
            lengths=_longer(state.lengths, metrics, "length_mean"),
            losses=_longer(state.losses, metrics, "loss"),
            eval_rewards=_longer(state.eval_rewards, metrics, "eval_reward"),
            tokens_per_s_generate=metrics.get("tokens_per_s_generate", state.tokens_per_s_generate),
            tokens_per_s_train=metrics.get("tokens_per_s_train", state.tokens_per_s_train),
            off_policy_mean=metrics.get("off_policy_mean", state.off_policy_mean),
        )

    def on_slot(self, roles: Sequence[str], account: SlotLedger) -> None:
        """What a slot does from now on, and what it has done."""
        self._slots = {**self._slots, account.slot: (tuple(roles), account)}

    @property
    def state(self) -> ViewState:
        now_s = self._clock()
        return replace(
            self._state,
            elapsed_s=now_s - self._began_s,
            events=tuple(
                ViewEvent(max(0.0, event.time_s - self._began_unix_s), event.sentence)
                for event in self._run.sentences[-NUM_EVENTS:]
            ),
            slots=tuple(
                SlotView(slot, roles, account.activity, _busy(account.totals(now_s)))
                for slot, (roles, account) in sorted(self._slots.items())
            ),
            servers=tuple(self._run.servers.items()),
        )


def _longer(values: tuple[float, ...], metrics: Mapping[str, float], name: str) -> tuple[float, ...]:
    return (*values, metrics[name]) if name in metrics else values


def _busy(totals: Mapping[Activity, float]) -> float:
    total_s = sum(totals.values())
    return 1 - totals.get("idle", 0.0) / total_s if total_s > 0 else 0.0
