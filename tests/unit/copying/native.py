"""The C extension, for the tests that are about it."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from torchstore_core.machine import copying

__all__ = ["COMPILER", "needs_native"]

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_CAN_BE_BUILT = bool(COMPILER) and Path(sysconfig.get_path("include"), "Python.h").exists()

#: It is optional where it cannot be built; where it can, a build that failed is a failure.
needs_native = pytest.mark.skipif(
    not copying.has_native() and not _CAN_BE_BUILT, reason="no compiler, or no headers of Python"
)
