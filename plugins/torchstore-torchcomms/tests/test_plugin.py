"""Where torchcomms does not work, the transport refuses in words, without importing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchstore_torchcomms.backends import BACKEND, agreed, usable

_ASK = """
import sys
from torchstore_torchcomms.plugin import torchstore_transport
print(torchstore_transport().probe())
print(sorted({"torch", "torchcomms"} & set(sys.modules)))
"""


def _asked(folder: Path) -> list[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()


def test_a_placeholder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torchcomms").mkdir()
    (tmp_path / "torchcomms/__init__.py").write_text("raise ImportError('a placeholder')\n")
    info = tmp_path / "torchcomms-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchcomms\nVersion: 0.0.1\n")
    why, imported = _asked(tmp_path)
    assert "torchcomms 0.0.1 has no backends" in why
    assert imported == "[]"


def test_backends_that_both_ends_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(["ncclx", "gloo"], ["nccl", "gloo"]) == "gloo"
    assert agreed(["ncclx"], ["gloo"]) is None
    monkeypatch.setenv(BACKEND, "no-such-backend")
    assert usable() == []
