"""What a wait in vain has waited for, and what there is instead. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.clients.session.lane import Lane
from torchstore_core.errors import StoreTimeoutError, TorchStoreError, in_seconds
from torchstore_core.wire import messages as m

__all__ = ["ask", "not_there"]

# The time is over: a server that does not say it at once is not waited for.
_ASK_S = 0.1
_MOST_ASKED = 256
_MOST_NAMED = 16
_MOST_IN_WORDS = 5


async def ask(lane: Lane, keys: Sequence[str], min_version: int) -> list[m.UnmetKey]:
    """What the keys lack; nothing if the server cannot say it at once."""
    request = m.Unmet(lane.next_id(), list(keys[:_MOST_ASKED]), min_version)
    try:
        return (await lane.call(request, m.UnmetKeys, _ASK_S)).keys
    except TorchStoreError:  # it is stopped, or gone: the time-out is what counts
        return []


def not_there(
    keys: Sequence[str], min_version: int, timeout: float | None, unmet: Sequence[m.UnmetKey]
) -> StoreTimeoutError:
    """The error of a wait whose time is over."""
    least = f" with version {min_version} or newer" if min_version > 1 else ""
    words = [_words(one) for one in unmet] or [repr(key) for key in keys]
    more = "; ..." if len(words) > _MOST_IN_WORDS else ""
    if not unmet:
        more += "; what there is instead, the server did not say in time"
    details: dict[str, object] = {
        "keys": list(keys[:_MOST_NAMED]),
        "min_version": min_version,
        "timeout": timeout,
    }
    if unmet:
        details["unmet"] = [_plain(one) for one in unmet]
    return StoreTimeoutError(
        f"not there within {in_seconds(timeout)}{least}: {'; '.join(words[:_MOST_IN_WORDS])}{more}",
        key=unmet[0].key if unmet else keys[0],
        details=details,
    )


def _words(one: m.UnmetKey) -> str:
    if one.lost:
        there = f"version {one.version}, the newest, is lost"
    else:
        there = f"the newest is version {one.version}" if one.version else "there is none"
    return f"{one.key!r} ({'; '.join([there, *map(_half_put, one.pending)])})"


def _half_put(pending: m.Pending) -> str:
    if not pending.participants:
        return f"version {pending.version} is half put"
    done = ", ".join(pending.committed) or "none"
    return (
        f"version {pending.version} is half put, by {len(pending.committed)} of "
        f"{pending.participants} participants ({done})"
    )


def _plain(one: m.UnmetKey) -> dict[str, object]:
    return {
        "key": one.key,
        "version": one.version,
        "lost": one.lost,
        "pending": [pending.plain() for pending in one.pending],
    }
