from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.columns import Floats
from ductile.core.batch.advantage import ADVANTAGES, all_equal, has_advantage, to_samples
from ductile.records import Prompt, Rollout, RolloutGroup


def group_of(rewards: Sequence[float | None], prompt: tuple[int, ...] = (5, 6)) -> RolloutGroup:
    return RolloutGroup(
        Prompt("train/0/1", "task", 1, prompt),
        tuple(Rollout((7, 2), (True, True), (-0.7, -0.1), (3, 3), "stop", reward) for reward in rewards),
    )


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_against_numpy(rewards: list[float]) -> None:
    group = group_of(rewards)
    np.testing.assert_allclose(ADVANTAGES["default"](rewards, group), np.array(rewards) - np.mean(rewards), atol=1e-9)
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=len(rewards) > 1) + 1e-6)
    np.testing.assert_allclose(ADVANTAGES["grpo"](rewards, group), expected, atol=1e-6, rtol=1e-6)


def test_grpo_divides_by_the_unbiased_deviation_as_torch_std_does() -> None:
    assert ADVANTAGES["grpo"]([1.0, 0.0, 0.0, 0.0], group_of([1.0, 0.0, 0.0, 0.0])) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-5
    )


def test_a_sample_is_the_example_of_its_docstring() -> None:
    sample = to_samples(group_of([1.0, 0.0]), temperature=0.7)[0]
    assert sample.token_ids == (5, 6, 7, 2)
    assert sample.loss_mask == (False, False, True, True)
    assert sample.rollout_logprobs == Floats((0.0, 0.0, -0.7, -0.1))
    assert sample.advantages == (0.0, 0.0, 0.5, 0.5)
    assert sample.temperature == 0.7


def test_only_the_policys_own_turns_are_trained() -> None:
    rollout = Rollout(
        token_ids=(1, 2, 3, 4, 5),
        mask=(True, True, False, False, True),
        logprobs=(-1.0, -2.0, 0.0, 0.0, -3.0),
        versions=(0, 0, -1, -1, 1),
        finish_reason="stop",
        reward=1.0,
        num_turns=2,
    )
    other = Rollout((9,), (True,), (-1.0,), (0,), "length", 0.0)
    sample, _ = to_samples(RolloutGroup(Prompt("p", "t", 0, (8,)), (rollout, other)))
    assert sample.loss_mask == (False, True, True, False, False, True)
    assert sample.advantages == (0.0, 0.5, 0.5, 0.0, 0.0, 0.5)


def test_nothing_predicts_the_first_token_of_an_empty_prompt() -> None:
    sample = to_samples(group_of([1.0, 0.0], prompt=()))[0]
    assert sample.loss_mask == (False, True)


def test_greedy_completions_are_trained_at_temperature_one() -> None:
    assert to_samples(group_of([1.0]), temperature=0.0)[0].temperature == 1.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for the 2 rollouts"),
        ([float("nan"), 0.0], "rollout 0 of prompt train/0/1 is nan"),
        ([0.0, 1e39], "rollout 1 of prompt train/0/1 is 1e\\+39; it must be a finite number in fp32"),
    ],
)
def test_a_wrong_custom_function_is_told_so(returned: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_samples(group_of([1.0, 0.0]), lambda rewards, group: returned)


def test_all_equal() -> None:
    assert all_equal([0.5, 0.5])
    assert not all_equal([0.5, 0.4])


@pytest.mark.parametrize("name", ADVANTAGES)
@given(reward=st.floats(-10, 10), size=st.integers(1, 9))
def test_equal_rewards_teach_nothing(name: str, reward: float, size: int) -> None:
    assert not has_advantage(to_samples(group_of([reward] * size), ADVANTAGES[name]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_rollout_that_could_not_be_scored_changes_nothing_for_its_siblings(name: str) -> None:
    """With penalties as rewards a 0 for a failed one would be the best completion of all."""
    group = group_of([-1.0, None, -1.0, -3.0])
    assert to_samples(group, ADVANTAGES[name]) == to_samples(group_of([-1.0, -1.0, -3.0]), ADVANTAGES[name])
    assert not has_advantage(to_samples(group_of([-1.0, -1.0, -1.0, None]), ADVANTAGES[name]))
    assert to_samples(group_of([None, None]), ADVANTAGES[name]) == []


def test_a_custom_advantage_is_asked_for_scored_rollouts_only() -> None:
    asked = []
    to_samples(group_of([0.5, None]), lambda rewards, group: asked.append((rewards, len(group.rollouts))) or [1.0])
    to_samples(group_of([None]), lambda rewards, group: pytest.fail("there is nothing to compare"))
    assert asked == [([0.5], 1)]


def test_a_custom_advantage_teaches_where_rewards_are_equal() -> None:
    assert has_advantage(to_samples(group_of([0.5]), lambda rewards, group: rewards))
    assert not has_advantage(to_samples(group_of([0.5, 0.4]), lambda rewards, group: [0.0] * len(rewards)))
