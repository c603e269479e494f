"""What the interpreters that the tests start do before anything else: ``tests/interpreters``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.processes import run_script

_COUNTS = "import gc, {0}; print(gc.get_freeze_count(), len(gc.get_objects()), gc.isenabled())"


@pytest.mark.parametrize("module", ["monarch.actor", "torchstore_core"], ids=["engine", "core"])
def test_collections_pass_over_what_large_packages_are_made_of(module: str) -> None:
    command = [sys.executable, "-c", _COUNTS.format(module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    passed_over, walked, enabled = done.stdout.split()
    assert int(passed_over) > 10 * int(walked)
    assert enabled == "True"


async def test_what_the_fork_server_forks_does_not_take_torch_apart_when_it_ends() -> None:
    body = """
    import weakref
    found = weakref.finalize._registry.items()
    of_torch = [one.atexit for one, info in found if info.func.__module__ == "torch.library"]
    print(len(of_torch) > 100, any(of_torch))
    """
    assert await run_script(body) == "True False\n"
