"""Commands of ``torchstore`` that other packages bring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODULE = """
import click
from torchstore_core.errors import TorchStoreError

@click.command()
@click.option("--fail", is_flag=True)
@click.pass_obj
def greet(settings, fail):
    "Say hello."
    if fail:
        raise TorchStoreError("no greeting")
    click.echo("hello" + (" in JSON" if settings.json else ""))
    return 3
"""
_POINTS = """
[torchstore.commands]
greet = commands_of_a_test:greet
broken = no_such_module_anywhere:command
wrong = commands_of_a_test:__name__
status = commands_of_a_test:greet
"""


def _torchstore(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchstore_cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _distribution(site: Path, name: str, entry_points: str) -> None:
    info = site / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.thorough
def test_another_package_brings_commands_and_a_broken_one_breaks_none_but_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "commands_of_a_test.py").write_text(_MODULE)
    _distribution(tmp_path, "commands-of-a-test", _POINTS)
    greeted = _torchstore(tmp_path, "--json", "greet")
    assert (greeted.returncode, greeted.stdout) == (3, "hello in JSON\n")
    failed = _torchstore(tmp_path, "greet", "--fail")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.endswith(": no greeting\n")
    shown = _torchstore(tmp_path, "--help")
    assert shown.returncode == 0
    for name, text in (
        ("greet", "Say hello."),
        ("snapshot", "Look into snapshots"),
        ("broken", "Does not load."),
    ):
        assert any(line.split()[:1] == [name] and text in line for line in shown.stdout.split("\n"))
    for name in ("broken", "wrong"):
        broken = _torchstore(tmp_path, name, "--any", "argument")
        assert broken.returncode == 1
        assert f"the command {name!r} of another package does not load" in broken.stderr
    assert "Say hello" not in _torchstore(tmp_path, "status", "--help").stdout
    assert _torchstore(tmp_path, "nothing").returncode == 2


def test_a_command_that_two_packages_bring_is_neither_of_them(tmp_path: Path) -> None:
    """It was one of the two, whichever was found first."""
    (tmp_path / "commands_of_a_test.py").write_text(_MODULE)
    for name in ("first-package", "second-package"):
        _distribution(tmp_path, name, "[torchstore.commands]\ngreet = commands_of_a_test:greet\n")
    refused = _torchstore(tmp_path, "greet")
    assert refused.returncode == 1
    assert "first-package and second-package each have one of that name" in refused.stderr
