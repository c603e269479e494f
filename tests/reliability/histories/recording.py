"""A process that puts and gets at random, and says of each call when it began and ended."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from tests.reliability.children import uniform

import torchstore_core.blocking as ts

__all__ = ["KEYS", "value", "worker"]

KEYS = ("a", "b", "c")
_SIZES = (4, 3000, 100_000)  # in elements: inline, copied, mapped


def value(number: int) -> torch.Tensor:
    """What a call puts: full of its number."""
    return torch.full((_SIZES[number % 3],), number, dtype=torch.int32)


def worker(pipe: Connection, seed: int, address: str, first: int) -> None:
    """Runs until it is told to stop, or killed. Its calls are numbered from ``first``.

    It sends the number, the kind, the keys and the start of a call before it, and the number, the
    end and the result after it. So what is not known of it when it is killed is one result.
    """
    chance = random.Random(seed)
    ts.connect(address)
    number = first
    pipe.send("ready")
    for keys, kind in _calls(chance):
        if pipe.poll(0):
            break
        number += 1
        pipe.send(("begins", number, "put" if kind == "put" else "get", keys, time.monotonic()))
        result: tuple[int, ...] | tuple[tuple[int, int], ...]
        match kind:
            case "put":
                refs = ts.put_batch(dict.fromkeys(keys, value(number)))
                result = tuple([refs[key].version for key in keys])
            case "look":  # at one version, which is told
                ref = ts.hold(keys[0])
                result = ((uniform(ts.get(ref)), ref.version),)
            case _:
                found = ts.get_batch(keys)
                result = tuple([(uniform(found[key]), 0) for key in keys])
        pipe.send(("ended", number, time.monotonic(), result))
    pipe.send("stopped")


def _calls(chance: random.Random) -> Iterator[tuple[tuple[str, ...], str]]:
    while True:
        kind = chance.choice(("put", "put", "look", "get", "get"))
        count = 1 if kind == "look" else chance.randint(1, len(KEYS))
        yield tuple(chance.sample(KEYS, count)), kind
