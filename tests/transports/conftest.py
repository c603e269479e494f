"""The test transports are installed for everything that tests of this folder start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMES = ("mailbox", "mailbox-apart", "foreign")


@pytest.fixture(scope="session")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata of a distribution that has the entry points."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "torchstore_mailbox-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchstore-mailbox\nVersion: 1\n")
    lines = [f"{name} = tests.transports.{name.replace('-', '_')}" for name in NAMES]
    (info / "entry_points.txt").write_text("\n".join(["[torchstore.transports]", *lines]))
    return folder


@pytest.fixture(autouse=True)
def _installed(_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [before, root, str(_site)])))
    sys.path.append(str(_site))
    yield
    sys.path.remove(str(_site))
