"""Packages of the documentation that are ready to copy: installed, tested, and compared with their
pages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Example"]

_DOCS = Path(__file__).parents[3] / "docs"


class Example:
    """The package of one page: ``docs/example-KIND``, of ``docs/writing-a-KIND.md``.

    Attributes:
        page: the text of the page.
    """

    def __init__(self, kind: str) -> None:
        self._folder = _DOCS / f"example-{kind}"
        self._path = _DOCS / f"writing-a-{kind}.md"
        self.page = self._path.read_text()

    def install(self, folder: Path) -> Path:
        """Install it; returns where. A copy is built, so that nothing is left beside it."""
        shutil.copytree(self._folder, folder / "source")
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
        command += ["--no-index", "--quiet", "--disable-pip-version-check"]
        command += ["--target", str(folder / "site"), str(folder / "source")]
        subprocess.run(command, check=True, timeout=300)
        return folder / "site"

    @staticmethod
    def environment(site: Path) -> dict[str, str]:
        """In which what is installed there is found."""
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PYTHONPATH": path}

    def run_tests(self, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Its own tests, of what is installed there."""
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *arguments, "."],
            cwd=site.parent / "source",
            env=self.environment(site),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def check_page(self, blocks: int) -> None:
        """So many blocks of the page are parts of the package."""
        files = [path.read_text() for path in self._folder.rglob("*.*") if path.is_file()]
        found = re.findall(r"^```(?:python|toml)\n(.*?)^```", self.page, re.M | re.S)
        shown = [block for block in found if "await ts.initialize" not in block]
        assert len(shown) == blocks
        for block in shown:
            assert any(block in text for text in files), block

    def check_links(self) -> None:
        """What the page, and the package's own, link to is there."""
        for page in (self._path, self._folder / "README.md"):
            for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
                assert (page.parent / target).exists(), target
