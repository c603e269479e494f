"""Pairs of torchcomms' communicators."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from torchstore_torchcomms.backends import BACKEND, agreed, device_of, usable
from torchstore_transports.pairs.pair import TIMEOUT_S, Pair, Wait
from torchstore_transports.pairs.rendezvous import PairStore

__all__ = ["TorchCommsPair", "make"]

_TIMEOUT = timedelta(seconds=TIMEOUT_S)
# gloo waits so many times its time-out for a connection. An end whose peer has told its address and
# then gone would otherwise wait, with its descriptors and threads, long after everybody forgot it.
_CONNECT_FACTOR = 5
_RANK, _SIZE = "TORCHCOMM_RANK", "TORCHCOMM_SIZE"
_environment = threading.Lock()


class TorchCommsPair(Pair):
    """A communicator of two processes, which nobody else knows."""

    def __init__(self, comm: Any, store: PairStore, peer: int, device: torch.device) -> None:
        self._comm = comm
        self._store = store  # the communicator calls methods that are implemented in Python
        self._peer = peer
        self.device = device

    def send(self, tensor: torch.Tensor) -> Wait:
        """See ``Pair``."""
        work = self._comm.send(tensor, self._peer, async_op=True, timeout=_TIMEOUT)
        return functools.partial(self._wait, work, tensor)

    def receive(self, tensor: torch.Tensor) -> Wait:
        """See ``Pair``."""
        work = self._comm.recv(tensor, self._peer, async_op=True, timeout=_TIMEOUT)
        return functools.partial(self._wait, work, tensor)

    def kill(self) -> None:
        """See ``Pair``.

        gloo cannot interrupt a wait, but it closes the connection of a pair as soon as one has
        timed out: here a barrier, which the other end never enters. Nothing else does, because
        messages have no tags, and one that is larger than expected ends this process.

        On a device only staging memory is given to the communicator, which is left to it.
        """
        with contextlib.suppress(RuntimeError):  # the time-out, or that the pair has failed before
            if self.device.type == "cpu":
                self._comm.barrier(async_op=False, timeout=timedelta(milliseconds=1))
            elif self._comm.is_abort_supported():
                self._comm.abort()

    def _wait(self, work: Any, tensor: torch.Tensor) -> None:
        """Wait. The tensor is an argument so that it lives until then."""
        if self.device.type == "cpu":
            work.wait()
        else:  # not only this device's stream, but the caller
            work.wait_blocking()


def make(store: PairStore, rank: int, address: str, timeout_s: float = TIMEOUT_S) -> Pair:
    """See ``torchstore_transports.pairs.pair.PairFactory``.

    The time-out of the communicator is for its beginning only: messages have one of their own.
    """
    torchcomms = _imported()
    store.set(f"backends/{rank}", " ".join(usable()).encode())
    first, second = (store.get(f"backends/{end}").decode().split() for end in (0, 1))
    backend = agreed(first, second)
    if backend is None:
        raise RuntimeError(
            f"the volume ({', '.join(first) or 'none'}) and the client "
            f"({', '.join(second) or 'none'}) have no backend of torchcomms in common; "
            f"{BACKEND} may exclude some"
        )
    device = device_of(backend)
    timeout = timedelta(seconds=timeout_s) / (_CONNECT_FACTOR if device.type == "cpu" else 1)
    with _ranked(rank, store):
        comm = torchcomms.new_comm(
            backend,
            device,
            f"torchstore-{secrets.token_hex(8)}",
            abort_process_on_timeout_or_error=False,
            timeout=timeout,
            store=store,
            hints={"persistent_store": "true", "hostname": address},
        )
    return TorchCommsPair(comm, store, 1 - rank, device)


@contextlib.contextmanager
def _ranked(rank: int, store: PairStore) -> Iterator[None]:
    """Set the rank, which torchcomms only takes from the environment, until the communicator that
    is made first uses the store. Other threads of this process see it for less than a millisecond.
    """
    meanwhile = {_RANK: str(rank), _SIZE: "2"}
    _environment.acquire()
    before = [{name: os.environ.get(name) for name in meanwhile}]

    def restore() -> None:
        try:
            found = before.pop()  # which one thread does: the library's may come at the same time
        except IndexError:
            return
        for name, value in found.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _environment.release()

    os.environ.update(meanwhile)
    store.before_call = restore
    try:
        yield
    finally:
        restore()


def _imported() -> ModuleType:
    try:
        import torchcomms
    except ImportError as error:
        raise RuntimeError(f"torchcomms does not work here: {error}") from error
    module: ModuleType = torchcomms
    return module
