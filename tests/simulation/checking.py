"""Whether a history can be explained by a store that does one thing after the other.

The model here knows nothing of the store's code: it is what users are told of keys and versions.
"""

from __future__ import annotations

from tests.simulation.histories import Call, History
from tests.simulation.operations import mark
from tests.simulation.violations import Violation

__all__ = ["check"]

_REFUSED = {"store-full", "protocol", "store-closed", "configuration", "Closed", "Cancelled"}


class _Key:
    """One key.

    Attributes:
        newest: its newest version; 0: there is none.
        used: the highest version that it ever had.
        contents: what can be read, by version.
    """

    __slots__ = ("contents", "newest", "used")

    def __init__(self) -> None:
        self.newest = 0
        self.used = 0
        self.contents: dict[int, bytes] = {}


class Model:
    """Keys, and what they are."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def key(self, name: str) -> _Key:
        found = self._keys.get(name)
        if found is None:
            found = self._keys[name] = _Key()
        return found

    def apply(self, call: Call) -> str:
        """One call happens now; what is wrong about its answer, empty if nothing is."""
        if call.code in _REFUSED:
            return ""
        return getattr(self, f"_{call.operation.kind}")(call)  # type: ignore[no-any-return]

    def _put(self, call: Call) -> str:
        if call.code:
            return f"a put fails: {call.code}"
        for at, (name, version) in enumerate(zip(call.operation.keys, call.result, strict=True)):
            key = self.key(name)
            if version <= key.used:
                return f"version {version} of {name!r} comes again or late, after {key.used}"
            key.newest = key.used = version
            key.contents = {version: mark(call.operation.number, at)}
        return ""

    def _get(self, call: Call) -> str:
        operation = call.operation
        keys = [self.key(name) for name in operation.keys]
        if call.code == "key-not-found":
            return "" if any(not key.newest for key in keys) else "all keys are there"
        if call.code == "version-gone":
            there = all(operation.version in key.contents for key in keys)
            return "that version is there" if there else ""
        if call.code:
            return f"a get fails: {call.code}"
        if call.result is None:
            return ""
        for name, key, (version, content) in zip(operation.keys, keys, call.result, strict=True):
            wanted = operation.version or key.newest
            if version != wanted:
                return f"it reads version {version} of {name!r}, which is at {wanted}"
            if content != key.contents.get(version):
                return f"it reads {content!r} as version {version} of {name!r}"
        return ""

    def _delete(self, call: Call) -> str:
        keys = [self.key(name) for name in call.operation.keys]
        there = [key for key in keys if key.newest]
        if call.code == "key-not-found":
            return "" if len(there) < len(keys) else "all keys are there"
        if call.result != len(there):
            return f"{len(there)} of the keys are there"
        for key in there:
            key.newest = 0
            key.contents = {}
        return ""

    def _wait(self, call: Call) -> str:
        newest = [self.key(name).newest for name in call.operation.keys]
        if call.result != newest or min(newest) < max(call.operation.version, 1):
            return f"the versions are {newest}"
        return ""

    def _versions(self, call: Call) -> str:
        there = sorted(self.key(call.operation.keys[0]).contents)
        return "" if call.result == there else f"the versions are {there}"

    def _exists(self, call: Call) -> str:
        there = [self.key(name).newest > 0 for name in call.operation.keys]
        return "" if call.result == there else f"it should be {there}"

    def satisfies(self, call: Call) -> bool:
        """Whether a wait would be answered now."""
        newest = [self.key(name).newest for name in call.operation.keys]
        return min(newest) >= max(call.operation.version, 1)


def check(history: History) -> None:
    """Explain a history by doing its calls one by one, in the order in which the server did.

    Raises:
        Violation: some call cannot be explained.
    """
    model = Model()
    for call in history.in_order():
        if wrong := model.apply(call):
            raise Violation("history", f"{call}: {wrong}")
    for call in history.calls:
        if call.operation.kind == "wait" and not call.known and call.at and not call.ended:
            continue
