import pytest

from ductile.core.instances.carrier_choice import CarrierChoice, WeightCarrier, choose_carrier

ALL: tuple[WeightCarrier, ...] = ("shared_memory", "point_to_point", "http", "disk")
FAR = "10.0.0.1:29500"


@pytest.mark.parametrize(
    ("host", "carriers", "asked", "rendezvous", "carrier", "reason"),
    [
        ("here", ALL, None, "", "shared_memory", "on the trainer's host"),
        ("here", ALL, "filesystem", "", "disk", "'filesystem'"),
        ("here", ALL, "nccl", "", "point_to_point", "'nccl'"),
        ("there", ALL, "nccl", FAR, "point_to_point", "'nccl'"),
        ("there", ALL, "nccl", "trainer.example:1", "point_to_point", "'nccl'"),
        ("there", ALL, None, FAR, "http", "another host"),
        ("there", ALL, None, "", "http", "another host"),
        ("there", ("point_to_point",), None, FAR, "point_to_point", "no HTTP"),
        ("", ALL, None, "", "http", "another host"),
        ("here", ("http", "point_to_point"), None, "", "point_to_point", "no shared memory"),
        ("there", ("http",), None, FAR, "http", "another host"),
        ("there", ("disk",), None, FAR, "disk", "only disk"),
    ],
)
def test_the_fastest_way_that_both_have_or_the_one_that_is_asked_for(
    host: str, carriers: tuple[WeightCarrier, ...], asked: str | None, rendezvous: str, carrier: str, reason: str
) -> None:
    choice = choose_carrier("here", host, carriers, asked, rendezvous)
    assert choice.carrier == carrier
    assert reason in choice.reason


@pytest.mark.parametrize("only", ["http", "disk", "point_to_point"])
def test_where_one_is_left_it_goes_before_the_one_that_is_asked_for(only: WeightCarrier) -> None:
    choice = choose_carrier("here", "there", ALL, "filesystem", FAR, only)
    assert choice == CarrierChoice(only, f"inference.join_transport is {only!r}")


@pytest.mark.parametrize(
    ("carriers", "only", "error"),
    [
        (("http",), "disk", "inference.join_transport = 'disk' asks for disk, and the server takes http: leave"),
        (ALL, "shared_memory", "asks for shared_memory, and a server on another host shares none with it"),
        (ALL, "point_to_point", "does not reach the trainer at loopback"),
    ],
)
def test_a_way_of_joining_that_cannot_be_is_refused(
    carriers: tuple[WeightCarrier, ...], only: WeightCarrier, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        choose_carrier("here", "there", carriers, only=only)


@pytest.mark.parametrize(
    ("carriers", "asked", "rendezvous", "error"),
    [
        (ALL, "nixl", "", "'nixl' is not there: write 'filesystem' or 'nccl'"),
        (("http",), "nccl", FAR, "asks for point_to_point, and the server takes http"),
        (ALL, "nccl", "127.0.0.1:1", "does not reach the trainer at 127.0.0.1: set trainer.weight_broadcast.host to"),
        ((), None, "", "takes weights by nothing"),
    ],
)
def test_what_cannot_be_is_refused(
    carriers: tuple[WeightCarrier, ...], asked: str | None, rendezvous: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        choose_carrier("here", "there", carriers, asked, rendezvous)
