"""What no linter knows of the architecture, and what a process has really imported.

Who may import whom is said in ``pyproject.toml`` (``[tool.importlinter]``), and checked by
``make check``.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import subprocess
import sys
from collections import Counter
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


def nodes(*folders: Path) -> Iterator[tuple[str, ast.AST]]:
    """Everything in the modules below, each with where it is."""
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    assert paths
    for path in paths:
        name = path.relative_to(ROOT)
        for node in _nodes(path):
            yield f"{name}:{getattr(node, 'lineno', 0)}", node


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """All are kept; to look for garbage in half a million of them would take most of the time."""
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_text())))
    finally:
        gc.enable()


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
        timeout=200,
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
from torchstore_core.plugins.installed import GROUPS
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
    await ask(m.Stat(11, "b"), m.StatReply)
    await ask(m.List(12, ""), m.Listing)
    await ask(m.Status(13), m.StatusReply)
    await ask(m.Shutdown(14), m.Done)
    await server.serve()
    await server.close()
    send.close()
    [server.registry.load(g, n) for g in GROUPS for n in server.registry.names(g)]
    assert not server.registry.errors()

with tempfile.TemporaryDirectory() as directory:
    run(main(directory))
"""


@pytest.mark.thorough
def test_a_server_that_serves_never_imports_torch() -> None:
    heavy = {"torch", "numpy", "torch._C"}
    assert after("import torch", modules=heavy) != []
    assert after(SERVE, modules=heavy) == []


def test_a_server_that_serves_has_no_unpickler() -> None:
    """Not even one that the standard library brought along."""
    assert after("import multiprocessing.pool", modules=UNSAFE) != []
    # marshal is the interpreter's own, and there from its start: it reads .pyc files.
    assert after(SERVE, modules=UNSAFE) == after("", modules=UNSAFE) == ["marshal"]


def test_a_server_that_serves_loads_nothing_that_only_others_need() -> None:
    """Neither what a keeper needs, nor what serves clients on other hosts over tcp."""
    rarely = {
        "difflib",
        "torchstore_core.server.keeping.recorded",
        "torchstore_transports.tcp.serving.peers",
    }
    assert set(after(f"import {', '.join(rarely)}", modules=rarely)) == rarely
    assert after(SERVE, modules=rarely) == []


@pytest.mark.thorough
def test_importing_the_package_imports_no_torch() -> None:
    """The server imports it too; torch comes with the first name that needs it."""
    names = "; ".join(
        f"torchstore_core.{name}" for name in ("ObjectRef", "TensorSlice", "KeyNotFoundError")
    )
    assert after(f"import torchstore_core; {names}", modules={"torch", "pickle"}) == []
    assert after("import torchstore_core; torchstore_core.Client", modules={"torch"}) == ["torch"]


# ---- what the sources say -------------------------------------------------------------------


@pytest.mark.thorough
def test_nothing_is_imported_behind_the_linters_back() -> None:
    """A name that is given as text: of plug-ins and own modules only."""
    found = 0
    offenders = []
    for where, node in nodes(*SOURCES):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("__import__", "import_module")
        ):
            found += 1
            name = node.args[0]
            if isinstance(name, ast.Constant) and not str(name.value).startswith("torchstore_"):
                offenders.append(f"{where} imports {name.value!r}")
    assert found
    assert not offenders


@pytest.mark.thorough
def test_only_one_module_listens() -> None:
    """It knows what to do when descriptors are used up (asyncio's servers do not)."""
    listens = {"listen", "accept", "create_server", "create_unix_server"}
    listens |= {"start_server", "start_unix_server"}
    found = [
        f"{where} calls {node.func.attr}"
        for where, node in nodes(*SOURCES)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in listens
    ]
    own = [what for what in found if "/listening.py:" in what]
    assert own
    assert found == own


#: Rooms of the server whose modules decide and do nothing; and those in them that do what was
#: decided: files, memory, threads, processes.
DECIDING = ("controller.py", "reads.py", "index", "memory", "repairing", "spilling")
DOING = {"volume.py", "isolated.py", "segment.py", "copier_process.py"}
DOING |= {"threads.py", "workers.py", "spill_file.py", "mapped.py", "bucket.py", "spill_objects.py"}
IO = {"asyncio", "concurrent", "ctypes", "fcntl", "io", "mmap", "multiprocessing", "os", "pathlib"}
IO |= {"queue", "select", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile"}
IO |= {"threading", "uvloop", "open", "input"}


def test_the_controller_is_a_state_machine_without_io() -> None:
    """What it is asked it answers at once, from what it knows; so the simulator can run it."""
    server = CORE / "torchstore_core" / "server"
    found: set[str] = set()
    looked_at = 0
    for room in DECIDING:
        paths = [server / room] if room.endswith(".py") else sorted((server / room).rglob("*.py"))
        for path in paths:
            if path.name in DOING:
                continue
            looked_at += 1
            for node in _nodes(path):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [name.name for name in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names = [node.func.id]
                elif isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
                    names = ["asyncio"]
                if any(name.partition(".")[0] in IO for name in names):
                    found.add(f"{path.relative_to(server)}:{getattr(node, 'lineno', 0)} {names}")
    assert looked_at > 25
    assert not found


#: Functions of the client that may look at an address: the one that gives it to be moved from or
#: to, with its checks; what comes after it; what asks for that of a tensor which it has made, or
#: which was looked at in the same turn; and those that only compare addresses.
MAY_ASK_FOR_ADDRESSES = {
    *("address_of", "check_destination"),
    *("rows_of", "elements_of", "_copy_in_window"),
    *("address", "inline_bytes", "moves", "memory"),
    *("find", "find_overlap", "are_apart", "memory_key", "__init__", "from_bytes"),
}


def test_addresses_of_tensors_are_given_by_one_function() -> None:
    """An address and a length are not a tensor: its storage may be smaller than its shape."""
    found = {
        node.name: where
        for where, node in nodes(CORE / "torchstore_core" / "clients")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(isinstance(n, ast.Attribute) and n.attr == "data_ptr" for n in ast.walk(node))
    }
    assert set(found) == MAY_ASK_FOR_ADDRESSES, found


def test_dictionaries_that_others_change_are_copied_whole() -> None:
    """``list(d.items())`` makes a tuple for each item, in which the garbage collector may run a
    finalizer, or another thread, that changes the dictionary: it raises RuntimeError. A copy is
    made in one step.
    """
    found = [
        where
        for where, node in nodes(*SOURCES)
        if isinstance(node, ast.For | ast.comprehension)
        and ast.unparse(node.iter).startswith("list(")
        and ast.unparse(node.iter).endswith(".items())")
    ]
    assert found == []


def test_every_time_out_is_raised_with_details() -> None:
    """Programs read how long it was, and of what; people see no unrounded seconds."""
    raised = {
        where: [word.arg for word in node.keywords]
        for where, node in nodes(*SOURCES)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "StoreTimeoutError"
    }
    assert len(raised) > 10
    assert not [where for where, words in raised.items() if "details" not in words]


def test_no_folder_holds_more_files_than_a_reader_takes_in() -> None:
    """Twelve. A folder with more has several ideas in it."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    files = [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    assert len(files) > 200
    count = Counter(file.parent for file in files)
    assert not [f"{folder}: {n}" for folder, n in count.items() if n > 12 and folder != Path()]
