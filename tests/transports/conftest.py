"""The test transports are installed for everything that tests of this folder start."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NAMES = ("mailbox", "mailbox-apart", "foreign")


def _made(folder: Path, distribution: str, entries: dict[str, str]) -> Path:
    """Give a folder the metadata of a distribution that has these entry points."""
    info = folder / f"{distribution.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torchstore.transports]", *lines]))
    return folder


@pytest.fixture(scope="session")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = {name: f"tests.transports.{name.replace('-', '_')}" for name in NAMES}
    return _made(tmp_path_factory.mktemp("site"), "torchstore-mailbox", entries)


@contextlib.contextmanager
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


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], None]]:
    """Installs transports, given as entry points, for one test."""
    with contextlib.ExitStack() as stack:

        def now(entries: dict[str, str]) -> None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            site = _made(tmp_path, "torchstore-of-a-test", entries)
            stack.enter_context(_on_the_path(site, patch))

        yield now
