"""The thread of a client that alone uses an agent: it starts transfers and waits for their end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from torchstore_core.contracts.transport import Copy, Memory
from torchstore_core.errors import TorchStoreError, TransportError
from torchstore_rdma import layout
from torchstore_rdma.library.agent import Agent, Transfer
from torchstore_rdma.pacing import Pace
from torchstore_rdma.protocol import Exposed
from torchstore_transports.registered.registrations import Held, Registrations

__all__ = ["Engine", "Job", "NotExposedError"]

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 500e-6
# Parts of a batch under way at a time, so that the network does not wait for Python.
_AHEAD = 2
# How long the end of the process waits for that of an agent.
_EXIT_S = 1.0


#: Memory as ``(address, nbytes)``.
Range = tuple[int, int]


class NotExposedError(TransportError):
    """A copy reaches beyond what is registered of its segment, up to ``need`` bytes."""

    def __init__(self, need: int) -> None:
        super().__init__(f"not registered up to {need}")
        self.need = need


def _future() -> Future[None]:
    """One that nobody can cancel: who waits for it may be cancelled, what it stands for cannot."""
    made: Future[None] = Future()
    made.set_running_or_notify_cancel()
    return made


def _register(agent: Agent, ranges: list[Range]) -> list[Range]:
    agent.register(ranges)
    return ranges


def _bare(error: TorchStoreError, job: Job | None = None) -> TorchStoreError:
    """The same error without its traceback, which refers to the agent and would keep it alive."""
    if isinstance(error, NotExposedError):
        return NotExposedError(error.need)
    return type(error)(error.message, details={"done": job.arrived()} if job else {})


class _Flying(NamedTuple):
    """A part that is under way, and the copy that it begins with."""

    first: int
    transfer: Transfer


class Job:
    """A batch of copies. ``done`` is resolved when it has ended, and no byte of it moves then."""

    def __init__(
        self, copies: Sequence[Copy], *, write: bool, memory: Sequence[Memory] = ()
    ) -> None:
        self.copies = copies
        self.write = write
        self.memory = memory
        self.done = _future()
        self.failure = ""
        self.given_up = False
        self.parts: Iterator[layout.Part] | None = None
        self.flying: list[_Flying] = []
        self.started = 0
        self.all_started = False
        self.registered: list[Range] = []
        self.held: Held[Range] | None = None

    def arrived(self) -> int:
        """How many of the copies, counted from the first, have certainly arrived."""
        if self.all_started and not self.flying:
            return len(self.copies)
        return min([flying.first for flying in self.flying], default=self.started)


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


def _end_all() -> None:
    """At the end of the process: a thread that is in the library when the interpreter ends aborts
    the process, and tensors that die with it give the threads something to do.
    """
    mine = [engine for engine in _running if engine.pid == os.getpid()]
    for engine in mine:
        engine.stop()
    for engine in mine:
        with contextlib.suppress(TimeoutError):
            engine.ended.result(_EXIT_S)


atexit.register(_end_all)


class Engine:
    """A thread with an agent, from the first moment on, until :meth:`stop`.

    Args:
        make: creates the agent, and returns it with the name of the peer. Runs in the thread.
        exposed: the peer's segments.
        pins: registering local memory keeps its pages. Memory whose owner is known is registered
            until that dies, within ``keep``; all other is registered for each batch. If False, the
            agent has registered all there is.
        keep: bytes of memory that may stay registered, and how many pieces.
        slow: bytes go through a network that may be slow.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Agent, str]],
        exposed: dict[int, Exposed],
        *,
        pins: bool,
        keep: tuple[int, int] = (0, 0),
        slow: bool = False,
    ) -> None:
        self.exposed = exposed
        self._make = make
        self._pins = pins
        self._keep = keep
        self._slow = slow
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        # Dying owners of memory wake the thread, too. They must not take a lock, and need none.
        self._changed: SimpleQueue[None] = SimpleQueue()
        #: What is registered now: bytes, pieces, and how often any has been, since the beginning.
        self.kept = (0, 0, 0)
        #: How many parts of batches have arrived.
        self.moved = 0
        #: Over what they go, as :meth:`.Agent.route` said after the first one.
        self.route = ""
        self._stopping = False
        self._draining = False
        #: Resolved with None when the agent has been destroyed: from then on nothing moves.
        self.ended = _future()
        #: Resolved when the agent is there.
        self.started = _future()
        self.pid = os.getpid()
        _running.add(self)
        self._thread = threading.Thread(target=self._run, name="torchstore-rdma", daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it ends, or has ended."""
        return self._stopping

    def submit(self, job: Job) -> None:
        """Begin a batch. If the engine has stopped, the batch fails."""
        with self._lock:
            if not (self._stopping or self._draining):
                self._waiting.append(job)
                self._wake()
                return
        job.done.set_exception(TransportError("the connection has ended"))

    def stop(self) -> None:
        """Destroy the agent as soon as the call of the library that is under way returns."""
        with self._lock:
            self._stopping = True
        self._wake()

    def drain(self) -> None:
        """Stop when no batch is under way any more."""
        with self._lock:
            self._draining = True
        self._wake()

    def _wake(self) -> None:
        self._changed.put(None)

    # ---- in the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            agent, peer = self._make()
        except TorchStoreError as error:
            self._stopping = True
            self.ended.set_result(None)
            self.started.set_exception(_bare(error))
            return
        self.started.set_result(None)
        jobs: list[Job] = []
        most, many = self._keep
        kept: Registrations[Range] = Registrations(
            lambda memory: _register(agent, [(address, nbytes) for address, nbytes, _ in memory]),
            lambda ranges: agent.deregister(ranges),
            max_bytes=most,
            max_count=many,
            on_death=self._wake,
        )
        try:
            self._serve(agent, peer, jobs, kept)
        finally:
            arrived = [job.arrived() for job in jobs]
            for job in jobs:
                job.flying.clear()
            kept.close()
            if not agent.close():
                log.error("an agent of NIXL is still referred to, and so not destroyed")
            # What transfers were using has ended with the agent.
            for job in jobs:
                if job.held is not None:
                    kept.release(job.held)
            self.kept = (kept.nbytes, len(kept), kept.made)
            self.ended.set_result(None)
            with self._lock:
                self._stopping = True
                jobs += self._waiting
                self._waiting.clear()
            arrived += [0] * (len(jobs) - len(arrived))
            for job, done in zip(jobs, arrived, strict=True):
                why = job.failure or "the connection has ended"
                job.done.set_exception(TransportError(why, details={"done": done}))

    def _serve(self, agent: Agent, peer: str, jobs: list[Job], kept: Registrations[Range]) -> None:
        pace = Pace(_LONGEST_PAUSE_S)
        while True:
            kept.sweep()
            self.kept = (kept.nbytes, len(kept), kept.made)
            with self._lock:
                if self._stopping or (self._draining and not (jobs or self._waiting)):
                    return
                if self._waiting:
                    pace.hurry()
                jobs += self._waiting
                self._waiting.clear()
            if not jobs:
                self._changed.get()
                continue
            for job in list(jobs):
                if self._step(agent, peer, job, kept):
                    jobs.remove(job)
            if jobs:
                pace.wait(len(jobs))

    def _step(self, agent: Agent, peer: str, job: Job, kept: Registrations[Range]) -> bool:
        """Go on with a batch; whether it has ended. Of one that was given up, what is under way
        goes on, because nothing stops it.
        """
        try:
            if job.parts is None:
                job.parts = self._begin(agent, job, kept)
            for flying in list(job.flying):
                if flying.transfer.is_done():
                    self._arrived(agent, job, flying)
            if len(job.flying) < _AHEAD and not job.given_up:
                self._start(agent, peer, job, job.parts)
            if job.flying:
                return False
            if job.given_up:
                raise TransportError("it was given up")
            if job.all_started:
                self._forget(agent, job, kept)
                job.done.set_result(None)
                return True
        except TorchStoreError as error:
            if job.flying:
                # They may still move bytes, until the agent is destroyed.
                job.failure = error.message
                self._stopping = True
                return False
            self._forget(agent, job, kept)
            job.done.set_exception(_bare(error, job))
            return True
        return False

    def _start(self, agent: Agent, peer: str, job: Job, parts: Iterator[layout.Part]) -> None:
        part = next(parts, None)
        if part is None:
            job.all_started = True
            return
        job.started = part.first
        transfer = agent.prepare(peer, part, write=job.write)
        # It counts as under way even if starting it fails.
        flying = _Flying(part.first, transfer)
        job.flying.append(flying)
        if transfer.start():
            self._arrived(agent, job, flying)

    def _arrived(self, agent: Agent, job: Job, flying: _Flying) -> None:
        flying.transfer.release()
        job.flying.remove(flying)
        if not self.moved:  # before that, UCX may still be choosing
            self.route = agent.route()
        self.moved += 1

    def _begin(self, agent: Agent, job: Job, kept: Registrations[Range]) -> Iterator[layout.Part]:
        made = layout.table(job.copies, self.exposed)
        if need := layout.lacking(made, self.exposed):
            raise NotExposedError(need)
        if self._pins:
            job.held = kept.hold(layout.ranges(made), job.memory)
            self.kept = (kept.nbytes, len(kept), kept.made)
            job.memory = ()  # a job must not keep alive what it is about
            if job.held.missing:
                job.registered = _register(agent, layout.spans(made[job.held.missing]))
        return layout.parts(made, self.exposed, layout.part_size(made, slow=self._slow))

    @staticmethod
    def _forget(agent: Agent, job: Job, kept: Registrations[Range]) -> None:
        agent.deregister(job.registered)
        job.registered = []
        if job.held is not None:
            kept.release(job.held)
