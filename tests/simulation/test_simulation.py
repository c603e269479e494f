"""The store keeps its promises in whatever order messages arrive, and whoever dies."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest
from tests.simulation.shrinking import find, told
from tests.simulation.world import run_seed

from torchstore_core.server.controller import Controller


def look(seeds: Iterable[int]) -> None:
    for seed in seeds:
        if (found := find(seed)) is not None:
            pytest.fail(told(found), pytrace=False)


@pytest.fixture
def one_seed(request: pytest.FixtureRequest) -> int | None:
    """The seed that somebody wants to see again."""
    seed: int | None = request.config.getoption("--seed", default=None)
    return seed


@pytest.mark.quick
def test_some_seeds(one_seed: int | None) -> None:
    look(range(200) if one_seed is None else [one_seed])


def test_seeds() -> None:
    look(range(200, 2000))


@pytest.mark.soak
def test_many_seeds() -> None:
    look(range(2000, 100_000))


def digests(hash_seed: int) -> list[str]:
    """What some runs are in a process of their own."""
    script = """if True:
        from tests.simulation.world import run_seed
        for seed in range(150):
            print(run_seed(seed).digest())
    """
    environment = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": "."}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


def test_a_seed_is_the_same_run_everywhere() -> None:
    assert digests(1) == digests(2) == [run_seed(seed).digest() for seed in range(150)]


def test_what_seeds_reach() -> None:
    """Each of the things that the simulation is for does happen."""
    seen: Counter[str] = Counter()
    for seed in range(600):
        world = run_seed(seed)
        for name in world.names:
            seen[str(name[0])] += 1
        seen["severed"] += world.uplink is not None and world.uplink.severed
        for call in world.history.calls:
            kind = call.operation.kind
            seen[f"{kind}: {call.code or ('answered' if call.known else 'unknown')}"] += 1
            seen["an answer that nobody heard"] += call.known and call.ended is None
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
        "get: evicted",
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
