"""Tests of transports over pairs, which the other tests do without."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unblocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)
