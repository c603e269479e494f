"""Which requests are told from others when they are sent again, to a server that has come back."""

from __future__ import annotations

from torchstore_core.wire import messages as m

__all__ = ["number_of"]


def number_of(request: m.Message) -> int:
    """The number that tells a request from all others of its class and its session, and that is the
    same when it is sent again; 0: it has none, and may be executed again.
    """
    match request:
        case m.Put() | m.PutObject() | m.Commit() | m.Delete() | m.Free():
            return request.txn
        case m.Hold():
            return request.hold
    return 0
