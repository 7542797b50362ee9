"""What is no state is refused by name, and not taken for an empty one."""

import pytest

from ductile.core.transfer.cells import NotReshardable
from ductile.resharding.inventory import Inventory


@pytest.mark.parametrize("state", ["x", b"x", 3, ["x"]])
def test_a_text_or_a_number_is_no_state(state: object) -> None:
    with pytest.raises(NotReshardable, match=r"a state is a module, an optimizer, .* not "):
        Inventory(state)  # pyright: ignore[reportArgumentType]
