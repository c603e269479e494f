"""What the actors of a store send each other: plain data, as opaque msgpack bytes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    TorchStoreError,
    from_wire,
)
from torchstore_core.plugins.strategy_data import encode_strategy
from torchstore_core.server.remote.relay_server import EXPIRE_S

__all__ = [
    "ErrorData",
    "FoundStore",
    "Placement",
    "StoreRequest",
    "VolumePlan",
    "encoded_error",
    "outcome",
    "result",
]

log = logging.getLogger(__name__)

T = TypeVar("T")
_ANY_ERROR = TorchStoreError.code


class StoreRequest(msgspec.Struct, frozen=True):
    """What ``initialize`` wants; see ``contracts.runtime.StoreOptions``.

    Args:
        token: tells it from other requests of the name.
        members: the store ends with its members, see ``server.members``.
        when_full: as in ``StoreOptions``. Its stores cannot spill yet, but they can evict.
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

    @classmethod
    def of(cls, options: StoreOptions, token: str = "", *, members: bool = False) -> StoreRequest:
        """The same as plain data.

        Raises:
            ConfigurationError: the store is to spill.
        """
        if options.spill is not None:
            raise ConfigurationError(
                "a store of a Monarch job cannot spill yet, because its volumes are in processes "
                'of their own: leave out spill=, or use runtime="local" for a store of one host',
                details={"spill": options.spill},
            )
        name, fields = "singleton", b"{}"
        if options.strategy is not None:
            name, fields = encode_strategy(options.strategy)
        return cls(
            options.store_name,
            options.num_storage_volumes,
            name,
            fields,
            options.capacity,
            options.prefault,
            options.timeout,
            options.block,
            token,
            members,
            options.when_full,
        )


class FoundStore(msgspec.Struct, frozen=True):
    """Where a store can be reached.

    Args:
        host_id, address: of the server's own host, and its Unix socket there.
        relays: Unix sockets on other hosts, by host id; any of a host will do.
    """

    store_name: str
    host_id: str
    address: str
    relays: dict[str, list[str]]


class VolumePlan(msgspec.Struct, frozen=True):
    """One volume that an agent is to start. ``capacity``: bytes; None: its part of half of the
    host's memory, of which there are ``sharing``.
    """

    index: int
    capacity: int | None
    sharing: int


class Placement(msgspec.Struct, frozen=True):
    """What one agent is to do.

    Args:
        control: Unix socket to attach volumes to; empty: open a relay, and use that.
        volumes: to start here.
        own: the agent's process was made for the store, and ends with it.
        expire_s: how long its relay may be silent before it is taken for dead.
    """

    store_name: str
    control: str
    volumes: tuple[VolumePlan, ...]
    block: tuple[str, ...]
    timeout: float
    own: bool = False
    expire_s: float = EXPIRE_S


class ErrorData(msgspec.Struct, frozen=True):
    """A typed error on its way between processes."""

    code: str
    message: str
    key: str | None = None
    details: dict[str, object] = {}


async def outcome(work: Awaitable[T]) -> tuple[bytes, T | None]:
    """For an endpoint: its result, or the error as bytes, which Monarch would make a text. What is
    no error of ours becomes one, with its type and text.
    """
    try:
        return b"", await work
    except Exception as error:  # noqa: BLE001 - the caller has it
        return encoded_error(error), None


def encoded_error(error: Exception) -> bytes:
    """An error as :func:`outcome` returns it. Call it where the error has been caught."""
    if isinstance(error, TorchStoreError):
        failed = ErrorData(error.code, error.message, error.key, error.details)
    else:
        if not isinstance(error, OSError):
            log.error("an actor of a store has failed", exc_info=error)
        failed = ErrorData(_ANY_ERROR, f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(failed)


def result(answer: tuple[bytes, T | None]) -> T:
    """The other end of :func:`outcome`.

    Raises:
        TorchStoreError: what the endpoint raised.
    """
    failure, value = answer
    if failure:
        failed = msgspec.msgpack.decode(failure, type=ErrorData)
        raise from_wire(failed.code, failed.message, failed.key, failed.details)
    if value is None:
        raise StoreClosedError("an actor of the store gave no answer")
    return value
