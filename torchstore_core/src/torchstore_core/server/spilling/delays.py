"""Requests that cannot be answered yet, because memory has to be freed or values read first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Delayed(Exception):
    """The request has changed nothing. It is to be handled again when ``retry`` is called.

    Args:
        why: for people, if the request does not end in time: what it waits for.
        add: registers what to call then.
    """

    def __init__(self, why: str, add: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(why)
        self.why = why
        self._add = add

    def then(self, retry: Callable[[], None]) -> None:
        """Register ``retry``, to be called once, when it is worth while to try again."""
        self._add(retry)


class RoomQueue(deque[Callable[[], None]]):
    """Requests that wait for room in memory, which get it in the order in which they came.

    >>> queue = RoomQueue()
    >>> queue.add(lambda: print("first")); queue.add(lambda: queue.add(lambda: print("second")))
    >>> queue.retry(); len(queue)
    first
    1
    """

    def __init__(self) -> None:
        super().__init__()
        self._again = False
        #: Whether a request is being retried that has waited.
        self.retrying = False

    def add(self, retry: Callable[[], None]) -> None:
        """Queue a request; one that is being retried keeps its place."""
        if self.retrying:
            self._again = True
            self.appendleft(retry)
        else:
            self.append(retry)

    def retry(self) -> None:
        """Retry the requests, until there is no room for one."""
        if self.retrying:
            return
        self.retrying = True
        self._again = False
        try:
            while self and not self._again:
                self.popleft()()
        finally:
            self.retrying = False
