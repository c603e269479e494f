"""Calls over a connection, and the answers that they wait for. Torch-free."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torchstore_core.errors import TorchStoreError, from_wire


class Answer(Protocol):
    """The answer to the call with this ``id``; one with a ``code`` is an error."""

    @property
    def id(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def details(self) -> dict[str, Any]: ...


A = TypeVar("A", bound=Answer)


class Calls(Generic[A]):
    """The calls over one connection that have not been answered. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[A]] = {}
        self._gone: Callable[[], TorchStoreError] | None = None

    def next_id(self) -> int:
        """Return a new id, for :meth:`make` or for something whose answer nobody waits for."""
        return next(self._ids)

    async def make(self, send: Callable[[int], None]) -> A:
        """Call ``send`` with a new id, and return the answer to that.

        Raises:
            TorchStoreError: the error that the answer contains, or that of :meth:`fail`.
        """
        if self._gone is not None:
            raise self._gone()
        number = self.next_id()
        pending: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        try:
            send(number)
            return await pending
        finally:
            del self._pending[number]

    def answered(self, answer: A) -> None:
        """Pass an answer to the call that waits for it, if it still does."""
        pending = self._pending.get(answer.id)
        if pending is None or pending.done():
            return
        if answer.code:
            pending.set_exception(from_wire(answer.code, answer.message, None, answer.details))
        else:
            pending.set_result(answer)

    def fail(self, gone: Callable[[], TorchStoreError]) -> None:
        """Fail all calls, present and future, with what ``gone`` returns: nobody answers now."""
        self._gone = gone
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(gone())
