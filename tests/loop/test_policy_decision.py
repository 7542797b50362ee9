"""Policies that do what none should: each is a sentence, and none a traceback."""

import pytest

from ductile.core.cluster.orders import Decision, Migration, RoleChange
from ductile.core.cluster.policies.rules import Home
from ductile.core.cluster.policies.static import Static
from ductile.loop.policy_decision import BadDecision, ask
from tests.core.cluster.scenes import scene
from tests.loop.test_controller import one_event, run_controller

G, T = ("generate",), ("train",)


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def decide(self, state):
        return self.answer


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
    (Answers(None), "it answered with None, and not with a Decision: does a branch of `decide` lack its `return`?"),
    (Answers([]), "it answered with a list, and not with a Decision: write `return Decision(orders, reason)`"),
    (Answers(Decision), "it answered with a type, and not with a Decision"),
    (Answers(Decision([RoleChange(2, G, T)])), "orders must be a tuple"),  # pyright: ignore[reportArgumentType]
    (Answers(Decision(None)), "orders must be a tuple"),  # pyright: ignore[reportArgumentType]
    (Answers(Decision((2,))), "it answered with the order 2: write RoleChange(slot, before, after)"),
    (
        Answers(Decision((RoleChange(2, G, "train"),))),
        "the order RoleChange(slot=2, before=('generate',), after='train')",
    ),
    (
        Answers(Decision((RoleChange(2, G, ("trainer",)),))),
        "after=('trainer',)): write RoleChange(slot, before, after)",
    ),
    (
        Answers(Decision((RoleChange(2, G, ([],)),))),
        "its orders cannot be read, TypeError: unhashable type: 'list': write",
    ),
    (
        Answers(Decision((RoleChange([], G, T),))),
        "its orders cannot be read, TypeError: unhashable type: 'list': write",
    ),
    (Answers(Decision((Migration("no such", 2, 3),))), "at 100.0 s it gave orders that cannot be carried out: rollout"),
    (Answers(Decision((RoleChange(9, G, T),))), "it gave orders that cannot be carried out: there is no slot 9"),
    (Answers(Decision(reason=None)), "reason and topic texts"),  # pyright: ignore[reportArgumentType]
    (Answers(Decision(topic=3)), "reason and topic texts"),  # pyright: ignore[reportArgumentType]
    (Answers(Decision(prediction=1.0)), "prediction a Prediction or None"),  # pyright: ignore[reportArgumentType]
    (Fails(), "it failed with AttributeError: 'BatchProgress' object has no attribute 'left_to_start' ("),
    (Deaf(), "it failed with TypeError: Deaf.decide() takes 1 positional argument but 2 were given"),
    (Later(), "it answered with a coroutine, and not with a Decision"),
]


@pytest.mark.parametrize(("policy", "said"), BAD)
def test_whatever_a_policy_does_is_a_sentence(policy, said):
    with pytest.raises(BadDecision) as error:
        ask(policy, scene())
    assert said in str(error.value)


def test_a_failure_names_the_line_of_the_policy():
    line = Fails.decide.__code__.co_firstlineno + 1
    with pytest.raises(BadDecision, match=rf"\(test_policy_decision\.py:{line}\)$"):
        ask(Fails(), scene())


def test_a_good_answer_is_returned():
    assert ask(Static(), scene())[0] == Decision()


@pytest.mark.parametrize("policy", [policy for policy, _ in BAD], ids=[said[:40] for _, said in BAD])
def test_the_run_goes_on_with_the_slots_where_they_were_configured(tmp_path, policy):
    stage, errors, events = run_controller(tmp_path, scene(), policy, one_event, otherwise=Home())
    assert errors == []
    (refused,) = [event for event in events if event["kind"] == "refused"]
    assert refused["sentence"].startswith("The policy is not asked any more, and the slots go back to")
    assert "Traceback" in refused["traceback"]
    assert stage.formation.members == (0, 1)
