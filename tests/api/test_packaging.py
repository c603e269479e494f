"""Where the packages come from, what they import, and what the server process never touches."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import running_store
from tests.unit.plugins.test_plugins import TRANSPORT, Site

import torchstore_core as ts
from torchstore_core.plugins.installed import installed

ROOT = Path(__file__).parents[2]
SOURCES = {
    "torchstore_core": ROOT / "torchstore_core/src",
    "torchstore_transports": ROOT / "torchstore_transports/src",
    "torchstore_strategies": ROOT / "torchstore_strategies/src",
    "torchstore_cli": ROOT / "plugins/torchstore-cli/src",
    "torchstore_spmd": ROOT / "plugins/torchstore-spmd/src",
    "torchstore_inprocess": ROOT / "plugins/torchstore-inprocess/src",
    "torchstore_gloo": ROOT / "plugins/torchstore-gloo/src",
    "torchstore_torchcomms": ROOT / "plugins/torchstore-torchcomms/src",
    "torchstore_monarch": ROOT / "plugins/torchstore-monarch/src",
    "torchstore_rdma": ROOT / "plugins/torchstore-rdma/src",
    "torchstore_snapshot": ROOT / "plugins/torchstore-snapshot/src",
}
GROUPS = [f"torchstore.{kind}" for kind in ("transports", "strategies", "runtimes", "plugins")]

#: What runs code that arrives as bytes, and what is too large for a server.
FORBIDDEN = re.compile(
    r"(torch|numpy|pickle|_pickle|cloudpickle|dill|shelve|multiprocessing)(\..*)?"
)


def modules_of(package: str) -> list[str]:
    source = SOURCES[package]
    names = (path.relative_to(source).with_suffix("") for path in source.rglob("*.py"))
    return sorted(".".join(name.parts).removesuffix(".__init__") for name in names)


def path_of(module: str) -> Path:
    path = SOURCES[module.partition(".")[0]].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_the_repository_root_the_packages_are_those_in_src():
    """The folders at the root have the packages' names: they must not shadow them."""
    names = list(SOURCES)
    out = _python(
        "import importlib, json\n"
        f"files = [importlib.import_module(name).__file__ for name in {names!r}]\n"
        "print(json.dumps(files))\n"
    )
    for name, file in zip(names, json.loads(out), strict=True):
        assert Path(file) == SOURCES[name] / name / "__init__.py"
        assert (SOURCES[name] / name / "py.typed").is_file()


def test_importing_the_package_does_not_import_torch():
    out = _python(
        "import sys, torchstore_core as ts\n"
        "ts.ObjectRef('k', 1), ts.TensorSlice((), (), ()), ts.StoreFullError, dir(ts)\n"
        "print('torch' in sys.modules)\n"
    )
    assert out == "False\n"


@pytest.mark.thorough
@pytest.mark.parametrize("collects", [True, False])
def test_loading_the_api_collects_no_garbage_and_makes_no_decoder(collects: bool):
    out = _python(
        "import gc, json, torch, torchstore_core as ts\n"
        f"gc.enable() if {collects} else gc.disable()\n"
        "gc.set_threshold(1, 1, 1)\n"
        "runs = [one['collections'] for one in gc.get_stats()]\n"
        "ts.put\n"
        "enabled = gc.isenabled()\n"
        "gc.disable()\n"
        "from torchstore_core.wire import framing\n"
        "made = sorted(n for n in vars(framing) if n.startswith('decode_'))\n"
        "print(json.dumps([enabled, gc.get_stats()[2]['collections'] - runs[2], made]))\n"
    )
    enabled, full, made = json.loads(out)
    assert enabled is collects
    assert full <= 2  # before and after; each of the modules would be the cause of many
    assert made == []


ROOMS = ("server", "contracts", "wire", "machine", "plugins", "reports")


def _server_modules() -> list[str]:
    """What the server loads: its own folders, what they stand on, and every hook module."""
    core = "torchstore_core."
    below = tuple(core + name + "." for name in ROOMS)
    found = [name for name in modules_of("torchstore_core") if f"{name}.".startswith(below)]
    found += [core + name for name in ("errors", "values", "boxes")]
    hooks = [e.module for group in GROUPS for e in importlib.metadata.entry_points(group=group)]
    halves = [
        name for p in SOURCES for name in modules_of(p) if name.endswith((".server", ".plugin"))
    ]
    assert {"torchstore_transports.shm.plugin", "torchstore_inprocess.plugin"} <= set(hooks)
    assert "torchstore_core.server.server" in found
    assert "torchstore_transports.shm.server" in halves
    return list(dict.fromkeys(found + hooks + halves))


def test_server_and_hook_modules_import_neither_torch_nor_pickle():
    out = _python(
        "import importlib, json, sys\n"
        "loaded = {}\n"
        f"for name in {_server_modules()!r}:\n"
        "    before = set(sys.modules)\n"
        "    importlib.import_module(name)\n"
        "    loaded[name] = sorted(set(sys.modules) - before)\n"
        "print(json.dumps(loaded))\n"
    )
    loaded = json.loads(out)
    offenders = {
        name: [module for module in modules if FORBIDDEN.fullmatch(module)]
        for name, modules in loaded.items()
    }
    assert not {name: modules for name, modules in offenders.items() if modules}
    assert "torchstore_core.server.server" in loaded


async def _live(client: ts.Client) -> None:
    """A bit of everything that a server is asked in its life."""
    large = torch.arange(300_000)
    await client.put_batch({"small": 1, "large": large, "pickled": {"tensor": large[:3]}})
    await client.put("strided", large.view(300, 1000).t())
    got = await client.get_batch(["small", "large", "pickled"])
    assert torch.equal(got["pickled"]["tensor"], large[:3])
    await client.get("large", torch.zeros_like(large))
    await client.wait("small", min_version=1)
    with pytest.raises(ts.StoreFullError):
        await client.put("too large", torch.empty(300 << 20, dtype=torch.uint8))
    with pytest.raises(ts.KeyNotFoundError):
        await client.get("missing")
    await client.status()
    await client.stat("large")
    await client.keys()
    await client.delete("large")


@pytest.fixture
def no_engine(runtime: str) -> None:
    """Where there is one, it is in the controller's process, and larger."""
    if runtime == "monarch":
        pytest.skip("the engine itself is in the controller's process, and larger")


@pytest.mark.usefixtures("no_engine")
async def test_the_server_process_never_maps_torch(store):
    await _live(store)
    pid = (await ts.status()).controller_pid
    libraries = re.compile(r"libtorch|libc10|numpy|/_pickle\.")
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not libraries.search(maps)
    assert "torchstore_core.server" in Path(f"/proc/{pid}/cmdline").read_text()
    assert libraries.search(Path("/proc/self/maps").read_text()), "the pattern finds nothing"


@pytest.mark.parametrize("strategy", ["singleton", "host"])
async def test_the_server_process_never_imports_what_is_forbidden(monkeypatch, capfd, strategy):
    """Python itself lists, on standard error, everything that a server imports in its life."""
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    async with running_store(strategy=strategy) as client:
        monkeypatch.delenv("PYTHONVERBOSE")
        await _live(client)
    imported = set(re.findall(r"^import '([\w.]+)' #", capfd.readouterr().err, re.MULTILINE))
    assert {"torchstore_core.server.server", "torchstore_transports.shm.server"} <= imported
    assert not [name for name in sorted(imported) if FORBIDDEN.fullmatch(name)]


async def test_a_server_does_not_look_for_plug_ins_that_it_was_told_of(monkeypatch, capfd):
    """Looking takes modules of 1.5 MB. What is blocked would ask for versions."""
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    async with running_store(block=("rdma", "gloo", "torchcomms", "torchcomms-rdma")) as client:
        monkeypatch.delenv("PYTHONVERBOSE")
        await _live(client)
        status = await client.status()
    assert "shm" in [name for volume in status.volumes for name in volume.transports]
    imported = set(re.findall(r"^import '([\w.]+)' #", capfd.readouterr().err, re.MULTILINE))
    assert "torchstore_core.plugins.installed" in imported
    assert "importlib.metadata" not in imported


async def test_a_server_is_not_told_of_plug_ins_in_the_folder_of_the_program(tmp_path, monkeypatch):
    """It could not import them, and would report that as an error."""
    monkeypatch.syspath_prepend(str(tmp_path))
    Site(tmp_path).install("near-the-program", "torchstore.transports", near=TRANSPORT)
    assert "near" in [plugin.name for plugin in installed()]
    async with running_store() as client:
        status = await client.status()
        assert not [error for error in status.plugin_errors if "near" in error]
        assert "shm" in [name for volume in status.volumes for name in volume.transports]


async def test_a_server_finds_plug_ins_on_a_path_that_is_new_to_it(tmp_path, monkeypatch):
    """``PYTHONPATH`` may be changed after the program was started, which cannot find them then."""
    Site(tmp_path).install("only-there", "torchstore.transports", only_there="import nowhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "only_there" not in [plugin.name for plugin in installed()]
    async with running_store() as client:
        status = await client.status()
    assert [error for error in status.plugin_errors if "only_there" in error]


@pytest.mark.usefixtures("no_engine")
async def test_an_empty_server_is_small(store):
    pid = (await ts.status()).controller_pid
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert int(kilobytes) < 40 * 1024


def _siblings(distribution: importlib.metadata.Distribution) -> list[str]:
    """The bounds of what it requires of this repository: they use each other's modules."""
    names = {name.replace("_", "-") for name in SOURCES}
    found = [re.match(r"([\w-]+)([^;]*)", line) for line in distribution.requires or []]
    return [one[2] for one in found if one is not None and one[1] in names]


def _same_minor_release(version: str) -> str:
    """From a release to the next one that may change what others use, as metadata says it.

    A newer transport beside an older core would be one that cannot be imported.
    """
    major, minor, _ = version.split(".")
    return f"<{major}.{int(minor) + 1},>={version}"


def test_distributions_declare_ranges_and_their_doors():
    core = importlib.metadata.distribution("torchstore-core")
    runtime = [line for line in core.requires or [] if "extra ==" not in line]
    names = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in runtime}
    needed = {"torch", "msgspec", "packaging", "pluggy", "sortedcontainers"}
    assert needed <= names <= {*needed, "uvloop"}
    for name in SOURCES:
        distribution = importlib.metadata.distribution(name.replace("_", "-"))
        assert not [line for line in distribution.requires or [] if "==" in line.split(";")[0]]
        assert distribution.metadata["License-Expression"] == "BSD-3-Clause"
        assert {*_siblings(distribution)} <= {_same_minor_release(distribution.version)}
    doors = {group: importlib.metadata.entry_points(group=group).names for group in GROUPS}
    assert {"shm", "inline"} <= doors["torchstore.transports"]
    assert {"singleton", "local-rank", "host"} <= doors["torchstore.strategies"]
    assert "local" in doors["torchstore.runtimes"]
