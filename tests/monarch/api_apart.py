"""Runs tests of the API in a worker of a job, with the job's store instead of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import emptied

import torchstore_core as ts
from torchstore_core.clients.stores.environment import ADDRESS

__all__ = ["DTENSORS", "DTYPES", "STATE_DICTS", "TENSORS", "run_tests"]

#: Files of tests that move tensors, tensors of every dtype, DTensors, and state dicts.
TENSORS = [
    f"api/values/test_{name}.py" for name in ("tensors", "inplace", "slices", "batches", "shards")
]
DTYPES = ["api/values/test_dtypes.py"]
DTENSORS = ["integration/dtensors/test_dtensors.py"]
STATE_DICTS = [
    f"api/state_dicts/test_{name}.py"
    for name in (
        "state_dicts",
        "state_dict_inplace",
        "state_dict_transfer",
        "participants",
        "packed",
    )
]

# Plug-ins that would need the main thread, or that belong to the run that this one is a part of.
_WITHOUT = ("cacheprovider", "faulthandler", "timeout", "xdist")
# What starts stores or processes of its own, which would have other transports, and what counts
# the messages of a store whose small values travel in them.
_OTHERS = {"running_store", "run_script", "Script", "_asked"}


class _Plugin:
    """The fixtures of those tests, and what has become of them."""

    def __init__(self, every: bool) -> None:
        self._every = every
        self.passed = 0
        self.failures: list[str] = []

    @pytest.fixture(scope="module")
    def runtime(self) -> str:
        return "monarch"

    @pytest.fixture(scope="module")
    def module_store(self) -> None:
        """The job's, which is there."""

    @pytest.fixture
    async def shared(self, module_store: None) -> AsyncIterator[ts.Client]:
        client = await ts.client()
        yield client
        await emptied(client)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Only what can do with that store."""
        items[:] = [item for item in items if _is_for_any_store(item)]
        if not self._every:
            first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
            items[:] = [item for item in items if item in first.values()]

    def pytest_internalerror(self, excrepr: object) -> None:
        self.failures.append(str(excrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if not report.passed:
            self.failures.append(f"{report.nodeid}: {report.outcome}: {report.longreprtext}")


def _is_for_any_store(item: Any) -> bool:
    if any(item.get_closest_marker(name) for name in ("local_only", "gpu", "soak")):
        return False
    function = getattr(item.function, "__wrapped__", item.function)
    used = {*function.__code__.co_names, *function.__code__.co_freevars}
    return "store" not in item.fixturenames and not used & _OTHERS


async def run_tests(files: Sequence[str], every: bool = True) -> tuple[int, list[str]]:
    """Run the tests of files of tests/ in this process. Ranks that they start join its store, too.

    Args:
        files: below tests/.
        every: with all sets of parameters, not only with the first of each test.

    Returns:
        How many passed, and what all others said.
    """
    session = await (await ts.client())._joined.session(20)
    plugin = _Plugin(every)
    words = [f"tests/{file}" for file in files]
    words += ["-c", os.devnull, f"--rootdir={Path.cwd()}", "--import-mode=importlib"]
    words += ["-o", "asyncio_mode=auto", "--noconftest", "--capture=no", "-q"]
    words += [word for name in _WITHOUT for word in ("-p", f"no:{name}")]
    os.environ[ADDRESS] = session.address
    try:
        code = await asyncio.to_thread(pytest.main, words, plugins=[plugin])
    finally:
        del os.environ[ADDRESS]
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        plugin.failures.append(f"pytest ended with {code!r}")
    return plugin.passed, plugin.failures
