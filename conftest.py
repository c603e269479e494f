"""Fixtures of all tests, those of the packages too, and with which runtimes they run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Hashable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests import processes, profiles
from tests.interpreters.starting import Starter, starter
from tests.support import RUNTIMES, emptied, running_store, start_store

import torchstore_core as ts

# What a developer's shell says about stores is not about the tests.
for _name in [name for name in os.environ if name.startswith("TORCHSTORE_")]:
    del os.environ[_name]
# Transports with packages of their own are tested there: what other tests see does not depend on
# which of them are installed.
_APART = {"gloo", "rdma", "torchcomms", "torchcomms-rdma"}
_APART &= {point.name for point in entry_points(group="torchstore.transports")}
if _APART:
    os.environ["TORCHSTORE_BLOCK"] = ",".join(sorted(_APART))
# Nor is what runs beside these tests, where some ask all servers of the user what they are. (Not
# where the user has temporary files: a socket's path is short.)
_RUNTIME_DIRECTORY = tempfile.mkdtemp(prefix="ts-", dir="/tmp")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME_DIRECTORY
for _name in ("COLUMNS", "LINES"):  # of a terminal, or of what runs the tests
    os.environ.pop(_name, None)

# What torch is made of is no garbage in the processes of tests either, nor in those that get this
# one's path, such as the kits' and the one that writes snapshots.
_INTERPRETERS = str(Path(__file__).parent / "tests/interpreters")
sys.path.insert(0, _INTERPRETERS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [_INTERPRETERS, os.environ.get("PYTHONPATH", "")])
)

# Threads of OpenMP that wait spin for milliseconds by default; others need the processors. Those of
# numpy's OpenBLAS spin for hundredths of a second once it is imported, and torch imports it.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

profiles.register()

# Until all tests are collected: nothing of that is garbage.
gc.disable()

# How many modules were imported when all that was imported was last taken out of collections, and
# how many more it takes to do so again; or how many objects that a file of tests leaves.
_modules = 0
_MANY_MODULES = 50
_MANY_OBJECTS = 50_000

_HERE = Path(__file__).parent
_API = _HERE / "tests/api"
_DEATHS = _HERE / "plugins/torchstore-monarch/tests/faults"
# About how servers start, and die.
_STARTS = {_API / "stores/test_lifecycle.py", _HERE / "tests/reliability/deaths"}
_APART_TESTS = {
    _HERE / f"plugins/torchstore-{name}/tests" for name in ("gloo", "rdma", "torchcomms")
}
# What clients do, whatever the server's runtime is.
_CLIENTS = {_API / "keys", _API / "state_dicts", _API / "values"}
_UNIT = _HERE / "tests/unit"
_QUICK = {_API, _UNIT, _HERE / "plugins/torchstore-cli/tests"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runtime",
        action="append",
        choices=RUNTIMES,
        help="run the tests of the public API with this runtime alone (may be given repeatedly)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests of tests/api run with every runtime, unless they are marked ``local_only``; others
    are about more than the API, and run with ``local``.
    """
    if "runtime" not in metafunc.fixturenames:
        return
    every = _API in metafunc.definition.path.parents
    if not every or metafunc.definition.get_closest_marker("local_only"):
        metafunc.parametrize("runtime", ["local"], indirect=True, scope="module", ids=[""])
        return
    chosen = metafunc.config.getoption("runtime") or (
        ["local"] if _is_for_newcomers(metafunc.config) else RUNTIMES
    )
    metafunc.parametrize(
        "runtime", [r for r in RUNTIMES if r in chosen], indirect=True, scope="module"
    )


def _is_for_newcomers(config: pytest.Config) -> bool:
    """Whether this is `make test`, which runs nothing that is thorough."""
    return "not thorough" in config.getoption("markexpr")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `make test`, files that have none of its tests are not even imported, by any process."""
    if not _is_for_newcomers(config) or not collection_path.name.startswith("test_"):
        return None
    return None if _may_have_quick_ones(collection_path) else True


def _may_have_quick_ones(path: Path) -> bool:
    return not _QUICK.isdisjoint(path.parents) or "mark.quick" in path.read_text()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What makes the test's own process part of a Monarch job comes last: that changes the default
    runtime. Before it, and among itself, long files come before those of many short tests, so that
    all processes of the tests are busy to the end; first of all those that mostly wait for an
    engine to notice a death.
    """
    folders = {path: frozenset(path.parents) for path in {item.path for item in items}}
    items.sort(
        key=lambda item: (
            _joins_a_job(item.nodeid),
            _DEATHS not in folders[item.path],
            _API in folders[item.path],
        )
    )
    quick = {item.path for item in items if item.get_closest_marker("quick") is not None}
    if inherited := [str(path) for path in quick if not _may_have_quick_ones(path)]:
        raise pytest.UsageError(f"quick tests that `make test` does not see: {inherited}")
    for item in items:
        if not _is_quick(item, folders[item.path]):
            item.add_marker("thorough")
    if not config.getoption("runtime"):
        for item in [*_much_alike(items), *_other_pairs(items)]:
            item.add_marker("soak")


def _is_quick(item: pytest.Item, folders: frozenset[Path]) -> bool:
    """Whether `make test` runs it, too: the public API on one runtime, and all that takes neither
    jobs nor processes; of the other folders what has the mark ``quick``.
    """
    if not _QUICK.isdisjoint(folders):
        callspec = getattr(item, "callspec", None)
        return callspec is None or callspec.params.get("runtime", "local") == "local"
    return item.get_closest_marker("quick") is not None


def _much_alike(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Tests of the public API that run with the soak tests alone: with ``spmd``, the first set of
    parameters of each test is enough, with ``monarch`` the last. Runtimes differ in how a store
    starts, which is most of what these tests take, and then all values take the same way: files of
    tests of values and names take turns, one with ``spmd``, the next with ``monarch``.
    """
    by_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        runtime = callspec.params.get("runtime", "local") if callspec is not None else "local"
        if runtime != "local":
            test = item.nodeid.partition("[")[0]
            by_test.setdefault((test, str(runtime)), []).append(item)
    in_turns = sorted(path for folder in _CLIENTS for path in folder.glob("test_*.py"))
    runtime_of = dict(zip(in_turns, itertools.cycle(("spmd", "monarch")), strict=False))
    for (_, runtime), alike in by_test.items():
        if runtime_of.get(alike[0].path, runtime) != runtime:
            yield from alike
        else:
            yield from alike[1:] if runtime == "spmd" else alike[:-1]


def _other_pairs(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of a test with each value of a parameter against each of another, those that run with the
    soak tests alone: every value is in one of the others. Those of ``tests/unit`` take next to no
    time.
    """
    by_test: dict[str, list[tuple[pytest.Item, list[Hashable]]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or callspec.params.get("runtime", "local") != "local":
            continue
        if item.get_closest_marker("soak") is None and _UNIT not in item.path.parents:
            sets = by_test.setdefault(item.nodeid.partition("[")[0], [])
            sets.append((item, _independent(item, callspec.params)))
    for sets in by_test.values():
        kept = profiles.one_of_each([values for _, values in sets])
        yield from (item for i, (item, _) in enumerate(sets) if i not in kept)


def _independent(item: pytest.Item, params: dict[str, object]) -> list[Hashable]:
    """The values of each parameter. What one mark gives several of them belongs together."""
    together = [marker.args[0] for marker in item.iter_markers("parametrize")]
    groups = [
        [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
        for names in together
    ]
    apart = params.keys() - {name for group in groups for name in group}
    groups += [[name] for name in sorted(apart)]
    return [tuple(id(params[name]) for name in group) for group in groups]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """What is of one file stays together where several processes share the tests; what makes it
    part of a Monarch job, apart from the rest.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return f"monarch: {file}" if _joins_a_job(nodeid) else file

        def _reschedule(self, node: Any) -> None:
            # A process that replaces one that died gets nothing before it has told its tests;
            # xdist fails when two die soon after each other.
            if node in self.registered_collections:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            # What a process that died has left goes to the others, but neither the test that it
            # died of, nor files that are complete: xdist waits for ever for a process that gets
            # nothing else.
            units = self.assigned_work.pop(node)
            left = [test for unit in units.values() for test, done in unit.items() if not done]
            if not left:
                return None
            for file, unit in units.items():
                if left[0] in unit:
                    unit[left[0]] = True
                if not all(unit.values()):
                    self.workqueue[file] = unit
            for other in self.assigned_work:
                self._reschedule(other)
            return left[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Importing Monarch makes it the default runtime: only tests do, never their modules."""
    if "monarch" in sys.modules:
        raise pytest.UsageError("a test module imports monarch when it is collected")
    # What torch and the tests themselves are made of stays to the end: without it, the hundreds of
    # collections that tests ask for take a few milliseconds each, not a hundred. To look for what
    # of it is garbage would take half a second of a processor in each process, and find a fourth.
    global _modules
    _modules = len(sys.modules)
    gc.enable()
    gc.freeze()
    # Tests of state machines make objects by the million: a few collections in place of hundreds.
    gc.set_threshold(5_000)


def pytest_unconfigure() -> None:
    _starting.close()
    shutil.rmtree(_RUNTIME_DIRECTORY, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a test has imported (Monarch, say) stays to the end, too, and so does what libraries
    keep once they were used: the description of an object store's protocol, say.
    """
    global _modules
    imported = len(sys.modules) > _modules + _MANY_MODULES
    ends = nextitem is None or nextitem.path != item.path
    if imported or (ends and len(gc.get_objects()) > _MANY_OBJECTS):
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def _joins_a_job(nodeid: str) -> bool:
    """Whether Monarch runs in the process of that test; torchstore-monarch's tests have jobs."""
    return "monarch" in nodeid.partition("::")[2].lower()


_starting = contextlib.ExitStack()
_starter: Starter | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """From the first test on, and unless starting is what a test is about."""
    global _starter
    if _starter is None:
        _starter = _starting.enter_context(starter())
    _starter.on = _STARTS.isdisjoint((item.path, *item.path.parents))


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Ends with the tests; it starts with the first that needs it."""
    yield
    processes.stop_fork_server()


@pytest.fixture(autouse=True)
def _unblocked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a transport's own package may use it."""
    if not _APART_TESTS.isdisjoint(request.path.parents):
        monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest) -> str:
    """How a test's stores are started: an argument of ``start_store`` and ``running_store``."""
    return str(request.param)


@pytest.fixture
async def store(runtime: str) -> AsyncIterator[ts.Client]:
    """The default store, initialised with little memory; shut down after the test."""
    async with running_store(runtime) as client:
        yield client


@pytest.fixture(scope="module")
def module_store(runtime: str) -> Iterator[None]:
    """The default store for all tests of a module, each of which has an event loop of its own."""
    asyncio.run(start_store(runtime))
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())


@pytest.fixture
async def shared(module_store: None) -> AsyncIterator[ts.Client]:
    """The module's store, empty: for many short tests that are not about starting one."""
    client = await ts.client()
    yield client
    await emptied(client)


_numbers = itertools.count()


@pytest.fixture
def k() -> str:
    """A key that no test has used: its versions begin at 1 in a shared store, too."""
    return f"unused{next(_numbers)}"
