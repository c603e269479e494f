"""Installing a package is all it takes: a transport that nobody in this repository knows.

The package ``torchstore-procfd`` is written, built as a wheel and installed by the test. Its server
half says in which process, and under which number, the segment's descriptor is open; its client
half opens that through /proc and moves bytes with preadv and pwritev. It has no window and no map.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.processes import run_script

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "torchstore-procfd"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["torchstore-core>=0.1"]

[project.entry-points."torchstore.transports"]
procfd = "torchstore_procfd.plugin"

[tool.setuptools.packages.find]
where = ["src"]
"""

PLUGIN = '''
"""Descriptor of ``procfd``."""

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec


def _bid(context: LinkContext) -> Bid | Refusal:
    if not context.same_host:
        return Refusal("/proc is another host's")
    return Bid(400e-6, 3e9, "system calls on the server's descriptor")


@hookimpl
def torchstore_transport() -> TransportSpec:
    return TransportSpec(
        "procfd",
        bid=_bid,
        client="torchstore_procfd.link:ProcFdLink",
        server="torchstore_procfd.server:ProcFdServer",
    )
'''

SERVER = '''
"""Server half: nothing to serve, only something to say."""

import os
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer

SAYS = os.environ.get("PROCFD_SERVER", "")


class ProcFdServer(TransportServer):
    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        if SAYS == "raise":
            raise ValueError("no descriptors today")
        if SAYS == "nonsense":
            return {"pid": os.getpid()}
        return msgspec.msgpack.encode([os.getpid(), {s.id: s.fd for s in segments}])

    async def close(self) -> None:
        pass
'''

LINK = '''
"""Client half. Fails on demand, in the middle of its work: PROCFD_FAIL=what:after-how-many."""

import ctypes
import os
from collections.abc import Sequence

import msgspec

from torchstore_core.contracts.transport import Copy, Link, LinkContext
from torchstore_core.errors import TransportError, TransportUnavailableError

FAIL, _, AFTER = os.environ.get("PROCFD_FAIL", "").partition(":")
if FAIL == "import":
    raise RuntimeError("this build lacks libprocfd")


class ProcFdLink(Link):
    moved = {"read": 0, "write": 0}  # pieces, in all links of this process

    def __init__(self, fds: dict[int, int]) -> None:
        self._fds = fds

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> "ProcFdLink":
        if FAIL == "connect":
            raise OSError(5, "cable")
        pid, fds = msgspec.msgpack.decode(offer, type=tuple[int, dict[int, int]])
        try:
            return cls({i: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR) for i, fd in fds.items()})
        except OSError as error:
            raise TransportUnavailableError(f"cannot open the segment: {error}") from error

    async def write(self, copies: Sequence[Copy]) -> None:
        self._move("write", os.pwritev, copies)

    async def read(self, copies: Sequence[Copy]) -> None:
        self._move("read", os.preadv, copies)

    def _move(self, what, call, copies: Sequence[Copy]) -> None:
        for number, (address, segment, offset, nbytes) in enumerate(copies):
            if what == FAIL and number == int(AFTER):
                raise TransportError("the cable was pulled")
            memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            while memory:
                done = call(self._fds[segment], [memory], offset)
                memory, offset = memory[done:], offset + done
            type(self).moved[what] += 1

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
'''


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package was installed into."""
    root = tmp_path_factory.mktemp("procfd")
    package = root / "torchstore-procfd"
    source = package / "src" / "torchstore_procfd"
    source.mkdir(parents=True)
    (package / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("plugin", PLUGIN), ("server", SERVER), ("link", LINK)):
        (source / f"{name}.py").write_text(text)
    wheels, site = root / "wheels", root / "site"
    built = ("--no-build-isolation", "--no-deps", "--no-index")
    pip("wheel", *built, "--wheel-dir", str(wheels), str(package))
    (wheel,) = wheels.glob("torchstore_procfd-0.1.0-*.whl")
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    assert (site / "torchstore_procfd-0.1.0.dist-info").is_dir()
    return site


@pytest.fixture
def with_package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on, servers too, have the package."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(installed), before])))


# What every script begins with: a store, and who moved how much.
HEAD = """
import os, warnings

async def volume(nbytes=1 << 30):
    (only,) = await ts.explain(nbytes)
    return only

def moved():
    from torchstore_procfd.link import ProcFdLink
    return dict(ProcFdLink.moved)

def bits(tensor):
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.reshape(-1).view(torch.uint8)

def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))

big = torch.randn(400, 500)
"""


async def run(body: str) -> str:
    code = textwrap.dedent(HEAD) + textwrap.dedent(body)
    return await run_script(code + '\nprint("done")\n')


USE = """
await ts.initialize(capacity=64 << 20, prefault=0, {arguments})
only = await volume()
assert only["chosen"] == "procfd", only
(bid,) = [b for b in only["bids"] if b["transport"] == "procfd"]
assert (bid["latency_s"], bid["bytes_per_s"]) == (400e-6, 3e9), bid
assert bid["reason"] == "system calls on the server's descriptor", bid
assert bid["preferred"] is {preferred}, bid

values = {{
    "contiguous": big,
    "transposed": big.t(),
    "strided": big[::3, 5:400:7],
    "half": big.bfloat16(),
    "float8": big.to(torch.float8_e4m3fn),
    "complex": torch.complex(big, -big),
    "bool": big > 0,
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}}
thing = {{"text": "x" * 200_000, "parts": (1, {{2}}, b"3"), "pickled": ValueError}}
refs = await ts.put_batch({{**values, "thing": thing}})
# All but the empty one, and the object: its large text, and what is before and after it.
assert moved() == {{"read": 0, "write": len(values) - 1 + 3}}
got = await ts.get_batch(list(refs))
assert got.pop("thing") == thing
for name, value in values.items():
    assert same(got[name], value), name
assert moved()["read"] == len(values)

room = torch.zeros(500, 900)
target = room.t()[::2, ::1][:400, :500]
assert await ts.get("contiguous", target) is target
assert same(target, big)
room[:500, :800:2] = 0
assert not room.any()
for offsets, shape in (((10, 20), (30, 40)), ((0, 0), (7, 500)), ((399, 0), (1, 500))):
    part = ts.TensorSlice(offsets, shape, (400, 500))
    wanted = big[offsets[0]:, offsets[1]:][:shape[0], :shape[1]]
    assert same(await ts.get("contiguous", tensor_slice_spec=part), wanted)
    into = torch.zeros(shape[1], shape[0]).t()
    assert same(await ts.get("contiguous", into, part), wanted)

first = await ts.get("contiguous")
await ts.put("contiguous", big + 1)
assert same(first, big)
assert same(await ts.get("contiguous"), big + 1)
await ts.delete_batch(list(refs))
status = await ts.status()
assert status.volumes[0].used_bytes == 0
assert "procfd" in status.volumes[0].transports
assert status.plugin_errors == {{}}
await ts.shutdown()
"""


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize(
    ("arguments", "preferred"),
    [('block=["shm"]', False), ('prefer=["procfd"]', True)],
    ids=["shm blocked", "preferred"],
)
async def test_an_installed_transport_moves_tensors(arguments: str, preferred: bool) -> None:
    out = await run(USE.format(arguments=arguments, preferred=preferred))
    assert out == "done\n"


async def test_where_it_is_not_installed_it_is_gone(installed: Path) -> None:
    assert str(installed) not in os.environ.get("PYTHONPATH", "")
    out = await run("""
    try:
        await ts.initialize(capacity=64 << 20, prefault=0, prefer=["procfd"])
    except ts.ConfigurationError as error:
        assert "no transport is called 'procfd'" in str(error), error
    else:
        raise AssertionError("it was not refused")
    await ts.initialize(capacity=64 << 20, prefault=0, block=["tcp"])
    only = await volume()
    assert only["chosen"] == "shm", only
    assert "procfd" not in str(only)
    assert (await ts.status()).volumes[0].transports == ["inprocess", "shm"]
    await ts.put("k", big)
    assert same(await ts.get("k"), big)
    await ts.shutdown()
    """)
    assert out == "done\n"


@pytest.mark.usefixtures("with_package")
async def test_without_a_word_of_the_user_its_bid_loses() -> None:
    out = await run("""
    await ts.initialize(capacity=64 << 20, prefault=0, block=["tcp"])
    only = await volume()
    assert only["chosen"] == "shm"
    assert [b["transport"] for b in only["bids"]] == ["shm", "procfd"], only
    await ts.put("k", big)
    assert same(await ts.get("k"), big)
    assert moved() == {"read": 0, "write": 0}
    await ts.shutdown()
    """)
    assert out == "done\n"


@pytest.mark.usefixtures("with_package")
async def test_one_side_without_it_is_enough_to_do_without() -> None:
    """A volume whose server blocks it does not offer it."""
    out = await run("""
    os.environ["TORCHSTORE_BLOCK"] = "procfd"
    await ts.initialize(capacity=64 << 20, prefault=0)
    del os.environ["TORCHSTORE_BLOCK"]
    client = await ts.connect(await ts.address(), store_name="second", prefer=["procfd"])
    (only,) = await client.explain()
    assert only["chosen"] == "shm"
    assert "does not offer it" in only["refusals"]["procfd"]
    await ts.shutdown("second")
    await ts.shutdown()
    """)
    assert out == "done\n"


# ---- failing --------------------------------------------------------------------------------

AGAIN, NEVER = "is tried again", "not used any more"
FALL_BACK = """
from torchstore_core.clients.session import volume_links

volume_links._FIRST_BACKOFF_S = 30.0  # however long this takes, the link is not tried again
tensors = {{f"k{{i}}": torch.full((100_000,), i) for i in range(6)}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    await ts.initialize(capacity=64 << 20, prefault=0, prefer=["procfd"], block=["tcp"])
    await ts.put_batch(tensors)
    for _ in range(2):
        got = await ts.get_batch(list(tensors))
        into = {{k: torch.zeros(100_000, dtype=torch.int64) for k in tensors}}
        await ts.get_batch(into)
        for k, wanted in tensors.items():
            assert same(got[k], wanted) and same(into[k], wanted), k
    await ts.put_batch({{k: t + 1 for k, t in tensors.items()}})
    for k, wanted in tensors.items():
        assert same(await ts.get(k), wanted + 1)
about = [w for w in caught if "procfd" in str(w.message)]
(warning,) = about
assert warning.category is RuntimeWarning
text = str(warning.message)
assert {reason!r} in text and {then!r} in text and "shm" in text, text
only = await volume()
assert only["chosen"] == "shm"
assert {reason!r} in only["refusals"]["procfd"], only
assert [b["transport"] for b in only["bids"]] == ["shm"]
print({count})
status = await ts.status()
assert status.volumes[0].unfinished_bytes == 0
await ts.shutdown()
"""


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize(
    ("fail", "reason", "then", "count", "expected"),
    [
        # In the middle of the first put: three of its six pieces were written, then the rest
        # (and those three once more) by the next bid.
        ("write:3", "the cable was pulled", AGAIN, "moved()", "{'read': 0, 'write': 3}"),
        ("read:2", "the cable was pulled", AGAIN, "moved()", "{'read': 2, 'write': 6}"),
        ("connect", "OSError(5, 'cable')", NEVER, "moved()", "{'read': 0, 'write': 0}"),
        ("import", "this build lacks libprocfd", NEVER, "None", "None"),
    ],
    ids=["write", "read", "connect", "import"],
)
async def test_a_link_that_fails_gives_way_to_the_next_once_and_loudly(
    monkeypatch: pytest.MonkeyPatch, fail: str, reason: str, then: str, count: str, expected: str
) -> None:
    monkeypatch.setenv("PROCFD_FAIL", fail)
    out = await run(FALL_BACK.format(reason=reason, then=then, count=count))
    assert out == f"{expected}\ndone\n"


@pytest.mark.usefixtures("with_package")
async def test_when_the_last_link_fails_nothing_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROCFD_FAIL", "write:1")
    out = await run("""
    await ts.initialize(capacity=64 << 20, prefault=0, block=["shm", "tcp"])
    await ts.put("k0", torch.arange(3))  # rides in the message
    await ts.put("k1", big)              # one piece: the failure comes with the second
    before = (await ts.status()).volumes[0].used_bytes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            await ts.put_batch({"k0": big + 1, "k1": big + 2})
        except ts.TransportUnavailableError as error:
            assert "its link failed: the cable was pulled" in str(error), error
            assert "procfd" in error.details["refusals"]
        else:
            raise SystemExit("it should have failed")
    assert len(caught) == 1
    assert same(await ts.get("k0"), torch.arange(3))
    refs = await ts.wait(["k0", "k1"])
    assert [r.version for r in refs.values()] == [1, 1]
    volume = (await ts.status()).volumes[0]
    assert (volume.used_bytes, volume.unfinished_bytes) == (before, 0)
    try:
        await ts.get("k1")
    except ts.TransportUnavailableError:
        pass
    assert (await ts.status()).volumes[0].leased_bytes == 0
    await ts.put("k0", 5)
    assert await ts.get("k0") == 5
    await ts.reset_client()  # new connections: it may be tried again
    assert same(await ts.get("k1"), big)
    await ts.shutdown()
    """)
    assert out == "done\n"


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize("says", ["raise", "nonsense"])
async def test_a_server_half_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setenv("PROCFD_SERVER", says)
    out = await run("""
    await ts.initialize(capacity=64 << 20, prefault=0, prefer=["procfd"])
    only = await volume()
    assert only["chosen"] == "shm"
    assert "does not offer it" in only["refusals"]["procfd"]
    await ts.put("k", big)
    assert same(await ts.get("k"), big)
    await ts.shutdown()
    """)
    assert out == "done\n"
