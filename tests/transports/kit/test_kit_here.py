"""The public conformance kit for transports, on those of this repository that need no engine."""

from __future__ import annotations

import pytest

from torchstore_core.testing import TransportTests


class TestShm(TransportTests):
    """Windows and mappings; no handshakes."""

    name = "shm"


class TestInline(TransportTests):
    """In-band: it has no halves."""

    name = "inline"


class TestInProcess(TransportTests):
    """Its halves meet in one process; no built-in runtime starts such a volume."""

    name = "inprocess"


class TestMailbox(TransportTests):
    """Every byte in a handshake; two-sided."""

    name = "mailbox"
    light_halves = True
    large_bytes = 16 << 20  # each byte is copied seven times on its way


@pytest.mark.soak  # of those that are for users, the kit runs on gloo's isolated half
class TestMailboxApart(TransportTests):
    """The same, with an isolated server half."""

    name = "mailbox-apart"
    light_halves = True
    large_bytes = 16 << 20
