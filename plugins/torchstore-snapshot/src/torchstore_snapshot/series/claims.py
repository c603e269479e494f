"""Claims: how others know that a take is running, and which files of others it may refer to.

A take publishes its claim before it writes or reads anything, and removes it when it is committed
or has failed. While the claim is *reading*, the take may refer to any file of any snapshot; then it
names the files that it may refer to. A claim is alive for as long as its process is, which any
process on the same host can tell; on other hosts, while it is renewed from time to time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core.errors import TorchStoreError
from torchstore_snapshot.errors import TakeLostError
from torchstore_snapshot.format.owners import host, started
from torchstore_snapshot.format.paths import claim_file, new_take_id, take_of, temporary
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.naming import no_folder

__all__ = ["GRACE_S", "Claim", "Record", "alive", "claims_in", "decode", "give_up", "require"]
__all__ += ["outlive", "withdraw"]

#: Seconds without a sign of life after which a take on another host counts as dead.
GRACE_S = 900.0
_RENEWED_S = 60.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
# Stands for the host of a claim that does not end with its process.
_ANY_HOST = "any"
# How often a folder is made that others, whose take has failed, remove.
_TRIES = 10


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a claim says.

    Args:
        take: the id of the take.
        host: the host, since it was started, and the name space of ``pid``; empty if nothing is
            known but the id.
        pid, started: the process, and when it was started, in ticks of that host.
        files: the files of earlier takes that this one may refer to, as (folder, name); None while
            it may be any.
        lost: the take was given up by others, who remove its files.
        after: the sequence of the snapshot that this one refers to, so that its own is greater.
        retires: this is no take, but a program that is about to make the snapshot of that take
            invisible; see :mod:`.retiring`.
        commits: the take is about to replace what is there, and others wait for it.
        made: how many folders the take has made: its own, and those above it. They are removed with
            the claim unless there is something in them.
        lets_go: the files, as (folder, name), that are garbage as soon as the claim is dead and no
            snapshot refers to them: those of a snapshot that is replaced or made invisible. So they
            are known as such if the program is killed before it removes them.
    """

    take: str
    host: str
    pid: int
    started: int
    files: tuple[tuple[str, str], ...] | None = None
    lost: bool = False
    after: int = 0
    retires: str = ""
    commits: bool = False
    made: int = 0
    lets_go: tuple[tuple[str, str], ...] = ()


_records = msgspec.json.Decoder(Record)


def decode(data: bytes) -> Record | None:
    """Return what a claim says; None if it cannot be read."""
    try:
        return _records.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def alive(record: Record, modified: float, grace: float, now: Callable[[], float]) -> bool:
    """Whether a take is running.

    Args:
        modified: when its claim was renewed last, in seconds since the epoch.
        grace: seconds that may have passed since, if the process cannot be looked at.
        now: the time by the clock that has said ``modified``; only called where that matters.
    """
    if record.lost:
        return False
    if record.host == host():
        return started(record.pid) == record.started
    if not grace or time.time() - modified < grace:
        return grace > 0
    return now() - modified < grace  # the clock of this host may be wrong


def clock_of(storage: Storage) -> float:
    """Return the time, in seconds since the epoch, by the clock that files in a folder are dated
    by: that of a server, perhaps. If nothing can be written there, by the clock of this host.
    """
    take = new_take_id()
    name = temporary("clock", take)
    try:
        storage.publish(name, b"", take=take, overwrite=True, durable=False)
        dates = [info.modified for info in storage.list() if info.name == name]
        storage.delete(name)
    except (OSError, TorchStoreError):
        return time.time()
    return dates[0] if dates else time.time()


def require(storage: Storage, take: str) -> Record:
    """Return what the claim of a take that is running says.

    Raises:
        TakeLostError: others have given the take up.
    """
    record: Record | None = None
    with contextlib.suppress(FileNotFoundError):
        record = decode(storage.read(claim_file(take)))
    if record is None or record.lost:
        raise TakeLostError(
            f"the take {take} at {storage.url!r} was given up by a garbage collection, because it "
            "showed no sign of life; take the snapshot again",
            details={"path": storage.url, "take": take},
        )
    return record


def claims_in(storage: Storage, grace: float = GRACE_S) -> list[tuple[Record, bool]]:
    """Return what the claims in a folder say, and whether those who made them are running.

    One that cannot be read may be about to be written, or there was no room for it: then its take
    may refer to any file, and may as well be about to make a snapshot invisible.
    """
    found: list[tuple[Record, bool]] = []
    now = functools.cache(functools.partial(clock_of, storage))
    for info in storage.list():
        take = take_of(info.name)
        if take is None or info.name != claim_file(take):
            continue
        try:
            record = decode(storage.read(info.name)) or Record(take, "", 0, 0, None)
        except FileNotFoundError:
            continue  # the take has ended
        found.append((record, alive(record, info.modified, grace, now)))
    return found


def give_up(storage: Storage, take: str) -> None:
    """Say in the claim of a take that it is lost: it cannot be committed any more, and what it has
    written may be collected at once. If the claim is gone, do nothing.

    Raises:
        OSError: the storage failed. There may be no claim then.
    """
    name = claim_file(take)
    with contextlib.suppress(FileNotFoundError):
        record = decode(storage.read(name))
        if record is None or record.lost:
            return
        lost = msgspec.json.encode(msgspec.structs.replace(record, lost=True))
        try:
            storage.publish(name, lost, take=take, overwrite=True, durable=False)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            storage.delete(name)  # which makes room for it
            storage.publish(name, lost, take=take, overwrite=True, durable=False)


def outlive(storage: Storage, take: str) -> None:
    """Say in the claim of a take that nobody knows whether the take is committed: a request that
    would do so may still be on its way. The claim stays, and is alive until it is old, whether or
    not its process is.

    Raises:
        OSError: the storage failed.
        TakeLostError: the take was given up.
    """
    record = msgspec.structs.replace(require(storage, take), host=_ANY_HOST, commits=False)
    data = msgspec.json.encode(record)
    storage.publish(claim_file(take), data, take=take, overwrite=True, durable=False)


def withdraw(storage: Storage, take: str, *, keep_folder: bool) -> None:
    """Remove the claim of a take of another process that has ended, or has handed it over; as
    :meth:`Claim.release`.

    Raises:
        OSError: the storage failed.
    """
    record: Record | None = None
    with contextlib.suppress(FileNotFoundError):
        record = decode(storage.read(claim_file(take)))
    _remove(storage, take, record.made if record is not None and not keep_folder else 0)


def _remove(storage: Storage, take: str, made: int) -> None:
    with storage.emptying() if made else contextlib.nullcontext():
        storage.delete(claim_file(take))
    if made > 1:
        storage.remove_if_empty(made)


class Claim:
    """The claim of a take of this process. It renews itself until it is stopped.

    Args:
        storage: where the snapshot is taken.
        take: the id of the take.
        reading: the take is about to read the manifest of another snapshot, to refer to its files.
        retires, lets_go: as for :class:`Record`.

    Raises:
        OSError: it cannot be published.
    """

    def __init__(
        self,
        storage: Storage,
        take: str,
        *,
        reading: bool = False,
        retires: str = "",
        lets_go: Sequence[tuple[str, str]] = (),
    ) -> None:
        own = _own(take, None if reading else ())
        own = msgspec.structs.replace(own, retires=retires, lets_go=tuple(lets_go))
        self._set(storage, own)
        try:
            self._publish()
        except OSError as error:
            if not retires or error.errno not in _FULL:
                raise
            # To remove something must be possible on a full disk, too. Without contents, it can
            # only be told by its age whether the one who made it still runs.
            storage.create(claim_file(take), 0).close(durable=False)
        self._start()

    def _set(self, storage: Storage, record: Record) -> None:
        self._storage, self._record, self._stays = storage, record, False
        #: Whether the manifest of the take may be in its place: from just before it is put there.
        self.may_be_visible = False
        self._stopped = False
        # Both for a collection of garbage in the thread that renews it, which may end it.
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.RLock()

    @classmethod
    def begin(cls, storage: Storage, take: str, *, durable: bool, reading: bool = False) -> Claim:
        """Make the folder of a take, and the claim in it. A take that is killed before it has a
        claim leaves no folder of that name, unless the storage cannot rename folders.

        Args:
            durable: as for :meth:`.Storage.prepare`.

        Raises:
            NotAtomicError: no snapshot can be taken there.
            OSError: the storage failed. What was made is gone again.
        """
        claim = cls.__new__(cls)
        claim._set(storage, _own(take, None if reading else ()))

        def publish(folder: Storage, made: int) -> None:
            made = max(claim.made, made)
            claim._record = msgspec.structs.replace(claim._record, made=made)
            claim._publish(folder)

        tries = 0
        while True:
            try:
                storage.prepare(durable=durable, first=publish)
                claim._start()
                return claim
            except BaseException as error:
                tries += 1
                if not isinstance(error, FileNotFoundError) or tries == _TRIES:
                    claim._stop_soon()
                    with contextlib.suppress(OSError, TorchStoreError):
                        _remove(storage, take, claim.made)  # an interrupt may come when it is there
                    if isinstance(error, FileNotFoundError):
                        raise no_folder(storage.url, error) from error
                    raise
                # A garbage collection, or a take that failed, has removed the empty folder.

    @classmethod
    def adopt(cls, storage: Storage, take: str) -> Claim:
        """Take over the claim of a take that another process has begun, and this one goes on with.

        Raises:
            TakeLostError: it is gone.
        """
        claim = cls.__new__(cls)
        claim._set(storage, _own(take, ()))
        found = claim._found()
        claim._record = msgspec.structs.replace(
            _own(take, found.files), after=found.after, made=found.made
        )
        try:
            claim._publish()
        except BaseException:
            claim._stop_soon()
            with contextlib.suppress(OSError, TorchStoreError):
                storage.delete(claim_file(take))  # nobody goes on with the take
            raise
        claim._start()
        return claim

    @property
    def take(self) -> str:
        """The id of the take."""
        return self._record.take

    @property
    def after(self) -> int:
        """The sequence of the snapshot that the take refers to; 0 if there is none."""
        return self._record.after

    def refer(self, files: Sequence[tuple[str, str]], after: int) -> None:
        """Say which files of earlier takes, as (folder, name), this one may refer to, and the
        sequence of the snapshot that named them.
        """
        with self._lock:
            self._record = msgspec.structs.replace(self._record, files=tuple(files), after=after)
            self._publish()

    def commits(self, value: bool) -> None:
        """Say whether the take is about to replace what is there; see :func:`.retiring.await_turn`.

        Raises:
            TakeLostError: others have given this take up.
        """
        with self._lock:
            self._found()
            self._record = msgspec.structs.replace(self._record, commits=value)
            self._publish()

    def let_go(self, files: Sequence[tuple[str, str]]) -> None:
        """Say which files, as (folder, name), are garbage when the take is committed.

        Raises:
            TakeLostError: others have given this take up.
        """
        with self._lock:
            self._found()
            self._record = msgspec.structs.replace(self._record, lets_go=tuple(files))
            self._publish()

    def leave_rest(self, retired: str) -> None:
        """Say that the snapshot of another take was replaced or made invisible: all that is left to
        do is to remove what it lets go, which any garbage collection may do. The claim stays until
        it is withdrawn, unless there is no room for it. Never raises.
        """
        self.stop()
        before = self._record
        self._record = msgspec.structs.replace(before, retires=retired, files=(), lost=True)
        try:
            self._publish()
        except (OSError, TorchStoreError):
            self._record = before
            self.release()

    def outlive(self) -> None:
        """See :func:`outlive`. Never raises: if it cannot be said, the claim stays as it is."""
        self.stop()
        self._stays = True
        with contextlib.suppress(OSError, TorchStoreError):
            outlive(self._storage, self._record.take)

    def stop(self) -> None:
        """Renew it no longer. It remains."""
        self._stop_soon()
        with self._lock:  # no renewal is under way
            pass

    def _stop_soon(self) -> None:
        self._stopped = True
        self._told.put(None)

    def check(self) -> None:
        """Stop, and raise TakeLostError if others have given this take up."""
        self.stop()
        self._found()

    @property
    def made(self) -> int:
        """How many folders the take has made."""
        return self._record.made

    def release(self, *, keep_folder: bool = False) -> None:
        """Remove the claim, and the folders that the take has made if there is nothing in them,
        unless the claim says that others may do the rest, or that it stays. Never raises: while its
        process is alive, a claim protects too much.

        Args:
            keep_folder: others will write something there.
        """
        self.stop()
        if self._record.lost or self._stays:
            return
        with contextlib.suppress(OSError, TorchStoreError):
            _remove(self._storage, self._record.take, 0 if keep_folder else self._record.made)

    def abandon(self) -> None:
        """Say that the take has failed, so that a garbage collection may remove its files at once;
        if the claim is gone, or stays, do nothing. Never raises.
        """
        self.stop()
        with contextlib.suppress(OSError, TorchStoreError):
            if self._stays or self._found().host == _ANY_HOST:
                return
            give_up(self._storage, self._record.take)
            self._record = msgspec.structs.replace(self._record, lost=True)

    def _found(self) -> Record:
        return require(self._storage, self._record.take)

    def _publish(self, folder: Storage | None = None) -> None:
        data = msgspec.json.encode(self._record)
        name = claim_file(self._record.take)
        folder = folder or self._storage
        folder.publish(name, data, take=self._record.take, overwrite=True, durable=False)

    def _start(self) -> None:
        # A daemon: a claim is no reason for a program to go on.
        threading.Thread(target=self._renew, name="torchstore-claim", daemon=True).start()

    def _renew(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._told.get(timeout=_RENEWED_S)
            with self._lock:
                if self._stopped:
                    return
                try:
                    if self._found().host == _ANY_HOST:
                        return
                    self._publish()
                    if self._record.lost:  # since it began to publish, in this thread
                        give_up(self._storage, self._record.take)
                except TakeLostError:
                    return  # the commit will notice
                except (OSError, TorchStoreError):
                    continue  # it may work the next time


def _own(take: str, files: tuple[tuple[str, str], ...] | None) -> Record:
    return Record(take, host(), os.getpid(), started(os.getpid()) or 0, files)
