"""Policies that do what none should: each is a sentence, and none a traceback."""

import pytest

from ductile.core.scheduling.orders import Decision, Migration, RoleChange
from ductile.core.scheduling.policies.rules import Home
from ductile.core.scheduling.policies.static import Static
from ductile.elastic.policy_decision import BadDecision, decide
from tests.core.scheduling.scenes import id_on, scene
from tests.elastic.test_controller import one_event, run_controller

G, T = ("generate",), ("train",)


class Returns:
    def __init__(self, value):
        self.value = value

    def decide(self, state):
        return self.value


class Fails:
    def decide(self, state):
        return state.batch.left_to_start


class Deaf:
    def decide(self):
        return Decision()


class Later:
    async def decide(self, state):
        return Decision()


BAD = [
    (Returns(None), "it returned None, and not with a Decision: does a branch of `decide` lack its `return`?"),
    (Returns([]), "it returned a list, and not with a Decision: write `return Decision(orders, reason)`"),
    (Returns(Decision), "it returned a type, and not with a Decision"),
    (Returns(Decision([RoleChange(2, G, T)])), "orders must be a tuple"),  # pyright: ignore[reportArgumentType]
    (Returns(Decision(None)), "orders must be a tuple"),  # pyright: ignore[reportArgumentType]
    (Returns(Decision((2,))), "it returned the order 2: write RoleChange(slot, before, after)"),
    (
        Returns(Decision((RoleChange(2, G, "train"),))),
        "the order RoleChange(slot=2, before=('generate',), after='train')",
    ),
    (
        Returns(Decision((RoleChange(2, G, ("trainer",)),))),
        "after=('trainer',)): write RoleChange(slot, before, after)",
    ),
    (
        Returns(Decision((RoleChange(2, G, ([],)),))),
        "its orders cannot be read, TypeError: unhashable type: 'list': write",
    ),
    (
        Returns(Decision((RoleChange([], G, T),))),
        "its orders cannot be read, TypeError: unhashable type: 'list': write",
    ),
    (
        Returns(Decision((Migration("no such", id_on(2), id_on(3)),))),
        "at 100.0 s it gave orders that cannot be carried out: rollout",
    ),
    (Returns(Decision((RoleChange(9, G, T),))), "it gave orders that cannot be carried out: there is no slot 9"),
    (Returns(Decision(reason=None)), "reason and topic texts"),  # pyright: ignore[reportArgumentType]
    (Returns(Decision(topic=3)), "reason and topic texts"),  # pyright: ignore[reportArgumentType]
    (Returns(Decision(prediction=1.0)), "prediction a Prediction or None"),  # pyright: ignore[reportArgumentType]
    (Fails(), "it failed with AttributeError: 'BatchProgress' object has no attribute 'left_to_start' ("),
    (Deaf(), "it failed with TypeError: Deaf.decide() takes 1 positional argument but 2 were given"),
    (Later(), "it returned a coroutine, and not with a Decision"),
]


@pytest.mark.parametrize(("policy", "said"), BAD)
def test_whatever_a_policy_does_is_a_sentence(policy, said):
    with pytest.raises(BadDecision) as error:
        decide(policy, scene())
    assert said in str(error.value)


def test_a_failure_names_the_line_of_the_policy():
    line = Fails.decide.__code__.co_firstlineno + 1
    with pytest.raises(BadDecision, match=rf"\(test_policy_decision\.py:{line}\)$"):
        decide(Fails(), scene())


def test_a_good_decision_is_returned():
    assert decide(Static(), scene())[0] == Decision()


@pytest.mark.parametrize("policy", [policy for policy, _ in BAD], ids=[said[:40] for _, said in BAD])
def test_the_run_goes_on_with_the_slots_where_they_were_configured(tmp_path, policy):
    stage, errors, events = run_controller(tmp_path, scene(), policy, one_event, fallback=Home())
    assert errors == []
    (refused,) = [event for event in events if event["kind"] == "policy_failed"]
    assert refused["sentence"].startswith("The policy is not asked any more, and the slots go back to")
    assert refused["sentence"].endswith("lack its `return`?" if policy is BAD[0][0] else ".")
    assert "Traceback" in refused["traceback"]
    assert stage.layout.slots == (0, 1)
