"""Of several failures of a fan-out the one is raised that explains the others."""

from itertools import permutations

import pytest

from ductile.roles import Failure, Late, NotTaken, OutOfMemory, Refused, SlotLost, StaleEpoch, StateKept
from ductile.transport.fanout import raise_worst


@pytest.mark.parametrize(
    ("worst", "others"),
    [
        (SlotLost, (OutOfMemory, Refused, Late)),
        (OutOfMemory, (Refused, Refused, Late)),
        (OutOfMemory, (StaleEpoch, StateKept)),
        (Refused, (NotTaken, StateKept, Late)),
        (NotTaken, (Late, Late)),
        (StateKept, (Late, Late)),
    ],
)
def test_the_failure_that_explains_the_others_is_raised(worst: type[Failure], others: tuple[type[Failure], ...]):
    for order in permutations((worst, *others)):
        failures = {slot: kind(f"slot {slot}") for slot, kind in enumerate(order)}
        with pytest.raises(Failure) as raised:
            raise_worst(failures)
        assert type(raised.value) is worst
        told = {str(failure) for failure in failures.values() if failure is not raised.value}
        assert set(raised.value.__notes__) == told
