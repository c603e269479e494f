"""The page on writing a runtime: its package is installed, and tested by its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/example-runtime"
PAGE = (ROOT / "docs/writing-a-runtime.md").read_text()


def test_its_own_tests_pass(tmp_path: Path) -> None:
    """With the conformance kit, and its entry point."""
    site, source = tmp_path / "site", tmp_path / "source"
    shutil.copytree(EXAMPLE, source)  # so that nothing is left beside it
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True, timeout=100)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=source,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^14 passed, 2 skipped", done.stdout, re.M), done.stdout


def test_the_page_shows_what_the_package_has() -> None:
    files = [path.read_text() for path in EXAMPLE.rglob("*.*") if path.is_file()]
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE, re.M | re.S)
    shown = [block for block in blocks if "await ts.initialize" not in block]
    assert len(shown) == 5
    for block in shown:
        assert any(block in text for text in files), block


def test_its_links_lead_somewhere() -> None:
    for page in (ROOT / "docs/writing-a-runtime.md", EXAMPLE / "README.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
