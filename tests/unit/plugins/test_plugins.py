"""Plug-ins: real packages with real metadata, most of them broken in one way or another."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement
from tests.support import free_port, load_all

import torchstore_core as ts
from torchstore_core.clients.stores import starting
from torchstore_core.contracts.observer import Operation
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.contracts.transport import TransportSpec
from torchstore_core.contracts.when_full import check_spill
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins.installed import GROUPS, Inventory, installed
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.registry import OWN_NAMES, Registry, _owner, load_class

TRANSPORTS, STRATEGIES, RUNTIMES, OBSERVERS = GROUPS

HEAD = """
from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, TransportSpec
from torchstore_core.contracts.runtime import RuntimeSpec
from torchstore_core.contracts.strategy import Strategy
"""
TRANSPORT = """
@hookimpl
def torchstore_transport():
    return TransportSpec({name!r}, bid=lambda context: Bid(1e-6, 1e9, "always"), in_band=True)
"""
STRATEGY = """
class Mine(Strategy, frozen=True, tag={name!r}):
    pass

@hookimpl
def torchstore_strategy():
    return Mine
"""
RUNTIME = """
@hookimpl
def torchstore_runtime():
    return RuntimeSpec({name!r}, "nowhere:Class", lambda mesh: 1)
"""


class Site:
    """A folder on ``sys.path`` that packages are installed into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: list[str] = []

    def install(self, distribution: str, group: str, **plugins: str) -> None:
        """One distribution, with one module for each plug-in (its name, its source)."""
        package = f"site_{distribution.replace('-', '_')}"
        lines = [f"[{group}]"]
        for name, source in plugins.items():
            module = f"{package}_{name}"
            self.modules.append(module)
            code = HEAD + textwrap.dedent(source.replace("{name!r}", repr(name)))
            (self.path / f"{module}.py").write_text(code)
            lines.append(f"{name} = {module}")
        self.describe(distribution, "\n".join(lines))

    def describe(
        self, distribution: str, entry_points: str, *, version: str = "1.0", requires: str = ""
    ) -> None:
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(text + needs)
        (info / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()

    def registry(self, *, block: tuple[str, ...] = ()) -> Registry:
        """Of what is installed here, and of nothing else."""
        found = metadata.distributions(path=[str(self.path)])
        return Registry([e for d in found for e in d.entry_points], block=block)

    def imported(self) -> set[str]:
        return {module for module in self.modules if module in sys.modules}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def test_what_is_installed_is_found(site: Site) -> None:
    """In every group, by nothing but its metadata, and imported only when asked for."""
    before = Registry()
    site.install("some-transport", TRANSPORTS, quick=TRANSPORT)
    site.install("some-strategy", STRATEGIES, mine=STRATEGY)
    site.install("some-runtime", RUNTIMES, cluster=RUNTIME)
    registry = Registry()
    for group, name in ((TRANSPORTS, "quick"), (STRATEGIES, "mine"), (RUNTIMES, "cluster")):
        assert name not in before.names(group)
        assert name in registry.names(group)
    assert registry.source(TRANSPORTS, "quick") == "some-transport"
    assert site.imported() == set()
    spec = registry.transport("quick")
    assert isinstance(spec, TransportSpec)
    assert registry.transport("quick") is spec
    assert site.imported() == {"site_some_transport_quick"}
    assert issubclass(registry.strategy("mine"), Strategy)
    assert registry.runtime("cluster").factory == "nowhere:Class"
    assert "quick" in [s.name for s in registry.transports()]
    assert "cluster" in [s.name for s in registry.runtimes()]
    assert registry.errors() == {}


def test_the_current_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a notebook, say, which is on its path as an empty text."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(gone)
    gone.rmdir()
    inventory = Inventory.taken()
    assert inventory.is_valid_here()
    assert all(map(os.path.isabs, inventory.path))
    with pytest.raises(ConfigurationError, match="which somebody has removed"):
        check_spill("below", None)


def test_a_version_of_an_object_is_no_place_to_spill_to() -> None:
    """All objects there would be one, for which s3fs takes what follows."""
    with pytest.raises(
        ConfigurationError, match=r"names a version of one object.*without .versionI"
    ):
        check_spill("s3://bucket/folder?versionId=7", None)


def test_a_clock_that_was_set_back_does_not_make_every_search_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tomorrow = time.time() + 86400
    os.utime(tmp_path, (tomorrow, tomorrow))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed() is installed()


def test_the_built_ins_come_through_the_same_door() -> None:
    registry = Registry()
    assert {"shm", "inline", "inprocess"} <= set(registry.names(TRANSPORTS))
    assert {"singleton", "local-rank", "host"} <= set(registry.names(STRATEGIES))
    assert "local" in registry.names(RUNTIMES)
    assert registry.source(TRANSPORTS, "shm") == "torchstore-transports"
    load_all(registry)
    assert registry.errors() == {}


BROKEN: dict[str, tuple[str, str, str]] = {
    # name: group, source, what the error says
    "no_module": (TRANSPORTS, "import surely_not_installed", "surely_not_installed"),
    "syntax": (TRANSPORTS, "def (:", "SyntaxError"),
    "raises": (TRANSPORTS, "raise RuntimeError('no driver')", "no driver"),
    "divides": (TRANSPORTS, "1 / 0", "ZeroDivisionError"),
    "exits": (TRANSPORTS, "raise SystemExit(3)", "SystemExit(3)"),
    "panics": (
        OBSERVERS,
        "class Panic(BaseException): pass\nraise Panic('in the engine')",
        "in the engine",
    ),
    "hook_exits": (
        RUNTIMES,
        "@hookimpl\ndef torchstore_runtime(): raise SystemExit('no')\n",
        "SystemExit('no')",
    ),
    "empty": (TRANSPORTS, "", "does not implement the hook torchstore_transport"),
    "undecorated": (
        TRANSPORTS,
        "def torchstore_transport(): return None",
        "does not implement the hook torchstore_transport",
    ),
    "misspelt": (
        TRANSPORTS,
        TRANSPORT + "\n@hookimpl\ndef torchstore_transprot(): return None\n",
        "torchstore_transprot",
    ),
    "only_misspelt": (
        OBSERVERS,
        "@hookimpl\ndef torchstore_operations(operation): pass\n",
        "torchstore_operations",
    ),
    "wrong_argument": (
        OBSERVERS,
        "@hookimpl\ndef torchstore_operation(op): pass\n",
        "op",
    ),
    "other_group": (STRATEGIES, TRANSPORT, "does not implement the hook torchstore_strategy"),
    "hook_fails": (
        TRANSPORTS,
        "@hookimpl\ndef torchstore_transport(): raise OSError('no such card')\n",
        "no such card",
    ),
    "asynchronous": (
        TRANSPORTS,
        "@hookimpl\nasync def torchstore_transport(): return None\n",
        "must be a plain function, not async",
    ),
    "asynchronous_strategy": (
        STRATEGIES,
        "@hookimpl\nasync def torchstore_strategy(): return None\n",
        "must be a plain function, not async",
    ),
    "asynchronous_observer": (
        OBSERVERS,
        "@hookimpl\nasync def torchstore_operation(operation): pass\n",
        "must be a plain function, not async",
    ),
    "asynchronous_generator": (
        OBSERVERS,
        "@hookimpl\nasync def torchstore_operation(operation): yield\n",
        "must be a plain function, not async",
    ),
    "generator": (
        OBSERVERS,
        "@hookimpl\ndef torchstore_operation(operation): yield\n",
        "must be a plain function, without a yield",
    ),
    "coroutine_in_disguise": (
        STRATEGIES,
        "async def later(): pass\n@hookimpl\ndef torchstore_strategy(): return later()\n",
        "must return a subclass of Strategy",
    ),
    "two_hooks": (
        TRANSPORTS,
        TRANSPORT + "\n@hookimpl\ndef torchstore_operation(operation): pass\n",
        "implements torchstore_operation, too, which nobody would call",
    ),
    "no_hook": (OBSERVERS, "", "does not implement the hook torchstore_operation"),
    "wrong_type": (
        TRANSPORTS,
        "@hookimpl\ndef torchstore_transport(): return {'name': 'wrong_type'}\n",
        "must return a TransportSpec",
    ),
    "nothing": (
        TRANSPORTS,
        "@hookimpl\ndef torchstore_transport(): return None\n",
        "must return a TransportSpec",
    ),
    "wrong_runtime": (
        RUNTIMES,
        "@hookimpl\ndef torchstore_runtime(): return 'local'\n",
        "must return a RuntimeSpec",
    ),
    "no_strategy": (
        STRATEGIES,
        "@hookimpl\ndef torchstore_strategy(): return dict\n",
        "must return a subclass of Strategy",
    ),
    "instance": (
        STRATEGIES,
        STRATEGY.replace("return Mine", "return Mine()"),
        "must return a subclass of Strategy",
    ),
    "other_name": (TRANSPORTS, TRANSPORT.replace("{name!r}", "'fast'"), "calls itself 'fast'"),
    "other_tag": (STRATEGIES, STRATEGY.replace("{name!r}", "'x'"), "needs tag='other_tag'"),
}


KEPT = """
class Kept:
    @hookimpl
    def torchstore_operation(self): pass
instance = Kept()
"""


def test_an_entry_point_may_name_an_instance_and_not_its_class(site: Site) -> None:
    """The hook of a class failed at each call, of which ``torchstore doctor`` saw nothing."""
    site.install("package", OBSERVERS, kept=KEPT)
    (kept,) = site.registry()._entries[OBSERVERS]["kept"]
    whole, cls = (
        Registry([msgspec.structs.replace(kept, value=f"{kept.value}:{attribute}")])
        for attribute in ("instance", "Kept")
    )
    assert [*whole.observers()] == ["kept"]
    assert [*cls.observers()] == []
    assert "a method of the class Kept; the entry" in cls.left_out(OBSERVERS)["kept"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_recorded_and_raised_only_when_asked_for(site: Site, name: str) -> None:
    group, source, says = BROKEN[name]
    site.install("good-package", group, good={
        TRANSPORTS: TRANSPORT,
        STRATEGIES: STRATEGY,
        RUNTIMES: RUNTIME,
        OBSERVERS: "@hookimpl\ndef torchstore_operation(operation): pass\n",
    }[group])  # fmt: skip
    site.install("bad-package", group, **{name: source})
    registry = site.registry()
    assert registry.names(group) == sorted(["good", name])
    several: dict[str, Callable[[], list[Any]]] = {
        TRANSPORTS: registry.transports,
        RUNTIMES: registry.runtimes,
        OBSERVERS: lambda: [*registry.observers()],
        STRATEGIES: lambda: [registry.strategy("good"), load_all(registry)][:1],
    }
    assert len(several[group]()) == 1  # the good one, and no exception
    for _ in range(2):  # it stays broken, and is not imported again and again
        with pytest.raises(PluginError) as caught:
            registry.load(group, name)
        assert says in caught.value.message
        assert repr(name) in caught.value.message
        assert "bad-package" in caught.value.message
    assert registry.errors() == {f"{group}:{name}": caught.value.message}
    assert len(several[group]()) == 1
    assert registry.load(group, "good") is not None
    gc.collect()  # a coroutine that was never awaited would warn here, and warnings are errors


@pytest.mark.parametrize("requires", ["torchstore-core>=99,<100", "torchstore_core[urls] (<0.0.1)"])
def test_a_broken_one_of_another_release_says_which_one_it_requires(
    site: Site, requires: str
) -> None:
    """As pip leaves it, if it upgrades the core alone. One that works says nothing."""
    half = TRANSPORT.replace("in_band=True", "client='site_late_slow:Link'")
    site.install("site-late", TRANSPORTS, gone="import torchstore_core.gone", works=half)
    text = "[torchstore.transports]\ngone = site_site_late_gone\nworks = site_site_late_works\n"
    site.describe("site-late", text, requires=requires)
    registry = site.registry()
    assert [spec.name for spec in registry.transports()] == ["works"]
    here = metadata.version("torchstore-core")
    bounds = Requirement(requires).specifier
    says = f"site-late 1.0 requires torchstore-core {bounds}, and {here} is installed"
    with pytest.raises(PluginError) as caught:
        registry.transport("gone")
    assert "No module named 'torchstore_core.gone'" in caught.value.message
    assert says in caught.value.message
    with pytest.raises(PluginError) as caught:
        load_class("site_late.link:Link")  # of the package that is called as the distribution
    assert says in caught.value.message


def test_one_broken_plug_in_does_not_spoil_the_check_of_the_next(site: Site) -> None:
    """pluggy checks all hooks at once: what was refused must not be there any more."""
    site.install("bad", TRANSPORTS, a_bad=BROKEN["misspelt"][1])
    site.install("good", TRANSPORTS, b_good=TRANSPORT, c_good=TRANSPORT)
    registry = site.registry()
    assert [spec.name for spec in registry.transports()] == ["b_good", "c_good"]


@pytest.mark.parametrize("group", [TRANSPORTS, STRATEGIES, RUNTIMES])
def test_two_distributions_that_claim_one_name_are_both_named(site: Site, group: str) -> None:
    """To whoever asks for it. All others go on without it; they were stopped by this error."""
    source = {TRANSPORTS: TRANSPORT, STRATEGIES: STRATEGY, RUNTIMES: RUNTIME}[group]
    site.install("first-package", group, taken=source, fine=source)
    site.install("second-package", group, taken=source)
    registry = site.registry()
    assert registry.source(group, "taken") == "first-package, second-package"
    with pytest.raises(PluginError, match="first-package and second-package") as caught:
        registry.load(group, "taken")
    assert "'taken'" in caught.value.message
    assert "block=['taken'], or TORCHSTORE_BLOCK=taken" in caught.value.message
    assert registry.clashes() == [caught.value.message]
    assert registry.left_out(group) == {"taken": caught.value.message}
    if group == STRATEGIES:
        assert registry.strategy("fine").__struct_config__.tag == "fine"
    else:
        assert [spec.name for spec in all_of(registry, group)] == ["fine"]
    # Neither was imported: who knows which one the user meant.
    assert not any(module.endswith("_taken") for module in site.imported())
    # The user can decide.
    assert site.registry(block=("taken",)).names(group) == ["fine"]
    assert site.registry(block=("taken",)).clashes() == []


async def test_a_store_goes_on_without_names_that_are_claimed_twice(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """It did not start, whoever had installed the two packages. Now it says what it does without:
    once in a process, and whenever it is asked.
    """
    for package in ("first-package", "second-package"):
        site.install(f"{package}-a", TRANSPORTS, taken=TRANSPORT, shm=TRANSPORT)
        site.install(f"{package}-b", STRATEGIES, singleton=STRATEGY)
        site.install(f"{package}-c", RUNTIMES, local=RUNTIME, grid=RUNTIME)
    for name in ("one", "two"):
        await ts.initialize(capacity=1 << 20, prefault=0, store_name=name)
        await ts.put("w", 1, store_name=name)
        assert await ts.get("w", store_name=name) == 1
        (link,) = await ts.explain(1 << 20, store_name=name)
        assert link["chosen"] == "shm"
        assert "first-package-a and second-package-a" in link["refusals"]["taken"]
        assert "a name of torchstore-transports" in link["refusals"]["shm (first-package-a)"]
        left_out = (await ts.status(store_name=name)).plugin_errors
        assert "first-package-a and second-package-a" in left_out[f"{TRANSPORTS}:taken"]
        await ts.shutdown(store_name=name)
    said = [r.getMessage() for r in caplog.records if "package" in r.getMessage()]
    assert sorted(said) == sorted(Registry().clashes())


@pytest.mark.parametrize(
    "asked", [{"prefer": ["taken"]}, {"strategy": ts.SpreadStrategy(transport="taken")}, {}]
)
async def test_a_transport_that_two_distributions_claim_can_be_asked_for_in_no_way(
    site: Site, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """What prefers or forces it says so at once, and not when the first bytes are to move."""
    for package in ("first-package", "second-package"):
        site.install(package, TRANSPORTS, taken=TRANSPORT)
    if not asked:
        monkeypatch.setenv("TORCHSTORE_TRANSPORT", "taken")
    with pytest.raises(PluginError, match="claimed by first-package and second-package"):
        await ts.initialize(capacity=1 << 20, prefault=0, **asked)


def test_a_name_of_the_stores_own_packages_stays_with_them(site: Site) -> None:
    """No stranger can take shared memory, or the runtime, from a store by its name."""
    own = {TRANSPORTS: "shm", STRATEGIES: "singleton", RUNTIMES: "local"}
    for group, source in zip(own, (TRANSPORT, STRATEGY, RUNTIME), strict=True):
        site.install(f"stranger-of-{group.partition('.')[2]}", group, **{own[group]: source})
    registry = Registry()
    packages = ("torchstore-transports", "torchstore-strategies", "torchstore-core")
    for (group, name), package in zip(own.items(), packages, strict=True):
        assert registry.source(group, name) == package
        assert name in [getattr(registry.load(group, name), "name", name)]
        stranger = f"stranger-of-{group.partition('.')[2]}"
        named = f"{name} ({stranger})"
        assert named in registry.names(group)
        with pytest.raises(PluginError, match=f"of {stranger} is not used.*{package}"):
            registry.load(group, named)
        registry.check_installed("setting", [name], [group])
        with pytest.raises(ConfigurationError):
            registry.check_installed("setting", [named], [group])
        assert not {name, named} & {*Registry(block=[name]).names(group)}
    assert len(registry.clashes()) == len(own)
    assert site.imported() == set()


@pytest.mark.parametrize("name", ["fast", "fast-rdma"])
def test_a_package_called_after_its_plugins_keeps_their_names(site: Site, name: str) -> None:
    """As those of this repository are that the core does not know."""
    site.install("stranger", TRANSPORTS, **{name: TRANSPORT})
    site.install("torchstore-fast", TRANSPORTS, **{name: TRANSPORT})
    registry = site.registry()
    assert [spec.name for spec in registry.transports()] == [name]
    assert registry.source(TRANSPORTS, name) == "torchstore-fast"
    [clash] = registry.clashes()
    assert "of stranger is not used, because that is a name of torchstore-fast" in clash


def test_packages_of_this_repository_keep_their_names() -> None:
    """Whatever else is installed: all that they register, but observers."""
    for plugin in installed():
        if plugin.distribution.startswith("torchstore-") and plugin.group != OBSERVERS:
            claimants = ["a-stranger", plugin.distribution]
            assert _owner(plugin.group, plugin.name, claimants) == plugin.distribution


@pytest.mark.parametrize(
    "arguments",
    [
        "lambda mesh: 1 / 0",
        "lambda mesh: 'high'",
        "lambda mesh: exit(3)",
        "lambda mesh: None, here=lambda: 1 / 0, find='nowhere:find'",
        "lambda mesh: None, advise=lambda names, mesh: 1 / 0",
        "lambda mesh: None, advise=lambda names, mesh: 7",
    ],
)
async def test_a_runtime_whose_functions_fail_is_left_out(
    site: Site, caplog: pytest.LogCaptureFixture, arguments: str
) -> None:
    """``initialize`` asks those of all runtimes, and each call without a store here."""
    source = RUNTIME.replace("lambda mesh: 1", arguments)
    site.install("some-package", RUNTIMES, bad=source)
    with pytest.raises(ts.StoreClosedError):
        await ts.get("w", store_name="nobody's")
    assert type(starting.runtime(Registry(), "auto", None)).__name__ == "LocalRuntime"
    said = [r.getMessage() for r in caplog.records if "some-package" in r.getMessage()]
    assert len(said) == 1
    assert "runtime 'bad' (from some-package) is left out: its function" in said[0]


def test_what_is_asked_must_be_a_function(site: Site) -> None:
    site.install("some-package", RUNTIMES, bad=RUNTIME.replace("lambda mesh: 1", "None"))
    with pytest.raises(PluginError, match="its applies is a NoneType"):
        site.registry().runtime("bad")
    bad = TRANSPORT.replace('lambda context: Bid(1e-6, 1e9, "always")', "Bid(1e-6, 1e9, '')")
    site.install("another-package", TRANSPORTS, bad=bad)
    with pytest.raises(PluginError, match="its bid is a Bid"):
        site.registry().transport("bad")


def test_the_cores_own_names_are_those_of_its_packages() -> None:
    """What strangers cannot take is what its packages register, all of it."""
    found = {
        (plugin.group, plugin.name): plugin.distribution
        for plugin in installed()
        if plugin.distribution in OWN_NAMES.values()
    }
    assert found == OWN_NAMES


def test_observers_of_one_name_are_both_told(site: Site) -> None:
    """Nobody asks for them by name, so none is in the way of another."""
    source = """
    seen = []

    @hookimpl
    def torchstore_operation(operation):
        seen.append(operation.name)
    """
    for package in ("first-package", "second-package"):
        site.install(package, OBSERVERS, metrics=source)
    registry = site.registry()
    for observer in registry.observers().values():
        observer(operation=Operation("put", "s", 1, 2, "shm", 0.1, {}))
    modules = [f"site_{package}_package_metrics" for package in ("first", "second")]
    assert [sys.modules[module].seen for module in modules] == [["put"], ["put"]]
    assert registry.clashes() == []
    assert site.registry(block=("metrics",)).observers() == {}
    (left,) = site.registry(block=("metrics (first-package)",)).observers()
    assert left == "metrics (second-package)"
    Registry().check_installed("block=", ["metrics", "metrics (first-package)"])


def test_a_module_that_imports_torch_is_named(site: Site) -> None:
    """It was accepted without a word, and every server imported torch.

    Here is one in its place.
    """
    (site.path / "torch.py").touch()
    for name, start in (("heavy", "import torch"), ("light", "")):
        site.install(f"{name}-package", STRATEGIES, **{name: f"{start}\n{STRATEGY}"})
    load = (
        "from torchstore_core.plugins.registry import Registry\n"
        "registry = Registry()\n"
        "registry.strategy('light'), registry.strategy('heavy')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site.path)}
    command = [sys.executable, "-c", load]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (said,) = done.stderr.splitlines()
    assert "strategy 'heavy' (from heavy-package) imports torch" in said


def test_a_strategy_that_can_be_changed_is_refused(site: Site) -> None:
    """It was accepted, and what it remembered was gone with the server."""
    site.install("mutable", STRATEGIES, mine=STRATEGY.replace("frozen=True", "frozen=False"))
    with pytest.raises(PluginError, match="must be frozen"):
        site.registry().strategy("mine")


def all_of(registry: Registry, group: str) -> list[Any]:
    return registry.transports() if group == TRANSPORTS else registry.runtimes()


def test_a_distribution_seen_twice_is_no_conflict(site: Site, tmp_path: Path) -> None:
    """An editable install and built metadata beside it, say."""
    site.install("twice", TRANSPORTS, quick=TRANSPORT)
    again = tmp_path / "elsewhere"
    again.mkdir()
    other = Site(again)
    other.describe("Twice", f"[{TRANSPORTS}]\nquick = site_twice_quick\n", version="1.1")
    sys.path.append(str(again))
    try:
        registry = Registry()
        assert registry.source(TRANSPORTS, "quick") == "twice"
        assert registry.transport("quick").name == "quick"
    finally:
        sys.path.remove(str(again))


def test_an_older_copy_is_hidden_by_one_without_plug_ins(site: Site, tmp_path: Path) -> None:
    """As for import, the first on the path counts."""
    site.describe("shrunk", "[console_scripts]\nx = shrunk:main\n", version="2.0")
    old = tmp_path / "old"
    old.mkdir()
    Site(old).describe("Shrunk", f"[{TRANSPORTS}]\nshrunk = shrunk.plugin\n")
    sys.path.append(str(old))
    try:
        assert "shrunk" not in Registry().names(TRANSPORTS)
    finally:
        sys.path.remove(str(old))
    sys.path.insert(0, str(old))
    try:
        assert "shrunk" in Registry().names(TRANSPORTS)
    finally:
        sys.path.remove(str(old))


def test_what_is_installed_is_looked_up_again_when_it_changes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes milliseconds, and every call that finds a store makes a registry."""
    site.install("first", TRANSPORTS, quick=TRANSPORT)
    os.utime(site.path, (0, 0))  # long ago: a new change has another time stamp for certain
    monkeypatch.setattr(sys, "path", [str(site.path)])
    assert "quick" in Registry().names(TRANSPORTS)
    (site.path / "first-1.0.dist-info" / "entry_points.txt").unlink()
    assert "quick" in Registry().names(TRANSPORTS)  # no folder of the path has changed
    site.install("second", TRANSPORTS, later=TRANSPORT)
    names = Registry().names(TRANSPORTS)
    assert "quick" not in names
    assert "later" in names


def test_a_blocked_name_is_not_even_imported(site: Site) -> None:
    site.install("package", TRANSPORTS, crashes="raise SystemExit(3)", fine=TRANSPORT)
    registry = site.registry(block=("crashes",))
    assert registry.names(TRANSPORTS) == ["fine"]
    assert [spec.name for spec in registry.transports()] == ["fine"]
    load_all(registry)
    assert site.imported() == {"site_package_fine"}
    with pytest.raises(PluginError, match="transport 'crashes' is blocked by configuration"):
        registry.transport("crashes")
    assert site.imported() == {"site_package_fine"}


@pytest.mark.parametrize(
    ("group", "name", "says"),
    [
        (TRANSPORTS, "shm", "pip install torchstore-transports"),
        (STRATEGIES, "host", "pip install torchstore-strategies"),
        (RUNTIMES, "monarch", "pip install torchstore-monarch"),
        (TRANSPORTS, "unheard-of", "is its package installed here?"),
        (STRATEGIES, "unheard-of", "no strategy is called 'unheard-of'"),
        (OBSERVERS, "unheard-of", "no plug-in is called 'unheard-of'"),
    ],
)
def test_a_name_that_nobody_has_says_what_to_install(
    site: Site, group: str, name: str, says: str
) -> None:
    site.install("package", TRANSPORTS, quick=TRANSPORT)
    with pytest.raises(PluginError) as caught:
        site.registry().load(group, name)
    assert says in caught.value.message
    installed = "quick" if group == TRANSPORTS else "none"
    assert f"(installed: {installed})" in caught.value.message


ENGINE = """
@hookimpl
def torchstore_runtime():
    return RuntimeSpec({name!r}, "nowhere:Class", lambda mesh: None, spmd="nowhere:start")
"""


async def test_several_engines_that_span_hosts_are_too_many(site: Site) -> None:
    """Which one is meant is said by blocking the others."""
    site.install("engines", RUNTIMES, one=ENGINE, two=ENGINE)
    for block, says in (([], "one and two can each"), (["two"], "cannot import 'nowhere:start'")):
        env = ts.SPMDEnv(0, 0, 4, 2, "127.0.0.1", free_port())
        with pytest.raises(PluginError, match=says):
            await ts.initialize_spmd(env=env, block=[*block, "monarch"])


async def test_what_a_mesh_needs_is_derived_from_its_library(site: Site) -> None:
    """An engine that nobody here knows."""
    site.install("nothing", TRANSPORTS)
    module = ModuleType("novel.meshes")
    module.Mesh = type("Mesh", (), {"__module__": "novel.meshes"})  # type: ignore[attr-defined]
    registry = site.registry()  # without torchstore-spmd, which knows of one engine
    with pytest.raises(PluginError, match="may be in a package torchstore-novel"):
        starting.runtime(registry, "auto", module.Mesh())
    with pytest.raises(PluginError, match=r"no installed runtime takes this mesh\Z"):
        starting.runtime(registry, "auto", object())


def test_metadata_that_cannot_be_read_spoils_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Some other package's, of an install that was interrupted, say."""
    (site.path / "nothing-1.0.dist-info").mkdir()
    site.describe("garbled", "[torchstore.transports\nthis is = not = an entry\npoint")
    site.describe("binary", "")
    (site.path / "binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[\x00")
    site.install("good", TRANSPORTS, quick=TRANSPORT)
    registry = Registry()
    assert {"quick", "shm"} <= {spec.name for spec in registry.transports()}
    assert "unreadable metadata" in caplog.text


def test_entry_points_of_others_are_not_looked_at(site: Site) -> None:
    site.describe("other", "[console_scripts]\nx = surely_not_installed:main\n")
    registry = site.registry()
    load_all(registry)
    assert registry.errors() == {}


def test_every_observer_is_called_whatever_the_others_do(site: Site) -> None:
    source = """
    seen = []

    @hookimpl
    def torchstore_operation(operation):
        seen.append(operation.name)
    """
    site.install(
        "watchers",
        OBSERVERS,
        a=source,
        b="@hookimpl\ndef torchstore_operation(operation): raise ValueError('b')\n",
        c=source,
        d="import surely_not_installed",
        e=source.replace("(operation)", "()").replace("operation.name", "'without'"),
    )
    registry = site.registry()
    operation = Operation("put", "s", 1, 2, "shm", 0.1, {"plan": 0.1})
    failed = 0
    for observer in registry.observers().values():
        try:
            observer(operation=operation)
        except ValueError:
            failed += 1
    assert failed == 1
    assert [sys.modules[f"site_watchers_{name}"].seen for name in "ace"] == [
        ["put"],
        ["put"],
        ["without"],
    ]
    assert list(registry.errors()) == [f"{OBSERVERS}:d"]


# ---- names that nobody has ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize(
    ("field", "names", "says"),
    [
        (
            "prefer",
            ["shn"],
            r"prefer=.*no transport is called 'shn' \(.*inline.*shm.*\).*mean 'shm'",
        ),
        ("prefer", ["shm", "zebra"], "no transport is called 'zebra'.*install its package"),
        ("prefer", ["local"], "no transport is called 'local'"),  # that is a runtime
        ("block", ["in-line"], "block=.*no plug-in is called 'in-line'.*mean 'inline'"),
        ("block", ["Shm", "zebra"], "no plug-in is called 'Shm', 'zebra'.*mean 'shm'"),
    ],
)
def test_a_name_that_nobody_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, how: str, field: str, names: list[str], says: str
) -> None:
    arguments = {field: names}
    if how == "environment":
        monkeypatch.setenv(f"TORCHSTORE_{field.upper()}", ",".join(names))
        arguments = {}
    with pytest.raises(ConfigurationError, match=says) as caught:
        Policy.make(**arguments)
    assert f"TORCHSTORE_{field.upper()}" in caught.value.message


@pytest.mark.parametrize(
    "names", [5, None, "shm", b"shm", [5], [b"shm"], [["shm"]], {"shm": 1}, ("shm", None)], ids=repr
)
@pytest.mark.parametrize("field", ["prefer", "block"])
def test_what_is_no_list_of_names_is_refused(field: str, names: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is a list of names, not"):
        Policy.make(**{field: names})


def test_a_missing_package_of_ours_is_named(site: Site) -> None:
    with pytest.raises(ConfigurationError, match=r"'shm'.*pip install torchstore-transports"):
        Policy(prefer=("shm", "inline")).check_installed(site.registry())


def test_every_kind_of_plug_in_can_be_blocked_broken_or_not(site: Site) -> None:
    for group in GROUPS:
        site.install(f"of-{group[11:]}", group, **{f"broken_{group[11:]}": "1 / 0"})
    names = ["singleton", "local", "shm", *(f"broken_{group[11:]}" for group in GROUPS)]
    policy = Policy.make(block=names)
    registry = Registry(block=policy.block)
    load_all(registry)
    assert registry.errors() == {}
    assert site.imported() == set()
    assert Policy.make({"shm"}, {"shm"}).prefer == ("shm",)
    assert Policy.make(prefer=["broken_transports"]).prefer == ("broken_transports",)


# ---- classes that descriptors name ----------------------------------------------------------


def test_a_class_is_found_by_its_path() -> None:
    assert load_class("torchstore_core.plugins.registry:Registry") is Registry


@pytest.mark.parametrize(
    "path",
    [
        "surely_not_installed:X",
        "torchstore_core.plugins.registry:Missing",
        "torchstore_core.plugins.registry",
        ":",
    ],
)
def test_a_class_that_is_not_there_is_a_plugin_error(path: str) -> None:
    with pytest.raises(PluginError, match=path):
        load_class(path)


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_a_class_whose_module_is_broken_is_a_plugin_error(site: Site, error: str) -> None:
    site.install("package", TRANSPORTS, half=f"raise {error}('no library')")
    with pytest.raises(PluginError, match="no library"):
        load_class("site_package_half:Link")


def test_an_interrupt_is_the_users_and_nothing_is_broken(site: Site) -> None:
    site.install("package", TRANSPORTS, slow="raise KeyboardInterrupt")
    registry = site.registry()
    for load in (lambda: load_all(registry), lambda: load_class("site_package_slow:Link")):
        with pytest.raises(KeyboardInterrupt):
            load()
    assert registry.errors() == {}
