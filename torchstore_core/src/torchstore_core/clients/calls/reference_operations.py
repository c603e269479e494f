"""Operations on references: hold versions, wait for some of several, free what is held."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torchstore_core.clients.calls.arguments import check_exact, check_key, listed
from torchstore_core.clients.calls.clock import Clock
from torchstore_core.clients.calls.incarnations import check_incarnation, refs_of
from torchstore_core.clients.calls.key_operations import KeyOperations
from torchstore_core.clients.session.held_ref import HeldRef, caller
from torchstore_core.clients.session.holder import known_place
from torchstore_core.clients.session.session import Session
from torchstore_core.errors import (
    ConfigurationError,
    StoreTimeoutError,
    UnsupportedValueError,
    VersionGoneError,
)
from torchstore_core.reports.refs import RefReport
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m

#: How long the server may take to say what is ready when the time is over, in seconds: as long as
#: one that comes back with a million keys.
STATE_S = 3.0
AnyRef = str | ObjectRef | HeldRef
R = TypeVar("R", str, ObjectRef, HeldRef, AnyRef)


class ReferenceOperations(KeyOperations):
    """The operations of a client on references."""

    async def hold(
        self, key_or_ref: str | ObjectRef | HeldRef, *, timeout: float | None = None
    ) -> HeldRef:
        """Keep a version alive: the newest one of a key, or the one that a reference names.

        It can be read by the reference that this returns as long as any process has one, also when
        the key has a newer version, or was deleted. Its memory counts as used until then.

        Args:
            key_or_ref: a key, or the name of an entry of a state dict (``f"{key}/{name}"``), whose
                newest version is held; or a reference.
            timeout: seconds.

        Raises:
            KeyNotFoundError: the key does not exist.
            PartialPutError: no version of it is whole.
            VersionGoneError: the version was overwritten or deleted, and nobody held it.
        """
        with self._watch("hold", timeout) as clock:
            of = _named(key_or_ref)
            clock.key, clock.version = of.key, of.version
            session, channel = self._here(clock) or await self._join(clock)
            await check_incarnation(session, channel, clock, of.key, of.version, of.incarnation)
            timeline = of.timeline if of.incarnation else -1
            with HeldRef.beginning(session.holder) as ref:
                what = of.key, of.version, caller(), timeline
                hold = m.Hold(channel.next_id(), ref.ident, *what)
                reply = await channel.call(hold, m.CommittedIn, clock.left(), quick=True)
                clock.version = reply.versions[0]
                return ref.refers(refs_of([of.key], reply, session.welcome.incarnation)[0])

    async def wait_any(
        self, refs: Iterable[R], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[R], list[R]]:
        """Wait until some of several values can be read, or are gone for good, which reading them
        then says.

        Args:
            refs: keys, which are ready when they have a complete version; ``ObjectRef``, which are
                ready when their key has, or ever had, that version or a newer one, or was rewound
                to before it; ``HeldRef``, which always are. Those of an incarnation of the store
                that is gone are ready, too. Each at most once.
            num_returns: how many to wait for.
            timeout: seconds after which this returns with fewer; 0: at once; None: it takes as long
                as it takes, whatever the store's timeout is.

        Returns:
            What is ready, at most ``num_returns`` of it, and all the others; each in the order of
            ``refs``.

        Raises:
            ConfigurationError: ``num_returns`` is not between 1 and the number of refs, or one of
                the refs comes twice.
            VersionGoneError: one of them belongs to another store.
            UnsupportedValueError: something else than keys and references is given.
            StoreClosedError: the server has ended.
        """
        with self._watch("wait_any", timeout) as clock:
            wanted = _listed(refs)
            if type(num_returns) is not int or not 0 < num_returns <= max(1, len(wanted)):
                raise ConfigurationError(
                    f"num_returns is from 1 to the number of refs, {len(wanted)}, not "
                    f"{num_returns!r}"
                )
            named = [_named(ref) for ref in wanted]
            if len(set(wanted)) < len(wanted):
                raise ConfigurationError("wait_any waits for each ref once, and one comes twice")
            if not wanted:
                return [], []
            clock.entries, clock.key = len(wanted), named[0].key
            flags = await self._wait_any(list(wanted), num_returns, clock, timeout is None)
        ready = [at for at, is_ready in enumerate(flags) if is_ready][:num_returns]
        chosen = set(ready)
        pending = [ref for at, ref in enumerate(wanted) if at not in chosen]
        return [wanted[at] for at in ready], pending

    async def _wait_any(
        self, refs: list[AnyRef], count: int, clock: Clock, for_ever: bool
    ) -> list[bool]:
        session, channel = self._here(clock) or await self._join(clock)
        _check_here(refs, session)
        named = [_awaited(ref, session.welcome.incarnation) for ref in refs]
        if clock.timeout != 0:
            request = m.WaitAny(channel.next_id(), named, count)
            try:
                left = None if for_ever else clock.left()
                return (await channel.call(request, m.Flags, left)).flags
            except BaseException as error:
                channel.cancel(request.id)
                if not isinstance(error, StoreTimeoutError):
                    raise
        now = m.WaitAny(channel.next_id(), named, 0)
        return (await channel.call(now, m.Flags, STATE_S)).flags

    async def free(
        self, refs: Iterable[ObjectRef | HeldRef], *, timeout: float | None = None
    ) -> int:
        """End all references to these versions, of all processes and on their way, at once.

        Objects without a key are gone then, and so are versions of keys that have a newer one;
        reading them raises ``VersionGoneError``. A version that its key still has stays there.
        Tensors that were read without a copy remain valid.

        Returns:
            How many of the versions somebody held.

        Raises:
            UnsupportedValueError: something else than references is given.
            VersionGoneError: one of them belongs to another store.
        """
        with self._watch("free", timeout) as clock:
            given = _listed(refs)
            things: Iterable[object] = given
            for ref in things:
                if not isinstance(ref, ObjectRef | HeldRef):
                    hint = "; a key is deleted with delete" if isinstance(ref, str) else ""
                    raise UnsupportedValueError(
                        f"free takes references, not {type(ref).__qualname__}{hint}"
                    )
            named = [_named(ref) for ref in given]
            clock.entries = len(named)
            if not named:
                return 0
            session, channel = self._here(clock) or await self._join(clock)
            _check_here(given, session)
            current = session.welcome.incarnation
            here = [ref for ref in named if ref.incarnation in (0, current)]
            which = [(r.key, r.version, r.timeline if r.incarnation else -1) for r in here]
            freed = m.Free(channel.next_id(), which, session.next_id())
            return (await channel.call(freed, m.Deleted, clock.left())).count

    async def refs(self, *, timeout: float | None = None) -> list[RefReport]:
        """Return every version that is held, by whom, and since when. With
        ``TORCHSTORE_TRACE_REFS=1`` in the environment of a process, also which line of it has made
        the reference. Raises only what every operation may raise.
        """
        with self._watch("refs", timeout) as clock:
            return (await self._call(clock, m.RefsReply, m.Refs)).refs


def _named(ref: object) -> ObjectRef:
    """What is referred to; version 0 for a key alone.

    Raises:
        UnsupportedValueError: it is no reference, or its key is invalid.
        VersionGoneError: there never was such a version.
    """
    if isinstance(ref, HeldRef):
        ref = ref.ref
    if not isinstance(ref, ObjectRef):
        return ObjectRef(check_key(ref), 0)
    check_exact(ref.key, ref.version)
    if ref.key or not ref.incarnation:  # otherwise it is an object without a key
        key = check_key(ref.key)
        if key is not ref.key:
            return ObjectRef(key, ref.version, ref.incarnation, ref.timeline)
    return ref


def _awaited(ref: AnyRef, incarnation: int) -> tuple[str, int, int]:
    """The key, the version and the timeline to wait for. What is held, or of another incarnation
    and so gone for good, is like an object without a key: there is nothing to wait for.
    """
    of = _named(ref)
    if isinstance(ref, HeldRef) or of.incarnation not in (0, incarnation):
        return "", 1, -1
    return of.key, of.version, of.timeline if of.incarnation else -1


def _listed(refs: Iterable[R]) -> list[R]:
    if isinstance(refs, (str, ObjectRef, HeldRef)):
        raise UnsupportedValueError("a list of references is needed, not a single one")
    return listed(refs, "a list of references is needed")


def _check_here(refs: Iterable[object], session: Session) -> None:
    """Check that no reference is one of another store: where it is held, or one that this process
    is connected to. All others of another incarnation are of one that is gone.

    Raises:
        VersionGoneError: one is.
    """
    here = session.welcome
    for ref in refs:
        of = ref.ref if isinstance(ref, HeldRef) else ref
        if not isinstance(of, ObjectRef) or of.incarnation in (0, here.incarnation):
            continue
        place = known_place(of.incarnation)
        name = ref.store_name if isinstance(ref, HeldRef) else here.store_name
        if place is not None or name != here.store_name:
            raise VersionGoneError(
                f"{ref!r} belongs to store {(place.name if place else name)!r} (incarnation "
                f"{of.incarnation}), and this is store {here.store_name!r} (incarnation "
                f"{here.incarnation}): ask that store",
                key=of.key,
                details={
                    "incarnation": of.incarnation,
                    "current_incarnation": here.incarnation,
                },
            )
