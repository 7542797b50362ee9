"""Asks a policy, which may be a user's: whatever it does comes out as a decision that can be carried out, or as a
sentence."""

import inspect
import time

from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.orders import ORDERS, Decision, Policy, malformed, violations
from ductile.error_text import error_text, error_with_place


class BadDecision(Exception):
    """A policy ordered what cannot be, returned something else than a decision, or failed. The text says what."""


class LateDecision(BadDecision):
    """A policy has not decided in time. Unlike what else it does wrong, that cannot be had again by asking it again."""


def decide(policy: Policy, state: ClusterState) -> tuple[Decision, float]:
    """The decision, and the real seconds that it took the policy. Raises BadDecision."""
    began_s = time.perf_counter()
    try:
        decision = policy.decide(state)
    except Exception as error:
        raise BadDecision(f"it failed with {error_with_place(error)}") from error
    took_s = time.perf_counter() - began_s
    if inspect.iscoroutine(decision):
        decision.close()
    try:
        wrong_type = malformed(decision)
        wrong = [] if wrong_type else violations(state, decision)
    except Exception as error:
        raise BadDecision(f"its orders cannot be read, {error_text(error)}: write {ORDERS}") from error
    if wrong_type:
        raise BadDecision(f"it returned {wrong_type}")
    if wrong:
        raise BadDecision(f"at {state.now_s:.1f} s it gave orders that cannot be carried out: {'; '.join(wrong)}")
    return decision, took_s
