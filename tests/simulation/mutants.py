"""Bugs that are put into the store while it runs, to see that the simulator finds them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec
import pytest

from torchstore_core.errors import StoreFullError
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.catalog import Catalog
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.collective.unfinished import UnfinishedVersions
from torchstore_core.server.index.gone.evictions import Evictions
from torchstore_core.server.index.records import (
    Manifest,
    SessionRecord,
    Stored,
    Txn,
    Value,
    retain_version,
)
from torchstore_core.server.index.references import holds
from torchstore_core.server.index.references.holds import Holds
from torchstore_core.server.index.timelines import Branch, Timelines
from torchstore_core.server.keeping.log import SPARE, Log
from torchstore_core.server.keeping.recorded import RecordedController
from torchstore_core.server.keeping.recorded_spilling import RecordedSpilling
from torchstore_core.server.keeping.returning import Returning
from torchstore_core.server.memory.detached_sessions import DetachedSessions
from torchstore_core.server.serving.conversation import Conversation
from torchstore_core.server.spilling.moves import Mover, Site
from torchstore_core.server.spilling.policy import Residency, State, Tracked
from torchstore_core.server.spilling.space import SpillSpace
from torchstore_core.server.spilling.spilling import Spilling
from torchstore_core.wire import messages as m
from torchstore_core.wire.volumes.spilling import FreeSpill, SpillDone

__all__ = ["MUTANTS"]


def _drops_a_lease_early(patch: pytest.MonkeyPatch) -> None:
    """A lease ends with the message before the one that gives it back."""
    answer = Conversation._answer

    def too_early(
        self: Conversation, request: m.Request, session: SessionRecord, body: bytes = b""
    ) -> object:
        if session.leases and not isinstance(request, m.Release):
            self._server.controller.release(session, [next(iter(session.leases))], [])
        return answer(self, request, session, body)

    patch.setattr(Conversation, "_answer", too_early)


def _flips_in_two_steps(patch: pytest.MonkeyPatch) -> None:
    """The first key of a batch becomes visible, and in the loop's next turn the others."""
    commit = Controller.commit

    def in_two(
        self: Controller, session: SessionRecord, txn_id: int, body: bytes = b""
    ) -> list[int]:
        txn = session.txns.get(txn_id)
        if txn is None or len(txn.plain) < 2 or txn.contributions:
            return commit(self, session, txn_id)
        rest = txn.plain[1:]
        txn.plain = txn.plain[:1]
        for value in rest:
            value.version = self.catalog._next_version(value.key)  # what the reply says
        versions = commit(self, session, txn_id)
        session.txns[-txn_id] = Txn(rest, {}, rest, [], rest)

        def later() -> None:
            if session.txns.pop(-txn_id, None) is not None:
                self._apply(self.catalog.flip(rest), plain=rest)

        asyncio.get_running_loop().call_soon(later)
        return versions

    patch.setattr(Controller, "commit", in_two)


def _forgets_puts_on_resuming(patch: pytest.MonkeyPatch) -> None:
    """A session whose channel is opened again has lost its unfinished puts."""
    join = Controller.join_session

    def forgetful(self: Controller, token: bytes) -> SessionRecord:
        session = join(self, token)
        self.abort(session, list(session.txns))
        return session

    patch.setattr(Controller, "join_session", forgetful)


def _reuses_versions(patch: pytest.MonkeyPatch) -> None:
    """After a delete a key begins at version 1 again."""
    patch.setattr(Catalog, "_bury", lambda self, key, version: None)


def _settles_before_the_base(patch: pytest.MonkeyPatch) -> None:
    """A partial version does not wait for older ones that are on their way."""

    def hasty(
        self: UnfinishedVersions, key: str, generation: Generation, branch: Branch | None
    ) -> bool:
        if not generation.is_complete:
            return False
        return not generation.is_partial or type(self._base(key, branch)) is Manifest

    patch.setattr(UnfinishedVersions, "_is_ready", hasty)


def _frees_what_may_still_be_written(patch: pytest.MonkeyPatch) -> None:
    """The memory of a put that was given up is free before its bytes have stopped travelling."""

    def at_once(self: Conversation, session: SessionRecord, request: m.Abort) -> None:
        self._server.controller.abort(session, request.txns, remember=self._liveness)

    patch.setattr(Conversation, "_abort", at_once)


def _frees_what_the_dead_may_still_write(patch: pytest.MonkeyPatch) -> None:
    """What a process gave up just before its death does not wait for the end of its writes."""
    abort = Conversation._abort

    def too_early(self: Conversation, session: SessionRecord, request: m.Abort) -> None:
        if session.met:
            abort(self, session, request)
        else:
            self._server.controller.abort(session, request.txns, remember=self._liveness)

    patch.setattr(Conversation, "_abort", too_early)


def _forgets_leases_of_a_lost_relay(patch: pytest.MonkeyPatch) -> None:
    """When a relay is gone, so is what the clients beyond it have mapped."""

    def detach(self: DetachedSessions, session: SessionRecord, process: object) -> None:
        self._controller.close_session(session)

    patch.setattr(DetachedSessions, "detach", detach)


def _counts_late(patch: pytest.MonkeyPatch) -> None:
    """What is sent counts as in flight only when the loop has turned once more."""
    lend = Holds.lend

    def late(self: Holds, session: SessionRecord, ident: int, number: int) -> None:
        asyncio.get_running_loop().call_soon(lend, self, session, ident, number)

    patch.setattr(Holds, "lend", late)


def _releases_twice(patch: pytest.MonkeyPatch) -> None:
    """A reference that is dropped counts for two."""
    unhold = Holds.unhold

    def twice(self: Holds, session: SessionRecord, idents: Iterable[int]) -> None:
        held = [session.holds[one].version for one in idents if one in session.holds]
        unhold(self, session, idents)
        for version in held:
            if version.count:
                self._end(version)

    patch.setattr(Holds, "unhold", twice)


def _has_no_grace(patch: pytest.MonkeyPatch) -> None:
    """What is in flight ends with its sender."""
    ended = Holds.session_ended

    def at_once(self: Holds, session: SessionRecord) -> None:
        self._grace_s, grace_s = 0.0, self._grace_s
        ended(self, session)
        self._grace_s = grace_s

    patch.setattr(Holds, "session_ended", at_once)


def _ignores_what_the_dead_received(patch: pytest.MonkeyPatch) -> None:
    """The claim of a process that has died since changes nothing."""
    claim = Holds.claim

    def ignored(self: Holds, session: SessionRecord, request: m.Claim) -> None:
        if session.closed is None:
            claim(self, session, request)

    patch.setattr(Holds, "claim", ignored)


def _forgets_what_overtakes(patch: pytest.MonkeyPatch) -> None:
    """A child that is read before its parent inherits nothing."""
    adopt = Holds.adopt

    def only_known(self: Holds, session: SessionRecord, number: int, pid: int = 0) -> None:
        if number in self._tickets:
            adopt(self, session, number, pid)

    patch.setattr(Holds, "adopt", only_known)


def _reads_numbers_used_again(patch: pytest.MonkeyPatch) -> None:
    """A reference to a version that was rewound reads the one that has its number now."""
    patch.setattr(Catalog, "check_timeline", lambda self, key, version, timeline: None)


def _forgets_what_was_evicted(patch: pytest.MonkeyPatch) -> None:
    """A key that was evicted begins at version 1 again."""

    def hide(self: Catalog, key: str) -> None:
        del self.newest[key]
        self.names.remove(key)

    patch.setattr(Catalog, "hide", hide)


def _evicts_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """What readers have leased has to make room, too."""
    evict = Evictions.evict

    def at_once(self: Evictions, key: str, value: Value) -> list[Value]:
        freed = evict(self, key, value)
        return freed if value in freed or value.uses else [*freed, value]

    patch.setattr(Tracked, "is_free_to_go", True)
    patch.setattr(Evictions, "evict", at_once)


def _begins_no_timeline(patch: pytest.MonkeyPatch) -> None:
    """All that was ever rewound is of one timeline."""

    def begin(self: Timelines) -> int:
        self.last = 1
        return 1

    patch.setattr(Timelines, "begin", begin)


def _forgets_puts_when_it_comes_back(patch: pytest.MonkeyPatch) -> None:
    """A server that was killed gives up all unfinished puts, also those that are being written."""
    resume = Returning.resume

    def forgetful(self: Returning, session: SessionRecord, said: m.Resume) -> None:
        resume(self, session, msgspec.structs.replace(said, txns=[]))

    patch.setattr(Returning, "resume", forgetful)


def _does_twice_what_was_not_answered(patch: pytest.MonkeyPatch) -> None:
    """What the server has done before it was killed, and not answered, it does once more."""
    patch.setattr(Returning, "again", lambda self, session, request: None)


def _believes_what_another_life_was_told(patch: pytest.MonkeyPatch) -> None:
    """What a client has said to the life before counts, too, though it has begun more since."""
    resume = Returning.resume

    def credulous(self: Returning, session: SessionRecord, said: m.Resume) -> None:
        self._waiting.setdefault(session.token, [])
        resume(self, session, msgspec.structs.replace(said, life=self._life))

    patch.setattr(Returning, "resume", credulous)


def _takes_a_part_for_all(patch: pytest.MonkeyPatch) -> None:
    """What a client has is what the first message says that it tells it in."""
    resume = Returning.resume

    def hasty(self: Returning, session: SessionRecord, said: m.Resume) -> None:
        resume(self, session, msgspec.structs.replace(said, last=True))

    patch.setattr(Returning, "resume", hasty)


def _hears_twice(patch: pytest.MonkeyPatch) -> None:
    """What was recorded and not yet taken out of the kernel's buffer takes effect twice."""
    patch.setattr(Returning, "was_recorded", lambda self, session, body: False)


def _forgets_what_was_written_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """A log that is written anew lacks what was recorded while it was."""
    patch.setattr(Log, "append_from", lambda self, other, start: None)


def _drops_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """What readers have leased leaves memory, too, if it is on disk."""

    def at_once(
        self: Residency,
        state: State,
        nbytes: int,
        among: Callable[[Tracked], bool] = lambda tracked: True,
        most: int = sys.maxsize,
    ) -> list[Tracked]:
        if state is State.CLEAN and nbytes > 0:
            return list(self._by_use[state].values())[:1]
        return oldest(self, state, nbytes, among, most)

    oldest = Residency.oldest
    patch.setattr(Residency, "oldest", at_once)


def _uses_pages_again(patch: pytest.MonkeyPatch) -> None:
    """With the first of the values that share a page of the disk, the page is free."""
    patch.setattr(SpillSpace, "_share", lambda self, extents: None)


def _forgets_the_disk(patch: pytest.MonkeyPatch) -> None:
    """What is on disk when the server is killed may be overwritten."""
    patch.setattr(SpillSpace, "occupy", lambda self, extents, file_size: None)


def _tells_late_what_is_freed(patch: pytest.MonkeyPatch) -> None:
    """Objects are told a moment later what is free, when something may have been written there."""

    def late(self: Mover, site: Site, freed: Sequence[tuple[int, int]]) -> None:
        order = FreeSpill(0, [*freed])
        self._later(0, lambda: site.file.submit(order, lambda done: None, lambda at: True))

    patch.setattr(Mover, "_free", late)


def _forgets_what_was_read(patch: pytest.MonkeyPatch) -> None:
    """What has come back from disk is not recorded."""
    patch.setattr(RecordedSpilling, "_read_ended", lambda self, tracked: None)


def _lets_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Requests for which there will be no room are not refused."""
    patch.setattr(Spilling, "_retry_later", lambda self: None)


def _hears_last_words_twice(patch: pytest.MonkeyPatch) -> None:
    """What was recorded and not taken out is handled once more if its client has left."""
    handle_first = Conversation.handle_first

    def heard(self: Conversation, body: bytes, *, is_last: bool = False) -> None:
        if is_last:
            self.hear_last(body)
        else:
            handle_first(self, body)

    patch.setattr(Conversation, "handle_first", heard)


def _forgets_unsent_answers(patch: pytest.MonkeyPatch) -> None:
    """A log that is written anew lacks the answers that the kernel had no room for."""
    patch.setattr(Conversation, "_note_unsent", lambda self, request, reply: None)


def _forgets_what_it_could_not_write(patch: pytest.MonkeyPatch) -> None:
    """What was being written when the disk failed is not written again, nor given up."""
    written = Mover._written

    def ignoring(
        self: Mover, site: Site, batch: Sequence[Tracked], troubles: int, done: SpillDone
    ) -> None:
        well = [at for at in range(len(batch)) if done.trouble(at) is None]
        sums = [done.sums[at] for at in well]
        written(self, site, [batch[at] for at in well], troubles, SpillDone(0, sums))

    patch.setattr(Mover, "_written", ignoring)


def _does_what_it_cannot_record(patch: pytest.MonkeyPatch) -> None:
    """What cannot be refused is done at once, also if the log has no room for it."""

    def at_once(
        self: RecordedController, kind: int, serial: int, body: bytes, do: Callable[[], None]
    ) -> None:
        with contextlib.suppress(StoreFullError):
            if not self._silent:
                self.log.append(kind, serial, body)
        do()

    patch.setattr(RecordedController, "_sooner_or_later", at_once)


def _forgets_what_waits_for_room(patch: pytest.MonkeyPatch) -> None:
    """What cannot be refused, and finds no room in the log, is forgotten."""

    def never(self: RecordedController) -> None:
        self._late.clear()

    patch.setattr(RecordedController, "_catch_up", never)


def _answers_what_it_cannot_record(patch: pytest.MonkeyPatch) -> None:
    """A put is executed and answered though the log has no room for it."""

    def append(self: RecordedController, kind: int, serial: int, body: bytes) -> None:
        with contextlib.suppress(StoreFullError):
            if not self._silent:
                self.log.append(kind, serial, body, SPARE)

    patch.setattr(RecordedController, "_append", append)


def _takes_out_what_waits_for_room(patch: pytest.MonkeyPatch) -> None:
    """What waits for room in the log is taken out of the kernel's buffer, as if it were there."""
    patch.setattr(RecordedController, "when_recorded", lambda self, call: False)


def _seals_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    """The memory of what was made in the store counts as leased by nobody once it is put."""
    seal = Controller.seal

    def unleased(
        self: Controller, session: SessionRecord, request: m.Seal, body: bytes = b""
    ) -> list[int]:
        versions = seal(self, session, request, body)
        self.release(session, [request.lease], [])
        return versions

    patch.setattr(Controller, "seal", unleased)


def _forgets_who_holds_a_state_dict(patch: pytest.MonkeyPatch) -> None:
    """A state dict that references hold goes with the next version of its key."""

    def retain(stored: Stored) -> None:
        if type(stored) is not Manifest:
            retain_version(stored)

    patch.setattr(holds, "retain_version", retain)


#: By what it does wrong.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "drops a lease one message early": _drops_a_lease_early,
    "flips a batch in two steps": _flips_in_two_steps,
    "forgets the puts of a session that resumes": _forgets_puts_on_resuming,
    "reuses a version number after a delete": _reuses_versions,
    "settles a partial version before its base": _settles_before_the_base,
    "frees memory that may still be written": _frees_what_may_still_be_written,
    "frees memory that the dead may still write": _frees_what_the_dead_may_still_write,
    "forgets the leases of a lost relay": _forgets_leases_of_a_lost_relay,
    "counts a reference in flight late": _counts_late,
    "releases a reference twice": _releases_twice,
    "keeps no reference in flight when its sender is gone": _has_no_grace,
    "ignores what a dead process has received": _ignores_what_the_dead_received,
    "forgets a fork whose child is read first": _forgets_what_overtakes,
    "reads a version that has the number of one that is gone": _reads_numbers_used_again,
    "does not tell one rewind from the next": _begins_no_timeline,
    "forgets the versions of a key that is evicted": _forgets_what_was_evicted,
    "evicts what is being read": _evicts_what_is_read,
    "forgets the puts of its sessions when it comes back": _forgets_puts_when_it_comes_back,
    "does twice what it had not answered when it was killed": _does_twice_what_was_not_answered,
    "believes what its life before was told": _believes_what_another_life_was_told,
    "takes a part of what a client has for all of it": _takes_a_part_for_all,
    "hears twice what it had recorded when it was killed": _hears_twice,
    "forgets what was recorded while its log was written anew": _forgets_what_was_written_meanwhile,
    "drops from memory what is being read": _drops_what_is_read,
    "uses pages of its disk again that are in use": _uses_pages_again,
    "forgets what is on its disk when it comes back": _forgets_the_disk,
    "tells late what is free at a URL": _tells_late_what_is_freed,
    "forgets what it has read from its disk when it comes back": _forgets_what_was_read,
    "lets requests wait for ever when its disk is full": _lets_wait_for_ever,
    "hears twice the last words of a client that has left": _hears_last_words_twice,
    "forgets in a new log what it could not answer yet": _forgets_unsent_answers,
    "forgets what its disk could not write": _forgets_what_it_could_not_write,
    "does what its log has no room for": _does_what_it_cannot_record,
    "forgets what waits for room in its log": _forgets_what_waits_for_room,
    "answers what its log has no room for": _answers_what_it_cannot_record,
    "takes out of the kernel's buffer what is not in its log": _takes_out_what_waits_for_room,
    "seals what its client keeps without a lease": _seals_without_a_lease,
    "forgets who holds a state dict": _forgets_who_holds_a_state_dict,
}
