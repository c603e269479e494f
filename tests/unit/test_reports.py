"""What `stat` and `status` give to users: values, which the wire only carries."""

from __future__ import annotations

import msgspec
import pytest

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.reports.stat import Found, Listed, Pending
from torchstore_core.reports.status import SessionStatus, StatusReport, VolumeStatus
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, encode

PENDING = Pending(4, 2, ["0"], [], [("w", (5,), (5,))], "k", 5, ["1"])
FOUND = Found(
    "k", 3, TensorMeta("uint8", (10,)), 10, "v-0", 0, 64, 1, 1.5, ClientFacts(7, "h", "host")
)
STATUS = StatusReport(
    "s",
    1,
    2.0,
    3,
    [VolumeStatus("v-0", 1, "h", "host", 4096, 64, 0, 0, 4032, 0, ["shm"])],
    [SessionStatus(7, "host", 0, 1, 2, 128, 1, 64, 5.0)],
    {"Put": 2},
    0.5,
    "singleton",
    {},
    [PENDING],
    1,
    5,
)


@pytest.mark.parametrize(
    "kind", [Found, Listed, Pending, StatusReport, SessionStatus, VolumeStatus]
)
def test_reports_are_values_and_no_messages(kind: type[msgspec.Struct]) -> None:
    assert not issubclass(kind, m.Message)
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.tag is None
    assert kind.__struct_fields__[0] != "id" or kind is VolumeStatus  # no request's


def test_the_wire_carries_them_as_they_are() -> None:
    for reply in (m.StatReply(5, FOUND), m.StatusReply(5, STATUS)):
        assert decode_reply(bytes(encode(reply))[HEADER:]) == reply


def test_they_are_plain_data_by_name() -> None:
    """As JSON they are objects with the names that Python has."""
    for report in (FOUND, STATUS):
        plain = msgspec.json.decode(msgspec.json.encode(report))
        assert list(plain) == list(report.__struct_fields__)
        assert msgspec.convert(plain, type(report)) == report


def test_they_are_printed_for_people() -> None:
    assert str(FOUND).startswith("'k' version 3: uint8 10, 10 B\n  in v-0, 1 lease\n  put ")
    assert str(STATUS).splitlines()[2:] == [
        "volume v-0: 64 B of 4.0 KiB used, 0 B leased, 0 B being written",
        "no keeper: all of this is lost if the server dies",
        "1 unfinished version, 5 B",
        "  version 4 of 'k': not whole yet: 1 of 2 done, 0 writing, nothing from participant "
        "1, boxes missing 1 (the first: w[5]+[5])",
    ]
