"""The way that a server's weights come: negotiated for each server, and said with its reason."""

import ipaddress
from collections.abc import Sequence
from typing import Literal

import msgspec

WeightCarrier = Literal["shared_memory", "point_to_point", "http", "disk"]
"""Way that a bucket's bytes take: a segment that both processes map; a connection from
server to rank; the body of a POST to the server; a file in a folder that both see."""

ASKED: dict[str, WeightCarrier] = {"filesystem": "disk", "nccl": "point_to_point"}
"""The carrier by `trainer.weight_broadcast.type`."""


class CarrierChoice(msgspec.Struct, frozen=True):
    carrier: WeightCarrier
    reason: str
    """Reason for it, as a clause: "it is on the trainer's host"."""


def choose_carrier(
    trainer_host: str,
    host: str,
    carriers: Sequence[WeightCarrier],
    asked: str | None = None,
    rendezvous: str = "",
    only: WeightCarrier | None = None,
) -> CarrierChoice:
    """Return the carrier for one server. Raises ValueError, with what to write instead, where the one that is asked for
    cannot be.

    trainer_host, host: identities of the trainer's machine and the server's (boot ids); "" is none. carriers: those
    that the server takes. asked: `trainer.weight_broadcast.type`, where the user has set it. rendezvous: host:port at
    which ranks are found; servers of other hosts reach one that is not on loopback. only: the carrier for a
    server that joins, where `inference.join_transport` or the one who has the weights leaves no choice.
    """
    same_host = bool(trainer_host) and host == trainer_host
    reachable = same_host or not _is_loopback(rendezvous)
    if only is not None or asked is not None:
        if only is None and asked not in ASKED:
            known = " or ".join(repr(each) for each in ASKED)
            raise ValueError(f"trainer.weight_broadcast.type = {asked!r} is not there: write {known}, or leave it out")
        carrier = only or ASKED[asked or ""]
        key = f"inference.join_transport = {only!r}" if only else f"trainer.weight_broadcast.type = {asked!r}"
        if carrier not in carriers:
            takes = ", ".join(carriers)
            raise ValueError(f"{key} asks for {carrier}, and the server takes {takes}: leave the key out")
        if (carrier == "point_to_point" and not reachable) or (carrier == "shared_memory" and not same_host):
            why, instead = "shares none with it", "leave the key out"
            if carrier == "point_to_point":
                why = f"does not reach the trainer at {rendezvous.rpartition(':')[0] or 'loopback'}"
                instead = "set trainer.weight_broadcast.host to the trainer's address, or leave the key out"
            raise ValueError(f"{key} asks for {carrier}, and a server on another host {why}: {instead}")
        return CarrierChoice(carrier, f"{key.replace(' =', ' is')}")
    if same_host and "shared_memory" in carriers:
        return CarrierChoice("shared_memory", "it is on the trainer's host")
    where = "it is on the trainer's host and takes no shared memory" if same_host else "it is on another host"
    if same_host and "point_to_point" in carriers:
        return CarrierChoice("point_to_point", where)
    if (
        "http" in carriers
    ):  # from host to host connections to the ranks send no faster, and need the ranks to be reached
        return CarrierChoice("http", where)
    if reachable and "point_to_point" in carriers:
        return CarrierChoice("point_to_point", f"{where} and takes no HTTP")
    if "disk" in carriers:
        return CarrierChoice("disk", f"it takes only {', '.join(carriers)}")
    raise ValueError(f"the server takes weights by {', '.join(carriers) or 'nothing'}, which is not there")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not host or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name
