"""The architecture's arrows: who may import what. Lint says so; this shows that it is so."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "torchstore_core" / "src"
SOURCES = [
    CORE,
    ROOT / "torchstore_transports" / "src",
    ROOT / "torchstore_strategies" / "src",
    *sorted((ROOT / "plugins").glob("*/src")),
]
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CODEC = CORE / "torchstore_core" / "clients" / "values" / "codec.py"


def modules(*folders: Path) -> list[Path]:
    found = sorted(path for folder in folders for path in folder.rglob("*.py"))
    assert found
    return found


def imported(path: Path, *, everywhere: bool) -> set[str]:
    """Top-level packages that a module imports: anywhere, or when it is imported itself.

    What stands under ``if TYPE_CHECKING`` is imported by no one.
    """
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text()), everywhere=everywhere):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).partition(".")[0])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, (ast.Name, ast.Attribute))
            and ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            names.add(str(node.args[0].value).partition(".")[0])
    return names


def statements(node: ast.AST, *, everywhere: bool) -> Iterator[ast.AST]:
    """All nodes below ``node`` that run, without the bodies of functions unless ``everywhere``."""
    for child in ast.iter_child_nodes(node):
        if not everywhere and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(body=child.orelse, type_ignores=[])
        yield child
        yield from statements(child, everywhere=everywhere)


def server_side() -> list[Path]:
    """What a server process imports, and what hooks are made of."""
    package = CORE / "torchstore_core"
    found = [
        *modules(*(package / name for name in ("server", "wire", "contracts"))),
        *modules(*(package / name for name in ("machine", "plugins", "reports"))),
        *(package / f"{name}.py" for name in ("errors", "values", "boxes")),
        *modules(ROOT / "torchstore_strategies" / "src"),
        *(p for p in modules(*SOURCES) if p.name in ("plugin.py", "server.py", "local_plugin.py")),
    ]
    assert all(path.is_file() for path in found)
    return sorted(set(found))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_finder_finds_imports(tmp_path: Path) -> None:
    """Otherwise all of the following would pass for ever."""
    path = tmp_path / "m.py"
    path.write_text(
        "import os, torch.nn\nfrom pickle import loads\nfrom . import x\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import numpy\nelse:\n    import else_\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\n"
        "def f():\n    import marshal\n    import importlib\n"
        "    importlib.import_module('dill.x')\n"
        "class C:\n    import inner\n"
    )
    top = {"os", "torch", "pickle", "typing", "else_", "tried", "inner"}
    assert imported(path, everywhere=False) == top
    assert imported(path, everywhere=True) == top | {"marshal", "importlib", "dill"}


@pytest.mark.parametrize("path", server_side(), ids=label)
def test_the_server_side_imports_neither_torch_nor_pickle(path: Path) -> None:
    """Not even inside a function: it runs in the server."""
    assert not imported(path, everywhere=True) & (UNSAFE | {"torch", "numpy"})


@pytest.mark.parametrize("path", modules(*SOURCES), ids=label)
def test_only_the_codec_imports_pickle(path: Path) -> None:
    found = imported(path, everywhere=True) & UNSAFE
    assert found == ({"pickle", "cloudpickle"} if path == CODEC else set())
    assert "cloudpickle" not in imported(path, everywhere=False)


@pytest.mark.parametrize("path", modules(*SOURCES), ids=label)
def test_arrows_between_packages(path: Path) -> None:
    """Plug-ins depend on the core alone; the core depends on none of them."""
    ours = {name for name in imported(path, everywhere=True) if name.startswith("torchstore_")}
    own = path.relative_to(next(s for s in SOURCES if path.is_relative_to(s))).parts[0]
    assert ours <= {own, "torchstore_core"}


def test_the_core_names_no_engine() -> None:
    """How a store spans hosts is a contract; who implements it is found by what is installed."""
    files = [path for path in (ROOT / "torchstore_core").rglob("*") if path.is_file()]
    named = [
        path
        for path in files
        if path.suffix in (".py", ".pyi", ".md", ".toml", ".c")
        and "monarch" in path.read_text().lower()
    ]
    assert len(files) > 50
    assert not named


@pytest.mark.parametrize("path", modules(CORE / "torchstore_core" / "server"), ids=label)
def test_the_server_knows_nothing_of_the_client(path: Path) -> None:
    text = path.read_text()
    assert "torchstore_core.clients" not in text
    assert "torchstore_core.api" not in text


# ---- what is really imported ----------------------------------------------------------------


def after(code: str, *, modules: set[str]) -> list[str]:
    """Which of ``modules`` a fresh interpreter has after running ``code``."""
    program = (
        f"{code}\nimport sys, json\n"
        f"print(json.dumps([m for m in {sorted(modules)!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("TORCHSTORE_")},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


# A whole server that serves every kind of request, and two volumes with all their transports.
SERVE = """
import asyncio, tempfile
try:
    from uvloop import run
except ImportError:
    from asyncio import run
from torchstore_core.machine import topology
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.server import __main__
from torchstore_core.server.server import Server, ServerOptions
from torchstore_core.values import ObjectMeta, TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

async def main(directory):
    options = ServerOptions(
        num_storage_volumes=2, capacity=64 << 20, prefault=1 << 20, strategy="host",
        directory=directory,
    )
    server = Server(options)
    address = await server.start()
    receive, send = await asyncio.open_unix_connection(address.partition(":")[2])
    reader = FrameReader(m.MAX_FRAME)

    async def ask(request, expected):
        send.write(encode(request))
        replies = []
        while not replies:
            data = await receive.read(1 << 16)
            assert data
            replies = [decode_reply(body) for body in reader.feed(data)]
            replies = [reply for reply in replies if type(reply) is not m.Warmed]
        (reply,) = replies
        assert type(reply) is expected, reply
        return reply

    here = topology.probe()
    facts = ClientFacts(here.pid, here.host_id, here.hostname)
    welcome = await ask(m.Hello(1, m.PROTOCOL_VERSION, b"", here, facts), m.Welcome)
    assert "shm" in welcome.volumes[1].offers
    items = [
        m.PutItem("a", TensorMeta("float32", (2,)), 8, bytes(8)),
        m.PutItem("o", ObjectMeta("pickle"), 4, b"\\x80\\x04N."),
    ]
    placed = m.PutItem("b", TensorMeta("int8", (9000,)), 9000)
    await ask(m.Put(2, 1, items), m.Committed)
    await ask(m.Put(3, 2, [placed]), m.Granted)
    await ask(m.Commit(4, 2), m.Committed)
    await ask(m.Locate(5, 3, [m.Want("b"), m.Want("o")], -1), m.Located)
    send.write(encode(m.Release([3])) + encode(m.Abort([9])) + encode(m.Cancel(9)))
    await ask(m.Exists(6, ["a"]), m.Flags)
    await ask(m.Delete(7, ["a"], True), m.Deleted)
    await ask(m.Delete(8, ["a"], True), m.Failure)
    await ask(m.Keys(9, ""), m.KeyList)
    await ask(m.Wait(10, ["b"], 1), m.Committed)
    await ask(m.Unmet(10, ["b"], 7), m.UnmetKeys)
    await ask(m.Stat(11, "b"), m.Found)
    await ask(m.List(12, ""), m.Listing)
    await ask(m.Status(13), m.StatusReport)
    await ask(m.Shutdown(14), m.Done)
    await server.serve()
    await server.close()
    send.close()
    server.registry.load_all()
    assert not server.registry.errors()

with tempfile.TemporaryDirectory() as directory:
    run(main(directory))
"""


def test_a_server_that_serves_never_imports_torch() -> None:
    heavy = {"torch", "numpy", "torch._C"}
    assert after("import torch", modules=heavy) != []
    assert after(SERVE, modules=heavy) == []


def test_a_server_that_serves_has_no_unpickler() -> None:
    """Not even one that the standard library brought along."""
    assert after("import multiprocessing.pool", modules=UNSAFE) != []
    # marshal is the interpreter's own, and there from its start: it reads .pyc files.
    assert after(SERVE, modules=UNSAFE) == after("", modules=UNSAFE) == ["marshal"]


def test_importing_the_package_imports_no_torch() -> None:
    """The server imports it too; torch comes with the first name that needs it."""
    names = "; ".join(
        f"torchstore_core.{name}" for name in ("ObjectRef", "TensorSlice", "KeyNotFoundError")
    )
    assert after(f"import torchstore_core; {names}", modules={"torch", "pickle"}) == []
    assert after("import torchstore_core; torchstore_core.Client", modules={"torch"}) == ["torch"]


@pytest.mark.parametrize("path", modules(*SOURCES), ids=label)
def test_there_is_no_assert_in_the_sources(path: Path) -> None:
    """They are not there under ``python -O``."""
    if "testing" in path.parts:
        pytest.skip("the conformance kit is made of tests")
    assert not [
        n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)
    ]


@pytest.mark.parametrize("path", modules(*SOURCES), ids=label)
def test_only_one_module_listens(path: Path) -> None:
    """It knows what to do when descriptors are used up (asyncio's servers do not)."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    found = called & {"listen", "accept", "create_server", "create_unix_server"}
    found |= called & {"start_server", "start_unix_server"}
    assert not found or path.name == "listening.py"


#: Functions of the client that may look at an address: the one that gives it to be moved from or
#: to, with its checks; what comes after it; what asks for that of a tensor which it has made, or
#: which was looked at in the same turn; and those that only compare addresses.
MAY_ASK_FOR_ADDRESSES = {
    *("address_of", "check_destination"),
    *("rows_of", "_pinned_parts"),
    *("_address", "inline_bytes"),
    *("find", "memory_of", "__init__", "from_bytes"),
}


def test_addresses_of_tensors_are_given_by_one_function() -> None:
    """An address and a length are not a tensor: its storage may be smaller than its shape."""
    found = set()
    for path in modules(CORE / "torchstore_core" / "clients"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
                if any(attribute.attr == "data_ptr" for attribute in inner):
                    found.add(node.name)
    assert found == MAY_ASK_FOR_ADDRESSES


def test_every_time_out_is_raised_with_details() -> None:
    """Programs read how long it was, and of what; people see no unrounded seconds."""
    found = 0
    for path in modules(*SOURCES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "StoreTimeoutError":
                found += 1
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert "details" in [word.arg for word in node.keywords], where
    assert found > 10
