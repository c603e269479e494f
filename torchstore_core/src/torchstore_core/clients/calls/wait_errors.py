"""The error of a wait that timed out: what it waited for, and what there is. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from torchstore_core.clients.session.channel import Channel
from torchstore_core.errors import StoreTimeoutError, TorchStoreError, in_seconds
from torchstore_core.wire import messages as m

# The deadline has passed already, so a server that does not reply at once is not waited for.
REQUEST_TIMEOUT_S = 0.1
_MAX_REQUESTED = 256
_MAX_LISTED = 16
_MAX_IN_TEXT = 5


async def unmet_keys(
    channel: Channel, keys: Sequence[str], min_version: int
) -> list[m.UnmetKey] | None:
    """Ask the server which keys do not meet the condition, and why; None if it does not reply at
    once.
    """
    request = m.Unmet(channel.next_id(), list(keys[:_MAX_REQUESTED]), min_version)
    try:
        return (await channel.call(request, m.UnmetKeys, REQUEST_TIMEOUT_S)).keys
    except TorchStoreError:  # the server is stopped or gone: report the time-out
        return None


def wait_timeout(
    keys: Sequence[str],
    min_version: int,
    timeout: float | None,
    unmet: Sequence[m.UnmetKey] | None,
) -> StoreTimeoutError:
    """Return the error of a wait that timed out."""
    least = f" with version {min_version} or newer" if min_version > 1 else ""
    texts = [_describe(one) for one in unmet or ()] or [repr(key) for key in keys]
    more = "; ..." if len(texts) > _MAX_IN_TEXT else ""
    if not unmet:
        more += "; what there is instead, the server did not say in time"
    details: dict[str, object] = {
        "keys": list(keys[:_MAX_LISTED]),
        "min_version": min_version,
        "timeout": timeout,
    }
    if unmet:
        details["unmet"] = [_to_plain(one) for one in unmet]
    return StoreTimeoutError(
        f"not there within {in_seconds(timeout)}{least}: {'; '.join(texts[:_MAX_IN_TEXT])}{more}",
        key=unmet[0].key if unmet else keys[0],
        details=details,
    )


def _describe(one: m.UnmetKey) -> str:
    if one.lost:
        there = f"version {one.version}, the newest, is lost"
    else:
        there = f"the newest is version {one.version}" if one.version else "there is none"
    return f"{one.key!r} ({'; '.join([there, *map(_describe_pending, one.pending)])})"


def _describe_pending(pending: m.Pending) -> str:
    if not pending.participants:
        return f"version {pending.version} is half put"
    done = ", ".join(pending.committed) or "none"
    return (
        f"version {pending.version} is half put, by {len(pending.committed)} of "
        f"{pending.participants} participants ({done})"
    )


def _to_plain(one: m.UnmetKey) -> dict[str, object]:
    return {
        "key": one.key,
        "version": one.version,
        "lost": one.lost,
        "pending": [pending.plain() for pending in one.pending],
    }
