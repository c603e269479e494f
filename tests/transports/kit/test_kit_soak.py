"""A gigabyte in one piece, over every transport that needs no engine."""

from __future__ import annotations

import pytest

from torchstore_core.testing import TransportTests

GB = 1 << 30


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    ["shm", "inprocess", "mailbox", "mailbox-apart", "tcp", "rdma", "gloo", "torchcomms"],
)
def test_a_gigabyte_arrives(name: str) -> None:
    class Large(TransportTests):
        large_bytes = GB
        segment_bytes = GB + (64 << 20)

    Large.name = name
    try:
        Large().test_a_large_transfer_arrives()
    finally:
        Large.teardown_class()
