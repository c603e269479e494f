"""A library that stands in for torchcomms' where there is no device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="class")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """It is what this process, and those that it starts, import as ``torchcomms``. The folder in
    which it keeps what there is.
    """
    folder = tmp_path_factory.mktemp("stand-in")
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(_STAND_IN), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("STAND_IN_FOLDER", str(folder))
        patch.syspath_prepend(_STAND_IN)
        others = {name: sys.modules.pop(name) for name in _loaded()}
        yield folder
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(others)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "torchcomms"]
