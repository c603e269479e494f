"""``pytest tests/simulation --seed 17`` runs one seed, and tells what it finds."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the one seed that tests of the simulation run")
