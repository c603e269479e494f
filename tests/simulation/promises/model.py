"""What a store promises of keys and versions, as a state that one call after the other changes.

It knows nothing of the store's code: it is what users are told. Where the store may do one thing
or another (it drops versions on their way when processes have died, or when there is no room), the
model allows both, and believes what readers see.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

from tests.simulation.acting.operations import mark
from tests.simulation.promises.histories import Call, plain
from tests.simulation.promises.keys import Content, Joint, Key

__all__ = ["Model"]

_ERRORS = {"", "key-not-found", "evicted", "partial-put", "version-gone", "layout-mismatch"}
# Operations that are about bytes, which may be lost.
_MOVE = {"put", "publish", "shard", "get", "fetch", "object", "read", "rewind"}
_READ = {"get", "fetch", "read"}
_REFUSED = {"store-full", "store-closed", "configuration", "Closed", "Cancelled"}


class Model:
    """Keys, and what they are.

    Args:
        puts: the calls that contribute to versions of several participants, by key.
        exact: the keys about which the store has no choice.
        lost: the point from which on values without a copy may be lost; 0: none is.
        freed: versions of which somebody may have ended all references.
        rewound: the keys that somebody rewinds, of which there may be something on its way.
        unread: the point from which on what is on disk may be unreadable for a moment; 0: never.
    """

    def __init__(
        self,
        puts: dict[str, list[Call]],
        exact: Collection[str],
        lost: int = 0,
        freed: Collection[tuple[str, int, int]] = frozenset(),
        rewound: Collection[str] = frozenset(),
        unread: int = 0,
    ) -> None:
        self._unread = unread
        self._rewound = frozenset(rewound)
        self._lost = lost
        self._freed = freed
        self._named: dict[tuple[str, int, int], Content] = {}  # what references name
        self._keys: dict[str, Key] = {}
        self._puts = puts
        self._exact = exact
        self._apply: dict[str, Callable[[Call], str]] = {
            "put": self._put,
            "rewind": self._rewind,
            "publish": self._publish,
            "shard": self._publish,
            "get": self._get,
            "fetch": self._get,
            "delete": self._delete,
            "wait": self._wait,
            "versions": self._versions,
            "exists": self._exists,
            "object": self._object,
            "hold": self._hold,
            "read": self._read_ref,
            "free": lambda call: "it fails" if call.code else "",
        }

    def key(self, name: str) -> Key:
        found = self._keys.get(name)
        if found is None:
            found = self._keys[name] = Key(self._puts.get(name, ()), exact=name in self._exact)
        return found

    def apply(self, call: Call) -> str:
        """One call happens now; what is wrong about its answer, empty if nothing is."""
        code = call.code
        if code in _REFUSED:
            return ""
        if code == "protocol":  # a put that was given up may come after that
            return "" if call.ended is None else "it was refused"
        if code == "object-lost" and 0 < self._lost <= call.at and call.operation.kind in _MOVE:
            return ""
        if code == "object-lost" and 0 < self._unread <= call.at and call.operation.kind in _READ:
            return ""
        if code not in _ERRORS:
            return "no such error is promised"
        return self._apply[call.operation.kind](call)

    # ---- putting --------------------------------------------------------------------------

    def _put(self, call: Call) -> str:
        if call.code:
            return f"a put fails: {call.code}"
        for at, (name, version) in enumerate(zip(call.operation.keys, call.result, strict=True)):
            key = self.key(name)
            if version <= key.used:
                return f"version {version} of {name!r} comes again or late, after {key.used}"
            content = {"": {mark(call.operation.number, at)}}
            key.becomes(version, content, fades=call.operation.fades)
        return ""

    def _rewind(self, call: Call) -> str:
        if call.code:
            return f"a put fails: {call.code}"
        key = self.key(call.operation.keys[0])
        if call.result[0] != call.operation.version:
            return f"it became version {call.result[0]}"
        # The first of several that were under way counts; a delete ends all of them.
        if call.begun > max(key.rewound, key.deleted) or call.begun == call.at:
            content = {"": {mark(call.operation.number)}}
            key.go_back(call.operation.version, content, call.at)
        return ""

    def _publish(self, call: Call) -> str:
        operation = call.operation
        key = self.key(operation.keys[0])
        if call.code == "version-gone":
            used = max([key.used, key.ended, *key.joint])
            late = operation.version and (operation.version <= used or not key.exact)
            return "" if late else f"only versions up to {used} were used"
        if call.code == "key-not-found":
            none = operation.partial and (key.is_plain or not (key.newest and key.exact))
            return "" if none else f"there is version {key.newest}"
        if call.code:
            return f"a put fails: {call.code}"
        (version,) = call.result
        if operation.version and version != operation.version:
            return f"it became version {version}"
        if call.begun <= key.deleted or version <= key.newest:
            key.settle(call.at)
            return ""
        joint = key.joint.get(version)
        if joint is None:
            joint = key.joint[version] = Joint(operation.participants)
        joint.parts[call.client] = call
        key.settle(call.at)
        return ""

    # ---- getting --------------------------------------------------------------------------

    def _get(self, call: Call) -> str:
        operation = call.operation
        keys = [self.key(name) for name in operation.keys]
        if call.code in ("key-not-found", "partial-put", "evicted"):
            return _some_is_missing(keys)
        if call.code == "layout-mismatch":
            return "" if keys[0].is_plain else "it is a state dict"
        if call.code == "version-gone":
            here = [key for key in keys if operation.version in key.contents and not key.fades]
            there = all(key in here and key.exact for key in keys)
            return "that version is there" if there else ""
        if call.code:
            return f"a get fails: {call.code}"
        if call.result is None:
            return ""
        one, pieces = call.result
        if operation.kind == "fetch":
            return self._read(operation.keys[0], keys[0], operation.version, one, pieces)
        for name, key in zip(operation.keys, keys, strict=True):
            cut = len(name)
            own = [(p[cut:], v, c) for p, v, c in pieces if p == name or p.startswith(f"{name}@")]
            versions = {v for _, v, _ in own}
            if len(versions) != 1:
                return f"it reads versions {sorted(versions)} of {name!r} at once"
            if wrong := self._read(name, key, operation.version, versions.pop(), own):
                return wrong
        return ""

    def _read(
        self,
        name: str,
        key: Key,
        wanted: int,
        version: int,
        pieces: list[tuple[str, int, bytes]],
    ) -> str:
        if wrong := self._sees(name, key, version, wanted):
            return wrong
        content = key.contents.get(version)
        if content is None:
            return f"it reads version {version} of {name!r}, which should be gone"
        return self._matches(name, version, content, pieces)

    def _matches(
        self, name: str, version: int, content: Content, pieces: list[tuple[str, int, bytes]]
    ) -> str:
        """What is read is what a version of a key is."""
        found = {piece for piece, _, _ in pieces}
        exact = not name or self.key(name).exact
        if found != content.keys() and (exact or not found <= content.keys()):
            return f"it reads {sorted(found)} of {name!r}, which is {sorted(content)}"
        for piece, _, got in pieces:
            if got not in content[piece]:
                what = f"{piece!r} of version {version}" if piece else f"version {version}"
                return f"it reads {plain(got)} as {what} of {name!r}, not {plain(content[piece])}"
        return ""

    def _sees(self, name: str, key: Key, version: int, wanted: int = 0) -> str:
        """A reader sees a version of a key as the newest, or because it wanted just that."""
        if version > key.newest:
            joint = key.joint.get(version)
            if joint is None or not joint.is_complete or key.exact:
                return f"it sees version {version} of {name!r}, which is at {key.newest}"
            key.publish(version)
        if wanted:
            return "" if version == wanted else f"it wants {wanted} and sees {version}"
        if version < key.newest:
            return f"it sees version {version} of {name!r}, which is at {key.newest}"
        return ""

    # ---- references -----------------------------------------------------------------------

    def _object(self, call: Call) -> str:
        if call.code:
            return f"a put fails: {call.code}"
        return self._names(("", call.result[0], 0), {"": {mark(call.operation.number)}})

    def _names(self, name: tuple[str, int, int], content: Content) -> str:
        """A reference names this."""
        if self._named.setdefault(name, content) != content:
            before, now = (plain(list(c.values())) for c in (self._named[name], content))
            return f"{name} names {before}, and now {now}"
        return ""

    def _hold(self, call: Call) -> str:
        (name,) = call.operation.keys
        key = self.key(name)
        if call.code:
            missing = call.code in ("key-not-found", "partial-put", "evicted")
            return "" if missing and key.vanish() else "the key is there"
        if wrong := self._sees(name, key, call.result[0]):
            return wrong
        return self._names(call.about[0], key.contents[key.newest]) if call.about else ""

    def _read_ref(self, call: Call) -> str:
        if call.about is None:
            return "it was about nothing"
        (name, version, timeline), sure = call.about
        if call.code:
            gone = call.code in ("version-gone", "key-not-found")
            excused = not sure or (name, version, timeline) in self._freed
            return "" if gone and excused else f"what is referred to cannot be read: {call.code}"
        _, pieces = call.result
        seen = {v for _, v, _ in pieces}
        if seen != {version}:
            return f"it reads versions {sorted(seen)}, not {version}"
        own = [(piece.removeprefix(name), v, got) for piece, v, got in pieces]
        return self._matches(name, version, self._named[name, version, timeline], own)

    # ---- the rest -------------------------------------------------------------------------

    def _delete(self, call: Call) -> str:
        keys = [self.key(name) for name in call.operation.keys]
        if call.code in ("key-not-found", "evicted"):
            return _some_is_missing(keys)
        there = [key for key in keys if key.newest and not key.fades]
        most = [key for key in keys if key.newest]
        plain = not any(key.puts for key in keys)
        plain &= self._rewound.isdisjoint(call.operation.keys)
        if call.result < len(there) or (plain and call.result > len(most)):
            return f"{len(there)} of the keys are there"
        for key in keys:
            key.clear(call.at)
        return ""

    def _wait(self, call: Call) -> str:
        if call.code:
            return "a wait does not fail"
        for name, version in zip(call.operation.keys, call.result, strict=True):
            if wrong := self._sees(name, self.key(name), version):
                return wrong
            if version < max(call.operation.version, 1):
                return f"version {version} of {name!r} is too old"
        return ""

    def _versions(self, call: Call) -> str:
        if call.code:
            return "it does not fail"
        (name,) = call.operation.keys
        key = self.key(name)
        if call.result:
            if wrong := self._sees(name, key, call.result[-1]):
                return wrong
        elif not key.vanish():
            return f"{name!r} is at {key.newest}"
        there = sorted(key.contents)
        return "" if call.result == there or not key.exact else f"the versions are {there}"

    def _exists(self, call: Call) -> str:
        if call.code:
            return "it does not fail"
        keys = [self.key(name) for name in call.operation.keys]
        for key, is_there in zip(keys, call.result, strict=True):
            if not is_there and key.fades and not 0 < self._lost < call.at:
                key.vanish()
        there = [key.newest > 0 for key in keys]
        if not all(key.exact for key in keys):
            return ""
        if 0 < self._lost < call.at:  # lost versions do not exist
            return "" if all(map(operator.ge, there, call.result)) else f"it is {there}"
        return "" if call.result == there else f"it is {there}"

    def satisfies(self, call: Call) -> bool:
        """Whether a wait has to be answered now."""
        keys = [self.key(name) for name in call.operation.keys]
        newest = [0 if key.fades else key.newest for key in keys]
        if self._lost:  # of a version that is lost, the next one is waited for
            return False
        return min(newest) >= max(call.operation.version, 1)


def _some_is_missing(keys: Sequence[Key]) -> str:
    """What is wrong about an answer that not all keys are there."""
    if any(not key.newest for key in keys):
        return ""
    fading = [key for key in keys if key.fades]
    if len(fading) == 1:
        fading[0].vanish()
    return "" if fading else "all keys are there"
