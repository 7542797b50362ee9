import pytest

from ductile.transport.network import (
    NoSuchInterface,
    address_of,
    address_towards,
    interface_of,
    interfaces,
    is_loopback,
)


def test_loopback_is_an_interface():
    assert ("lo", "127.0.0.1") in interfaces()
    assert address_of("lo") == "127.0.0.1"
    assert address_of("127.0.0.3") == "127.0.0.3"
    assert interface_of("127.0.0.3") == "lo"
    assert address_towards("127.0.0.2") == "127.0.0.1"
    assert is_loopback("127.0.0.2")


def test_every_interface_is_found_by_its_address():
    for name, address in interfaces():
        assert interface_of(address) == name
        assert address_of(address) == address


@pytest.mark.parametrize("interface", ["ib77", "203.0.113.9"])
def test_what_is_no_interface_is_said_with_those_that_are_there(interface: str):
    with pytest.raises(NoSuchInterface, match=rf"'{interface}' is no interface of .* it has .*lo \(127\.0\.0\.1\)"):
        address_of(interface)


def test_an_address_that_nobody_has_has_no_interface():
    assert interface_of("203.0.113.9") == ""
