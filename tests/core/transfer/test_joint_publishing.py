"""What all slots do after each has written, or not, its part of a version."""

import pytest

from ductile.core.transfer.joint_publishing import PartOutcome, PublishingRuling, ruling

WRITTEN, OUT_OF_REACH, FAILED = PartOutcome.WRITTEN, PartOutcome.OUT_OF_REACH, PartOutcome.FAILED


@pytest.mark.parametrize(
    ("outcomes", "missing_bytes", "ruled"),
    [
        ((WRITTEN, WRITTEN, WRITTEN), 0, PublishingRuling("seal")),
        (
            (WRITTEN, OUT_OF_REACH, WRITTEN),
            64,
            PublishingRuling("gather", "slot 5 cannot open the memory of the first slot"),
        ),
        (
            (WRITTEN, OUT_OF_REACH, OUT_OF_REACH),
            64,
            PublishingRuling("gather", "slots 5, 2 cannot open the memory of the first slot"),
        ),
        (
            (FAILED, OUT_OF_REACH, WRITTEN),
            64,
            PublishingRuling("fail", "slot 3 could not write a part of the weights"),
        ),
        (
            (WRITTEN, WRITTEN, WRITTEN),
            -8,
            PublishingRuling("fail", "the slots' parts and the version differ by -8 bytes"),
        ),
    ],
)
def test_ruling(outcomes: tuple[PartOutcome, ...], missing_bytes: int, ruled: PublishingRuling) -> None:
    assert ruling(dict(zip((3, 5, 2), outcomes, strict=True)), missing_bytes) == ruled
