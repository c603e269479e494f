"""The store keeps its promises in whatever order messages arrive, and whoever dies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial

import pytest
from tests.simulation.plans import CHOKED, DRAINED, SEALED
from tests.simulation.shrinking import find, told
from tests.simulation.world import World, run_seed

from torchstore_core.server.controller import Controller

# What the runs of some seeds have reached, by seed: they need not run twice for it.
_reached: dict[int, Counter[str]] = {}
_COUNTED = 600


def look(seeds: Iterable[int]) -> None:
    for seed in seeds:
        seen = _reached.setdefault(seed, Counter()) if seed < _COUNTED else None
        if (found := find(seed, ended=None if seen is None else partial(count, seen))) is not None:
            pytest.fail(told(found), pytrace=False)


def count(seen: Counter[str], world: World) -> None:
    """Count what has happened in a run."""
    for name in world.names:
        seen[str(name[0])] += 1
    seen["the server was killed"] += len(world.lives.deaths)
    seen["the disk could not be read"] += world.history.unread > 0
    seen["a value was copied"] += world.copied
    seen["a volume was empty"] += world.drained
    seen["severed"] += world.uplink is not None and world.uplink.severed
    for call in world.history.calls:
        kind = call.operation.kind
        seen[f"{kind}: {call.code or ('answered' if call.known else 'unknown')}"] += 1
        seen["an answer that nobody heard"] += call.known and call.ended is None
        if call.operation.sealed:
            seen[f"sealed {kind}: {call.code or 'answered'}"] += call.known


@pytest.fixture
def one_seed(request: pytest.FixtureRequest) -> int | None:
    """The seed that somebody wants to see again."""
    seed: int | None = request.config.getoption("--seed", default=None)
    return seed


@pytest.mark.quick
def test_some_seeds(one_seed: int | None) -> None:
    look(range(200) if one_seed is None else [one_seed])


@pytest.mark.parametrize("begin", range(200, 2000, 300))
def test_seeds(begin: int) -> None:
    """2,000 with those above, as parts: several processes share them, each well within its time."""
    look(range(begin, begin + 300))


def test_seeds_that_have_found_something() -> None:
    """What they have found is mended, in the store or in the simulation."""
    look([211071, 244446, 254317, 9035360])
    look([1003009948, 1003015228, 1004043742, 1007019032, 1008011541, 1008020651])
    look([3000002263])


def see(seeds: Iterable[int], *expected: str) -> None:
    """No promise is broken with these seeds, and each of these things happens with one of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        if (found := find(seed, ended=partial(count, seen))) is not None:
            pytest.fail(told(found), pytrace=False)
    for what in expected:
        assert seen[what], f"{what}: never seen, but {seen}"


def test_logs_that_cannot_grow() -> None:
    """For a while, with little left of what they keep for what cannot be refused."""
    see(
        range(CHOKED, CHOKED + 400),
        *("choked", "get: store-full", "put: store-full", "publish: store-full"),
        *("object: store-full", "hold: store-full", "delete: store-full", "free: store-full"),
        *("the server was killed", "written", "child", "torchstore-spill", "died", "exit"),
    )


def test_volumes_that_are_drained() -> None:
    """Of stores that spill, also while they are killed."""
    see(
        range(DRAINED, DRAINED + 100),
        *("a value was copied", "a volume was empty", "the server was killed", "written"),
        *("torchstore-spill", "torchstore-unspill", "get: evicted"),
    )


def test_values_that_are_made_in_the_store() -> None:
    """And sealed there, with everything else that goes wrong; and state dicts that are held."""
    see(
        range(SEALED, SEALED + 150),
        *("sealed put: answered", "sealed put: Cancelled", "sealed put: Closed"),
        *("sealed put: store-full", "sealed put: protocol"),
        *("sealed object: answered", "sealed object: Cancelled", "sealed object: store-full"),
        *("the server was killed", "written", "choked", "died", "child", "read: answered"),
        *("torchstore-spill", "torchstore-unspill", "get: evicted", "a volume was empty"),
        *("publish: answered", "hold: answered", "hold: partial-put", "read: version-gone"),
    )


@pytest.mark.soak
def test_many_seeds() -> None:
    look(range(2000, 100_000))


@pytest.mark.soak
def test_many_logs_that_cannot_grow() -> None:
    look(range(CHOKED + 400, CHOKED + 20_000))


@pytest.mark.soak
def test_many_volumes_that_are_drained() -> None:
    look(range(DRAINED + 100, DRAINED + 20_000))


@pytest.mark.soak
def test_many_values_that_are_made_in_the_store() -> None:
    look(range(SEALED + 150, SEALED + 20_000))


def digests(hash_seed: int, seeds: int) -> list[str]:
    """What some runs are in a process of their own."""
    script = f"""if True:
        from tests.simulation.world import run_seed
        for seed in range({seeds}):
            print(run_seed(seed).digest())
    """
    environment = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": "."}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


@pytest.mark.parametrize("seeds", [20, pytest.param(600, marks=pytest.mark.soak)])
def test_a_seed_is_the_same_run_everywhere(seeds: int) -> None:
    here = [run_seed(seed).digest() for seed in range(seeds)]
    assert digests(1, seeds) == digests(2, seeds) == here


def test_the_command_runs_seeds_in_several_processes() -> None:
    """As ``make simulate`` does: these are more than fit into one batch."""
    command = [sys.executable, "-m", "tests.simulation", "0", "--seeds", "251", "--processes", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(r"251 seeds, [0-9,]+ steps: no promise is broken", ran.stdout)


def test_what_seeds_reach() -> None:
    """Each of the things that the simulation is for does happen."""
    look(seed for seed in range(_COUNTED) if seed not in _reached)
    seen = sum(_reached.values(), Counter())
    for what in (
        *("put: answered", "put: store-full", "put: Cancelled", "put: Closed", "put: protocol"),
        *("get: answered", "get: key-not-found", "get: version-gone", "get: partial-put"),
        *("publish: answered", "publish: key-not-found", "publish: store-full"),
        *("fetch: answered", "fetch: partial-put", "fetch: version-gone"),
        *("shard: answered", "shard: version-gone"),
        *("delete: answered", "wait: answered", "wait: unknown", "versions: answered"),
        *("exists: answered", "an answer that nobody heard"),
        *("died", "restart", "handshake", "disconnect", "land", "uplink", "severed", "tick"),
        *("exit", "ended", "get: object-lost", "put: object-lost"),
        *("object: answered", "hold: answered", "read: answered", "read: version-gone"),
        *("ref", "time", "child", "free: answered", "rewind: answered"),
        *("get: evicted", "the server was killed", "written"),
        *("torchstore-spill", "torchstore-unspill", "the disk could not be read"),
    ):
        assert seen[what], f"{what}: never seen, but {seen}"


def test_a_run_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server itself fails: nothing that it raises is lost."""

    def fails(self: Controller, *_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Controller, "close_session", fails)
    found = find(0)
    assert found is not None
    assert "failure: RuntimeError: a bug" in told(found)
