"""The public API is what it was: a change of it is a decision, seen in public_api.txt."""

from __future__ import annotations

from pathlib import Path

from tests.api.listing import listing

RECORDED = Path(__file__).with_name("public_api.txt")


def test_the_public_api_is_as_recorded():
    recorded = RECORDED.read_text().splitlines()
    now = listing()
    gone = [line for line in recorded if line not in now]
    new = [line for line in now if line not in recorded]
    assert (gone, new) == ([], []), "python -m tests.api.listing > tests/api/public_api.txt"
    assert len(recorded) > 400
