"""The page on writing a runtime: its package is installed, and tested by its own tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.plugins.examples import Example

EXAMPLE = Example("runtime")


def test_its_own_tests_pass(tmp_path: Path) -> None:
    """With the conformance kit, and its entry point."""
    done = EXAMPLE.run_tests(EXAMPLE.install(tmp_path), "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^14 passed, 2 skipped", done.stdout, re.M), done.stdout


def test_the_page_shows_what_the_package_has() -> None:
    EXAMPLE.check_page(blocks=5)


def test_its_links_lead_somewhere() -> None:
    EXAMPLE.check_links()
