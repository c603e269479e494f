"""A process that makes, sends, receives, drops and reads references at random, and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import torchstore_core.blocking as ts
from torchstore_core import HeldRef
from torchstore_core.errors import VersionGoneError

__all__ = ["size_of", "worker"]

_STEP_S = 0.01
_MOST_KEPT = 8
_MOST_CHILDREN = 3


def size_of(number: int) -> int:
    """Bytes of the object that is full of this number: some are inline, some are not."""
    return (100, 5000, 300_000)[number % 3]


def worker(pipe: Connection, seed: int, address: str, joins: bool) -> None:
    """Runs until it is killed, or told to stop: then it lists what it holds, and waits.

    ``joins``: it joins the store at once, and not only when it first reads something.
    """
    chance = random.Random(seed)
    gc.freeze()  # collections need not look at all that torch has made
    if joins:
        ts.connect(address)
    else:
        os.environ["TORCHSTORE_ADDRESS"] = address
    kept: list[list[Any]] = []  # each a reference in a cycle, so that only collections end it
    children: dict[int, float] = {}
    while True:
        if pipe.poll(_STEP_S * chance.random()):
            message = pipe.recv()
            if message == "stop":
                break
            number, encoded = message
            kept.append(_in_cycle(pickle.loads(encoded)))
            pipe.send(("received", number))
        for pid, end in list(children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[pid]
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        match chance.randrange(10):
            case 0 | 1 if len(kept) < _MOST_KEPT and joins:
                number = chance.randrange(256)
                value = torch.full((size_of(number),), number, dtype=torch.uint8)
                kept.append(_in_cycle(ts.put_object(value)))
            case 2 | 3 if kept:
                kept.pop(chance.randrange(len(kept)))
            case 4:
                gc.collect()
            case 5 | 6 if kept:
                pipe.send(("send", _encoded(chance.choice(kept)[0])))
            case 7 if len(children) < _MOST_CHILDREN and kept and chance.random() < 0.3:
                children[_fork(chance, kept)] = time.monotonic() + chance.random() / 2
            case 8 if kept:
                at = chance.randrange(len(kept))
                if not _check(kept[at][0], pipe):
                    kept.pop(at)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    gc.collect()
    pipe.send(("kept", [(ref.version, n) for ref, *_ in kept if (n := _check(ref, pipe))]))
    while pipe.recv() != "end":
        continue


def _encoded(ref: HeldRef) -> tuple[int, bytes]:
    return ref.version, pickle.dumps(ref)


def _in_cycle(ref: HeldRef) -> list[Any]:
    cycle: list[Any] = [ref]
    cycle.append(cycle)
    return cycle


def _check(ref: HeldRef, pipe: Connection) -> int:
    """What is referred to is there and whole; its bytes, or 0 if it is gone, which is said."""
    try:
        value = ts.get(ref)
    except VersionGoneError:
        pipe.send(("gone", ref.version))
        return 0
    number = int(value[0])
    assert value.shape == (size_of(number),)
    assert bool((value == number).all())
    return len(value)


def _fork(chance: random.Random, kept: list[list[Any]]) -> int:
    """Fork a child that holds, drops and sends nothing, and ends by itself or is killed."""
    seed, pid = chance.random(), os.fork()
    if pid:
        return pid
    try:
        mine = random.Random(seed)
        for _ in range(mine.randrange(5)):
            time.sleep(mine.random() / 20)
            if kept and mine.random() < 0.5:
                kept.pop()
                gc.collect()
            if mine.random() < 0.1 and not os.fork():  # a child of the child
                time.sleep(mine.random() / 5)
                os._exit(0)
        time.sleep(mine.random())
    finally:
        os._exit(0)
