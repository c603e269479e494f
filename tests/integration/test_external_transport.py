"""A transport and an observer from a package that the repository does not know.

It is written here, built as a wheel and installed by pip into a folder of its own. A process that
has the folder on its path has the transport; one that has not, has not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import run_script

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-procfd"
version = "1.0"
dependencies = ["torchstore-core"]

[project.entry-points."torchstore.transports"]
procfd = "acme_procfd.plugin"

[project.entry-points."torchstore.plugins"]
acme-observer = "acme_procfd.observer"

[tool.setuptools.packages.find]
where = ["src"]
"""

PLUGIN = """
from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, Refusal, TransportSpec


def bid(context):
    if not context.same_host:
        return Refusal("/proc is another machine's")
    return Bid(500e-6, 2e9, "the descriptors in /proc are reachable")


@hookimpl
def torchstore_transport():
    return TransportSpec(
        "procfd",
        bid=bid,
        client="acme_procfd.link:ProcLink",
        server="acme_procfd.server:ProcServer",
    )
"""

SERVER = """
import os

import msgspec

from torchstore_core.contracts.transport import TransportServer


class ProcServer(TransportServer):
    async def start(self, context, segments):
        return msgspec.msgpack.encode((os.getpid(), [(s.id, s.fd) for s in segments]))

    async def close(self):
        pass
"""

LINK = """
import ctypes
import os

import msgspec

from torchstore_core.contracts.transport import Link
from torchstore_core.errors import TransportError, TransportUnavailableError

calls = []  # (what, bytes) of every batch, failed ones too


class ProcLink(Link):
    def __init__(self, fds):
        self._fds = fds

    @classmethod
    async def connect(cls, offer, context):
        pid, segments = msgspec.msgpack.decode(offer)
        fds = {}
        try:
            for segment, fd in segments:
                fds[segment] = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            for fd in fds.values():
                os.close(fd)
            raise TransportUnavailableError(f"cannot open the segments: {error}") from error
        return cls(fds)

    async def write(self, copies):
        self._move("write", os.pwritev, copies)

    async def read(self, copies):
        self._move("read", os.preadv, copies)

    def _move(self, what, move, copies):
        calls.append((what, sum(copy.nbytes for copy in copies)))
        fails = os.environ.get("ACME_FAILS") == what
        for address, segment, offset, nbytes in copies:
            if fails:
                nbytes //= 2  # it breaks in the middle
            buffer = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            done = 0
            while done < nbytes:
                count = move(self._fds[segment], [buffer[done:]], offset + done)
                if count <= 0:
                    raise TransportError("the segment is shorter than it was said to be")
                done += count
            if fails:
                raise TransportError("the wire was cut")

    def close(self):
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)
"""

OBSERVER = """
import os

from torchstore_core.contracts.hooks import hookimpl

seen = []


@hookimpl
def torchstore_operation(operation):
    seen.append(operation)
    if os.environ.get("ACME_OBSERVER_FAILS"):
        raise RuntimeError("an observer that fails")
"""

FILES = {
    "pyproject.toml": PYPROJECT,
    "src/acme_procfd/__init__.py": "",
    "src/acme_procfd/plugin.py": PLUGIN,
    "src/acme_procfd/server.py": SERVER,
    "src/acme_procfd/link.py": LINK,
    "src/acme_procfd/observer.py": OBSERVER,
}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package into."""
    root = tmp_path_factory.mktemp("acme")
    for name, text in FILES.items():
        path = root / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wheels = root / "wheels"
    build = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    pip("wheel", *build, "--wheel-dir", str(wheels), str(root / "package"))
    (wheel,) = wheels.iterdir()
    assert wheel.suffix == ".whl"
    target = root / "site"
    pip("install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel))
    assert (target / "acme_procfd").is_dir()
    return target


@pytest.fixture
def package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes have the package."""
    before = os.environ.get("PYTHONPATH")
    path = [str(installed), *([before] if before else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


#: What children find: the package, and a store that is shut down whatever happens.
BEGIN = """
import warnings
from acme_procfd import link
from acme_procfd.observer import seen
MB = 1 << 20
SMALL = dict(capacity=128 * MB, prefault=0, timeout=20)
"""

MOVES = (
    BEGIN
    + """
how = {how}
client = await ts.initialize(**SMALL, **how)
try:
    (told,) = await ts.explain(16 * MB)
    assert told["chosen"] == "procfd", told
    (bid,) = [bid for bid in told["bids"] if bid["transport"] == "procfd"]
    assert (bid["latency_s"], bid["bytes_per_s"]) == (500e-6, 2e9)
    assert bid["reason"] == "the descriptors in /proc are reachable"
    assert bid["preferred"] is ("prefer" in how)
    assert abs(bid["cost_s"] - (500e-6 + 16 * MB / 2e9)) < 1e-9

    def moved(what):
        return sum(nbytes for kind, nbytes in link.calls if kind == what)

    value = torch.arange(3 * MB, dtype=torch.int32).reshape(1024, 3072)
    values = {{
        "contiguous": value,
        "transposed": value.t(),
        "every second": value[:, ::2],
        "bf16": value.to(torch.bfloat16),
    }}
    for key, stored in values.items():
        link.calls.clear()
        size = stored.numel() * stored.element_size()
        ref = await ts.put(key, stored)
        assert moved("write") == size
        got = await ts.get(ref)
        assert moved("read") == size
        assert torch.equal(got, stored), key
        got.zero_()
        assert torch.equal(await ts.get(ref), stored), key
        frame = torch.full((2 * stored.shape[0], stored.shape[1]), 7, dtype=stored.dtype)
        into = frame[::2]
        assert await ts.get(ref, into) is into
        assert torch.equal(into, stored), key
        assert bool((frame[1::2] == 7).all()), key

    # Slices: runs, and rows that are far apart; only they are moved.
    for (row, column), (rows, columns) in [((100, 0), (500, 3072)), ((13, 17), (900, 1001))]:
        part = ts.TensorSlice((row, column), (rows, columns), (1024, 3072))
        expected = value[row : row + rows, column : column + columns]
        link.calls.clear()
        assert torch.equal(await ts.get("contiguous", tensor_slice_spec=part), expected)
        assert moved("read") == rows * columns * 4
        into = torch.zeros(columns, rows, dtype=torch.int32).t()
        await ts.get("contiguous", into, part)
        assert torch.equal(into, expected)

    # Objects, and a batch of everything.
    thing = {{"bytes": bytes(range(256)) * 8192, "tuple": (1, {{2, 3}}, "ü")}}
    link.calls.clear()
    await ts.put("thing", thing)
    assert moved("write") > 2 * MB
    assert await ts.get("thing") == thing
    assert moved("read") > 2 * MB
    batch = {{"a": value, "b": thing, "c": value[::2, ::3], "d": torch.empty(0), "e": 5}}
    refs = await ts.put_batch(batch)
    got = await ts.get_batch(list(refs.values()))
    assert torch.equal(got["a"], value) and torch.equal(got["c"], batch["c"])
    assert got["b"] == thing and got["d"].shape == (0,) and got["e"] == 5

    # The server half is there too, in a process that imports neither this script nor torch.
    (volume,) = (await ts.status()).volumes
    assert "procfd" in volume.transports
    assert volume.leased_bytes == volume.unfinished_bytes == 0
    assert (await ts.status()).plugin_errors == {{}}
    transports = {{(o.name, o.transport) for o in seen if o.name in ("put", "get")}}
    assert transports == {{("put", "procfd"), ("get", "procfd")}}, transports
finally:
    await ts.shutdown()
print("moved")
"""
)


@pytest.mark.parametrize("how", ['dict(block=["shm"])', 'dict(prefer=["procfd"])'])
@pytest.mark.usefixtures("package")
async def test_installing_the_package_is_all_it_takes(how: str):
    assert await run_script(MOVES.format(how=how)) == "moved\n"


async def test_without_the_package_it_is_unknown():
    out = await run_script(
        """
        from torchstore_core.plugins import Registry
        try:
            Registry().transport("procfd")
        except ts.PluginError as error:
            print(error)
        await ts.initialize(capacity=16 << 20, prefault=0, prefer=["procfd"])
        (told,) = await ts.explain()
        print(told["chosen"], "procfd" in str(told), (await ts.status()).volumes[0].transports)
        await ts.shutdown()
        """
    )
    error, told = out.splitlines()
    assert error.startswith("no transport is called 'procfd' (installed: ")
    assert told == "shm False ['inprocess', 'shm']"


@pytest.mark.usefixtures("package")
async def test_shm_wins_by_its_bid_when_nobody_asks_for_the_package():
    out = await run_script(
        BEGIN
        + """
await ts.initialize(**SMALL)
(told,) = await ts.explain(16 * MB)
await ts.put("a", torch.ones(MB))
await ts.get("a")
print(told["chosen"], [bid["transport"] for bid in told["bids"]], link.calls)
print({o.transport for o in seen if o.name in ("put", "get")})
await ts.shutdown()
"""
    )
    assert out.splitlines() == ["shm ['shm', 'procfd'] []", "{'shm'}"]


@pytest.mark.parametrize("what", ["write", "read"])
@pytest.mark.usefixtures("package")
async def test_a_link_that_fails_is_followed_by_the_next_bid_once(
    what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACME_FAILS", what)
    out = await run_script(
        BEGIN
        + f"""
what = {what!r}
await ts.initialize(**SMALL, prefer=["procfd"])
values = {{
    "contiguous": torch.arange(MB, dtype=torch.int32),
    "strided": torch.arange(2 * MB, dtype=torch.int32)[::2],
    "object": {{"bytes": bytes(range(256)) * 8192}},
}}
try:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for key, value in values.items():
                await ts.put(key, value)
                got = await ts.get(key)
                same = got == value if key == "object" else torch.equal(got, value)
                assert same, key
                if key != "object":
                    into = torch.zeros(2 * MB, dtype=torch.int32)[1::2]
                    await ts.get(key, into)
                    assert torch.equal(into, value), key
    # Loudly, and once: it is not tried again, by puts and gets alike.
    (warning,) = [w for w in caught if "procfd" in str(w.message)]
    assert warning.category is RuntimeWarning
    assert "the wire was cut" in str(warning.message)
    assert "shm" in str(warning.message).partition("what is left:")[2]
    assert len([kind for kind, _ in link.calls if kind == what]) == 1, link.calls
    (told,) = await ts.explain(MB)
    assert told["chosen"] == "shm"
    assert told["refusals"]["procfd"] == "its link failed: the wire was cut"
    (volume,) = (await ts.status()).volumes
    assert volume.unfinished_bytes == 0
finally:
    await ts.shutdown()
print("fell back")
"""
    )
    assert out == "fell back\n"


@pytest.mark.usefixtures("package")
async def test_when_it_fails_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACME_FAILS", "write")
    out = await run_script(
        BEGIN
        + """
await ts.initialize(**SMALL, block=["shm"])
await ts.put("a", "before")
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    for _ in range(2):
        try:
            await ts.put("a", torch.ones(MB))
        except ts.TransportUnavailableError as error:
            assert error.details["refusals"]["procfd"] == "its link failed: the wire was cut"
            assert "procfd: its link failed" in str(error), error
        else:
            raise AssertionError("it was put")
assert await ts.get("a") == "before"
(volume,) = (await ts.status()).volumes
print(volume.unfinished_bytes, [kind for kind, _ in link.calls])
print([o.error for o in seen if o.name == "put"])
await ts.shutdown()
"""
    )
    assert out.splitlines() == [
        "0 ['write']",
        "['', 'transport-unavailable', 'transport-unavailable']",
    ]


async def test_when_everything_is_blocked_the_error_says_who_refused():
    """Without the package: what is left is the example transport, which refuses."""
    out = await run_script(
        """
        await ts.initialize(capacity=16 << 20, prefault=0, block=["shm", "inline"])
        for value in (5, torch.ones(3), torch.ones(1 << 20)):
            try:
                await ts.put("a", value)
            except ts.TransportUnavailableError as error:
                print(error.code, sorted(error.details["refusals"]), "|", error)
        print(await ts.keys(), (await ts.status()).volumes[0].used_bytes)
        (told,) = await ts.explain()
        print(told["chosen"], told["bids"], sorted(told["refusals"]))
        await ts.shutdown()
        """
    )
    *errors, left, told = out.splitlines()
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("transport-unavailable ['inline', 'inprocess', 'shm'] | ")
        assert "inprocess: the volume is in another process" in error
        assert "shm: blocked by configuration" in error
        assert "inline: blocked by configuration" in error
    assert left == "[] 0"
    assert told == "None [] ['inline', 'inprocess', 'shm']"


@pytest.mark.parametrize("fails", ["", "1"])
@pytest.mark.usefixtures("package")
async def test_the_observer_sees_every_operation(fails: str, monkeypatch: pytest.MonkeyPatch):
    """Also one that fails itself: it is told of the next one nevertheless, and harms nobody."""
    monkeypatch.setenv("ACME_OBSERVER_FAILS", fails)
    out = await run_script(
        BEGIN
        + """
import logging
logging.disable(logging.CRITICAL)
client = await ts.initialize(**SMALL, store_name="seen", block=["shm"])

async def one(work):
    del seen[:]
    error = ""
    try:
        await work
    except ts.TorchStoreError as caught:
        error = caught.code
    (operation,) = seen
    assert operation.error == error, (operation, error)
    assert operation.store_name == "seen"
    assert 0 < operation.seconds < 10
    # The phases are parts of the whole, in order.
    assert all(part >= 0 for part in operation.phases.values())
    assert sum(operation.phases.values()) <= operation.seconds
    print(
        operation.name, operation.entries, operation.nbytes, operation.transport or "-",
        "+".join(operation.phases) or "-", operation.error or "-",
    )

big = torch.ones(MB)
await one(client.put("a", big))
await one(client.put("b", b"xyz"))
await one(client.put_batch({"c": big, "d": big[::2]}))
await one(client.get("a"))
await one(client.get("a", torch.empty(MB)))
await one(client.get("b"))
await one(client.get_batch(["a", "c", "d"]))
await one(client.get("nothing"))
await one(client.get("a", torch.empty(3)))
await one(client.get(ts.ObjectRef("a", 99)))
await one(client.put("e", torch.empty(3, device="meta")))
await one(client.put("e", torch.empty(256 * MB, dtype=torch.uint8)))
await one(client.exists("a"))
await one(client.keys())
await one(client.wait("a"))
await one(client.delete("nothing"))
await one(client.delete("a"))
await one(client.delete_batch(["b", "nothing"]))
await ts.shutdown("seen")
"""
    )
    lines = out.splitlines()
    small = lines.pop(1).split(), lines.pop(4).split()
    for line, name in zip(small, ("put", "get"), strict=True):
        assert line[:2] == [name, "1"]
        assert 3 <= int(line[2]) < 16  # as it was encoded
        assert line[3] == "inline"
        assert line[5] == "-"
    big = 4 << 20
    assert lines == [
        f"put 1 {big} procfd plan+copy+commit -",
        f"put_batch 2 {big + big // 2} procfd plan+copy+commit -",
        f"get 1 {big} procfd plan+copy -",
        f"get 1 {big} procfd plan+copy -",
        f"get_batch 3 {2 * big + big // 2} procfd plan+copy -",
        "get 1 0 - - key-not-found",
        "get 1 0 - plan layout-mismatch",
        "get 1 0 - - version-gone",
        "put 1 0 - - unsupported-value",
        f"put 1 {256 << 20} - - store-full",
        "exists 1 0 - - -",
        "keys 1 0 - - -",
        "wait 1 0 - - -",
        "delete 1 0 - - key-not-found",
        "delete 1 0 - - -",
        "delete_batch 2 0 - - -",
    ]
