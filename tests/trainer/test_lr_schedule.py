import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.config.schema.trainer import ConstantSchedule, CosineSchedule, LinearSchedule, in_steps
from ductile.trainer.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConstantSchedule(), [8, 8, 8, 8, 8, 8, 8, 8]),
        (ConstantSchedule(warmup_steps=3), [2, 4, 6, 8, 8, 8, 8, 8]),
        (LinearSchedule(warmup_steps=1, decay_steps=4), [4, 8, 8, 8, 8, 6, 4, 2]),
        (LinearSchedule(warmup_steps=0, decay_steps=4, min_lr=4), [8, 8, 8, 8, 8, 7, 6, 5]),
        (LinearSchedule(warmup_steps=0, decay_steps=0), [8, 8, 8, 8, 8, 8, 8, 8]),
        (LinearSchedule(warmup_steps=3, decay_steps=100), [2, 4, 6, 8, 6.4, 4.8, 3.2, 1.6]),
        (LinearSchedule(warmup_steps=3), [2, 4, 6, 8, 6.4, 4.8, 3.2, 1.6]),
        (LinearSchedule(warmup_steps=0.125, decay_steps=0.5), [4, 8, 8, 8, 8, 6, 4, 2]),
        (ConstantSchedule(warmup_steps=0.4), [2, 4, 6, 8, 8, 8, 8, 8]),
        (CosineSchedule(warmup_steps=0, min_lr=0), [8, 7.6955, 6.8284, 5.5307, 4, 2.4693, 1.1716, 0.3045]),
        (CosineSchedule(warmup_steps=4, min_lr=4), [1.6, 3.2, 4.8, 6.4, 8, 7.4142, 6, 4.5858]),
    ],
    ids=lambda value: value.type if hasattr(value, "type") else "",
)
def test_eight_steps(config, expected: list[float]) -> None:
    assert [learning_rate(config, 8.0, step, max_steps=8) for step in range(8)] == pytest.approx(expected, abs=1e-4)


def test_steps_past_the_end_stay_at_the_minimum() -> None:
    assert learning_rate(LinearSchedule(min_lr=1.0), 8.0, 50, max_steps=20) == 1.0
    assert learning_rate(CosineSchedule(min_lr=1.0), 8.0, 50, max_steps=20) == 1.0


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.type = 'linear' needs max_steps"):
        learning_rate(LinearSchedule(warmup_steps=0), 8.0, 0, max_steps=None)


def test_a_share_needs_an_end() -> None:
    with pytest.raises(ValueError, match=r"scheduler\.warmup_steps = 0\.1 needs max_steps"):
        learning_rate(ConstantSchedule(warmup_steps=0.1), 8.0, 0, max_steps=None)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_two_shares_of_a_run_never_take_more_than_it(num_steps: int, share: float) -> None:
    assert in_steps(share, num_steps) + in_steps(1 - share, num_steps) <= num_steps
