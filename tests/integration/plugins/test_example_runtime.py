"""The page on writing a runtime: its package is installed, and tested by its own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.plugins.examples import Example

EXAMPLE = Example("runtime")


@pytest.mark.parametrize(
    ("chosen", "passed"),
    [
        ("serves or descriptor", r"\d passed"),
        pytest.param("", "14 passed, 2 skipped", marks=pytest.mark.soak),
    ],
)
def test_its_own_tests_pass(tmp_path: Path, chosen: str, passed: str) -> None:
    """With the conformance kit, and its entry point."""
    site = EXAMPLE.install(tmp_path)
    done = EXAMPLE.run_tests(site, "-p", "no:cacheprovider", "-k", chosen)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^{passed}", done.stdout, re.M), done.stdout


def test_the_page_shows_what_the_package_has() -> None:
    EXAMPLE.check_page(blocks=5)


def test_its_links_lead_somewhere() -> None:
    EXAMPLE.check_links()
