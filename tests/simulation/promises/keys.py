"""One key, as users are told of it: its versions, and those that several participants make."""

from __future__ import annotations

from collections.abc import Collection

from tests.simulation.acting.operations import mark
from tests.simulation.promises.histories import Call

__all__ = ["Content", "Joint", "Key"]

#: What each piece of a version may be.
Content = dict[str, set[bytes]]


class Joint:
    """A version that several participants put together, while it is not whole."""

    __slots__ = ("needed", "parts")

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.parts: dict[int, Call] = {}  # by participant

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.needed

    @property
    def is_partial(self) -> bool:
        return any(call.operation.partial for call in self.parts.values())


class Key:
    """One key.

    Attributes:
        newest: its newest version; 0: there is none.
        used: the highest version that it ever had.
        contents: what can be read, by version.
        fades: whether the newest version may be evicted.
        rewound: the point at which it went back the last time.
        keep: how many versions can be read.
        joint: versions that are not whole.
        deleted: the point of the last delete.
        ended: the highest version that deletes may have ended of puts whose commits were refused.
        exact: whether the store has no choice about versions that several participants put, as far
            as can be told.
        puts: all calls that contribute to such versions.
    """

    __slots__ = (
        "contents",
        "deleted",
        "ended",
        "exact",
        "fades",
        "joint",
        "keep",
        "newest",
        "puts",
        "rewound",
        "used",
    )

    def __init__(self, puts: Collection[Call], *, exact: bool) -> None:
        self.newest = 0
        self.used = 0
        self.contents: dict[int, Content] = {}
        self.fades = False
        self.rewound = 0.0
        self.keep = 1
        self.joint: dict[int, Joint] = {}
        self.deleted = 0.0
        self.ended = 0
        self.exact = exact
        self.puts = puts

    @property
    def is_plain(self) -> bool:
        """Whether its newest version is one value."""
        return "" in self.contents.get(self.newest, ())

    def becomes(self, version: int, content: Content, *, fades: bool = False) -> None:
        """A version is the newest one now."""
        self.fades = fades
        self.newest = version
        self.used = max(self.used, version)
        self.contents[version] = content
        while self.exact and len(self.contents) > self.keep:
            del self.contents[min(self.contents)]
        for older in [v for v in self.joint if v <= version]:
            del self.joint[older]

    def go_back(self, version: int, content: Content, point: float) -> None:
        """A version becomes the newest, and its number and those above it count no more."""
        self.contents = {v: old for v, old in self.contents.items() if v < version}
        self.used, self.rewound = version, point
        self.becomes(version, content)

    def vanish(self) -> bool:
        """It is not there. Returns whether that may be: it has no version, or was evicted."""
        if self.newest and not self.fades:
            return False
        self.newest, self.contents = 0, {}
        return True

    def clear(self, point: float) -> None:
        """It is deleted."""
        before = [c for c in self.puts if c.begun < point]
        begun = [c.result[0] for c in before if c.result]
        refused = [c for c in before if c.is_refused_late]
        self.ended = max([self.ended, *[c.operation.version for c in refused]])
        self.used = max([self.used, self.newest, *self.joint, *begun])
        self.newest, self.keep, self.deleted = 0, 1, point
        self.contents = {}
        self.joint = {}

    def waits_for(self, version: int, point: float) -> Call | None:
        """A put to an older version that is not whole, which a partial one has to wait for."""
        for call in self.puts:
            if not (call.begun and self.deleted < call.begun < point) or call.code:
                continue
            if self.newest < call.result[0] < version:
                return call
        return None

    def may_wait(self, version: int, point: float) -> bool:
        """Whether a partial version may have to wait for an older put whose commit is refused. When
        what that has begun is given up, nobody is told: its client has still to abort it, which
        waits for room in the log.
        """
        return any(
            call.is_refused_late
            and self.deleted < call.begun < point
            and call.operation.version < version
            for call in self.puts
        )

    def publish(self, version: int) -> None:
        """A version that is complete becomes the newest one."""
        joint = self.joint[version]
        if not self.exact:  # older ones may have been visible in between
            for older in sorted(self.joint):
                if older < version and self.joint[older].is_complete:
                    self.contents[older] = self._content(older)
        content = self._content(version)
        keep = max(call.operation.keep for call in joint.parts.values())
        self.keep = keep or self.keep
        self.becomes(version, content)

    def _content(self, version: int) -> Content:
        """What a joint version is when it becomes visible now."""
        joint = self.joint[version]
        content: Content = {}
        if joint.is_partial:
            before = {} if self.is_plain else self.contents.get(self.newest, {})
            content = {name: set(marks) for name, marks in before.items()}
            if not self.exact:  # some that are older may have been dropped, or not
                for _, older in sorted(self.joint.items()):
                    for name, marks in _brought(older).items():
                        content.setdefault(name, set()).update(marks)
        for name, marks in _brought(joint).items():
            content[name] = marks if self.exact else marks | content.get(name, set())
        return content

    def settle(self, point: float) -> None:
        """Complete versions become visible that have to."""
        while self.exact:
            for version, joint in sorted(self.joint.items()):
                waits = joint.is_partial and (
                    not self.newest or self.waits_for(version, point) is not None
                )
                if joint.is_complete and not waits:
                    if joint.is_partial and self.may_wait(version, point):
                        self.exact = False
                    else:
                        self.publish(version)
                    break
            else:
                return


def _brought(joint: Joint) -> Content:
    content: Content = {}
    for who, call in joint.parts.items():
        operation = call.operation
        for at, name in enumerate(operation.names):
            piece = name
            if operation.kind == "shard":
                piece = f"@{64 * who}" if operation.participants > 1 else ""
            content.setdefault(piece, set()).add(mark(operation.number, at))
    return content
