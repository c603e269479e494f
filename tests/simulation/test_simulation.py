"""The store keeps its promises in whatever order messages arrive, and whoever dies."""

from __future__ import annotations

from tests.simulation.world import run_seed


def test_seeds() -> None:
    for seed in range(2000):
        run_seed(seed)
