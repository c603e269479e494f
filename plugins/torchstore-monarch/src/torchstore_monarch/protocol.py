"""The data that the actors of a store send each other, as opaque msgpack bytes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.errors import (
    StoreClosedError,
    TorchStoreError,
    TransportUnavailableError,
    from_wire,
)
from torchstore_core.plugins.strategy_data import plain_options

log = logging.getLogger(__name__)

T = TypeVar("T")
_ANY_ERROR = TorchStoreError.code


class StoreRequest(msgspec.Struct, frozen=True):
    """A request to start a store; see ``contracts.runtime.StoreOptions``.

    Args:
        token: distinguishes the request from others with the same name.
        members: whether the store ends with its members, see ``server.members``.
        when_full, repair_bandwidth, spill: as in ``StoreOptions``.
        spill_capacity: the most bytes that all volumes spill together, each an equal part.
        keeper: whether the server is started again when it dies.
        root: pid of the program with which the store ends, as the directory has it.
    """

    store_name: str
    num_storage_volumes: int
    strategy: str
    strategy_fields: bytes
    capacity: int | None
    prefault: int | None
    timeout: float
    block: tuple[str, ...]
    token: str = ""
    members: bool = False
    when_full: str | None = None
    repair_bandwidth: int | None = None
    keeper: bool = True
    spill: str | None = None
    spill_capacity: int | None = None
    root: int = 0

    @classmethod
    def of(cls, options: StoreOptions, token: str = "", *, members: bool = False) -> StoreRequest:
        """Convert the options to plain data."""
        fields = {"strategy": "singleton", "strategy_fields": b"{}", **plain_options(options)}
        fields["keeper"] = options.keeper is not False
        return cls(**fields, token=token, members=members)


class FoundStore(msgspec.Struct, frozen=True):
    """Where a store can be reached.

    Args:
        host_id, address: the server's host, and its Unix socket there.
        relays: Unix sockets on other hosts, by host id; all those of a host are equivalent.
        store_id: no other store of the job has or had it.
    """

    store_name: str
    host_id: str
    address: str
    relays: dict[str, list[str]]
    store_id: str


class Led(msgspec.Struct, frozen=True):
    """Which actor leads to a server.

    Args:
        host_id, address: as in :class:`FoundStore`.
        pid: of the actor's process.
        switchboard_pid, server_pid: of the processes that outlive it; the latter is the server's,
            or its keeper's.
    """

    host_id: str
    address: str
    pid: int
    switchboard_pid: int
    server_pid: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The offer of a volume's server halves: which volume it is, of which of the job's stores."""

    store_id: str
    volume_id: str

    @classmethod
    def of(cls, offer: bytes) -> Offer:
        """Decode an offer.

        Raises:
            TransportUnavailableError: it is none.
        """
        try:
            return msgspec.msgpack.decode(offer, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportUnavailableError("that is no offer of a Monarch actor") from error


class VolumePlan(msgspec.Struct, frozen=True):
    """A volume that an agent must start.

    Args:
        capacity: in bytes; None: an equal part of half of the host's memory.
        sharing: the number of volumes that share this half.
        spill: the directory, on this host, or the URL to which the volume spills; None: it does
            not.
        spill_capacity: the most bytes of that; None: an equal part of what is free there.
    """

    index: int
    capacity: int | None
    sharing: int
    spill: str | None = None
    spill_capacity: int | None = None


class Placement(msgspec.Struct, frozen=True):
    """What one agent must start.

    Args:
        control: the Unix socket to attach volumes to; empty: open a relay, and use its socket.
        volumes: the volumes to start here.
        own: whether the agent's process was made for the store, and ends with it.
        store_id: see :class:`FoundStore`.
    """

    store_name: str
    control: str
    volumes: tuple[VolumePlan, ...]
    block: tuple[str, ...]
    timeout: float
    own: bool = False
    store_id: str = ""


class ErrorData(msgspec.Struct, frozen=True):
    """A typed error on its way between processes."""

    code: str
    message: str
    key: str | None = None
    details: dict[str, object] = {}


async def outcome(work: Awaitable[T]) -> tuple[bytes, T | None]:
    """Return an endpoint's result, or its error as bytes, because Monarch would turn the error into
    text. An error of another kind becomes a TorchStoreError with its type and text.
    """
    try:
        return b"", await work
    except Exception as error:  # noqa: BLE001 - passed to the caller
        return encoded_error(error), None


def encoded_error(error: Exception) -> bytes:
    """Encode an error for :func:`result`. Call this where the error has been caught."""
    if isinstance(error, TorchStoreError):
        failed = ErrorData(error.code, error.message, error.key, error.details)
    else:
        if not isinstance(error, OSError):
            log.error("an actor of a store has failed", exc_info=error)
        failed = ErrorData(_ANY_ERROR, f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(failed)


def result(answer: tuple[bytes, T | None]) -> T:
    """Return the result of an endpoint that has returned an :func:`outcome`.

    Raises:
        TorchStoreError: the endpoint has raised it.
    """
    failure, value = answer
    if failure:
        failed = msgspec.msgpack.decode(failure, type=ErrorData)
        raise from_wire(failed.code, failed.message, failed.key, failed.details)
    if value is None:
        raise StoreClosedError("an actor of the store gave no answer")
    return value
