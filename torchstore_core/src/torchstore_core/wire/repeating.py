"""Which requests are told from others when they are sent again, to a server that has come back."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torchstore_core.wire import messages as m

# Where each class of them has it. (A ``match`` with classes of messages takes much longer.)
_NUMBERS: dict[type[m.Message], Callable[[m.Message], int]] = dict.fromkeys(
    (m.Put, m.Rewind, m.PutObject, m.Commit, m.Seal, m.Delete, m.Free), attrgetter("txn")
)
_NUMBERS[m.Hold] = attrgetter("hold")


def number_of(request: m.Message) -> int:
    """The number that tells a request from all others of its class and its session, and that is the
    same when it is sent again; 0: it has none, and may be executed again.
    """
    of = _NUMBERS.get(type(request))
    return 0 if of is None else of(request)
