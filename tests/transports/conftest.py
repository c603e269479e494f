"""The test transports are installed for everything that tests of this folder start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _on_the_path(site: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    root = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH", "")
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [before, root, str(site)])))
    sys.path.append(str(site))
    yield
    sys.path.remove(str(site))


@pytest.fixture(autouse=True)
def _installed(_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with _on_the_path(_site, monkeypatch):
        yield


@pytest.fixture(scope="module")
def installed_first(_site: Path) -> Iterator[None]:
    """They are installed while fixtures of a module are made, which are made before."""
    with pytest.MonkeyPatch.context() as patch, _on_the_path(_site, patch):
        yield
