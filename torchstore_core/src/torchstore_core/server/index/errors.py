"""Errors about keys and versions, with messages that say what to do."""

from __future__ import annotations

from torchstore_core.errors import (
    KeyNotFoundError,
    ObjectLostError,
    PartialPutError,
    VersionGoneError,
)
from torchstore_core.reports.stat import Pending

#: A message names at most so many versions.
_MOST_NAMED = 10


def missing_error(keys: list[str], similar: list[str]) -> KeyNotFoundError:
    """The error for keys that do not exist; ``similar``: names like the first of them."""
    shown = _some([repr(k) for k in keys])
    what = "no such key" if len(keys) == 1 else f"{len(keys)} keys do not exist"
    details: dict[str, object] = {"missing": keys}
    advice = ""
    if similar:
        details["similar"] = similar
        of_first = "" if len(keys) == 1 else " instead of the first"
        advice = f"; did you mean {' or '.join(map(repr, similar))}{of_first}?"
    return KeyNotFoundError(f"{what}: {shown}{advice}", key=keys[0], details=details)


def entry_error(key: str, keys: list[str]) -> KeyNotFoundError:
    """The error for deleting ``keys`` of which ``key`` is only an entry of a state dict."""
    return KeyNotFoundError(
        f"{key!r} is an entry of a state dict, no key of its own; the state dict is "
        "deleted as a whole",
        key=key,
        details={"missing": keys},
    )


def no_base_error(key: str) -> KeyNotFoundError:
    """The error for a partial put to a key that has no earlier version to build on."""
    return KeyNotFoundError(
        f"a partial put of {key!r} takes the other entries from the version before, and there "
        "is none; put the whole state dict first",
        key=key,
        details={"missing": [key]},
    )


def used_error(key: str, version: int, used: int, newest: int) -> VersionGoneError:
    """The error for putting a version that is not above ``used``, the highest one used so far.

    ``newest`` is the current version of the key; 0 if there is none.
    """
    now = f"it is at {used}" if newest else f"all up to {used} were used before"
    return VersionGoneError(
        f"version {version} of {key!r} cannot be put: {now}, and versions only grow, also "
        "after a delete. A run that goes back to an older checkpoint says so: rewind=True",
        key=key,
        details={"current": newest},
    )


def gone_error(
    key: str, version: int, versions: list[int], rewound: tuple[int, int] = (0, 0)
) -> VersionGoneError:
    """The error for a version that cannot be read.

    Args:
        versions: those that can.
        rewound: which version the key went back to the last time, and the highest that it had
            before; 0 if it never did.
    """
    if not key:
        return VersionGoneError(
            f"object {version:x} is gone: it was freed, or the last reference to it had ended "
            "before this one arrived, or the store has been started again since",
            details={"current": 0},
        )
    if versions and version > versions[-1]:
        back_to, used = rewound
        if version <= used:
            return VersionGoneError(
                f"version {version} of {key!r} is gone: the key was rewound to {back_to}, and is "
                f"at {versions[-1]} now. What its new run puts as version {version} is not there "
                "yet; wait for it if that is wanted",
                key=key,
                details={"current": versions[-1], "rewound": True},
            )
        text = f"there is no version {version} of {key!r} yet: it is at {versions[-1]}; wait for it"
        return VersionGoneError(text, key=key, details={"current": versions[-1]})
    now = "no such key" if not versions else f"it is at {versions[-1]} now"
    details: dict[str, object] = {"current": versions[-1] if versions else 0}
    if len(versions) > 1:
        older = versions[:-1]
        if len(older) <= _MOST_NAMED:
            now += f", and {', '.join(map(str, older))} are kept"
        else:
            now += f", and {len(older):,} older ones are kept, the oldest of which is {older[0]}"
        details["versions"] = versions
    text = f"version {version} of {key!r} is gone: {now}"
    return VersionGoneError(text, key=key, details=details)


def rewound_error(key: str, version: int, newest: int) -> VersionGoneError:
    """The error for a ref to a version that was there before its key was rewound."""
    return VersionGoneError(
        f"version {version} of {key!r} is gone: the key was rewound to a version before it, or to "
        f"its number, and is at {newest} now",
        key=key,
        details={"current": newest, "rewound": True},
    )


def fenced_error(key: str, newest: int) -> VersionGoneError:
    """The error for a put of a run that another one has gone back behind."""
    return VersionGoneError(
        f"{key!r} was rewound, and is at {newest} now: this process put to it before, and had no "
        "part in that. Nothing of its run is wanted any more; a run that takes over says so: "
        "version=, rewind=True",
        key=key,
        details={"current": newest, "rewound": True},
    )


def in_vain_error(key: str, min_version: int, newest: int) -> VersionGoneError:
    """The error for a wait that was under way when its key was rewound."""
    return VersionGoneError(
        f"version {min_version} of {key!r} is not waited for any more: the key was rewound, and is "
        f"at {newest} now. Start over from there",
        key=key,
        details={"current": newest, "rewound": True},
    )


def version_lost_error(key: str, version: int, why: str) -> ObjectLostError:
    """The error for a participant of a version that was lost before it was complete."""
    return ObjectLostError(
        f"version {version} of {key!r} was lost before it was whole: {why}, and parts of it were "
        "there. Nothing of it is visible; all participants go on with their next put",
        key=key,
        details={"version": version, "reason": why},
    )


def _some(words: list[str]) -> str:
    return ", ".join(words[:5]) + (", ..." if len(words) > 5 else "")


def partial_error(key: str, base: str, state: Pending) -> PartialPutError:
    """The error for reading ``key`` while the first version of ``base`` is still unfinished;
    ``base`` is the key itself, or the state dict of which ``key`` may name an entry.
    """
    boxes = [f"{name}{list(offset)}+{list(shape)}" for name, offset, shape in state.missing]
    parts: list[str] = []
    if state.participants:
        done = f"{len(state.committed)} of {state.participants} participants have put theirs"
        parts.append(f"{done} ({_some(state.committed) or 'none'})")
    if state.writing:
        named = [who for who in state.writing if who]  # one alone need not say who it is
        parts.append(f"{len(state.writing)} writing" + (f" ({_some(named)})" if named else ""))
    if state.missing_participants:
        parts.append(f"nothing from {_some(state.missing_participants)}")
    if boxes:
        parts.append(f"boxes (offset+shape) still missing: {_some(boxes)}")
    return PartialPutError(
        f"{key!r} is not whole yet: of version {state.version}, {'; '.join(parts)}. Wait for it "
        f"with `await ts.wait({base!r})`",
        key=key,
        details=state.plain(),
    )
