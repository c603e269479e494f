"""What is asked of the library, and how often; and what UCX tells of its choice."""

from __future__ import annotations

import collections
import ctypes
from pathlib import Path

import numpy as np
import pytest

from torchstore_core.contracts.transport import Copy, Memory
from torchstore_rdma.library import ucx
from torchstore_rdma.library.lists import Lists
from torchstore_rdma.link import RegisteringLink

from .pairs import FABRICS, MB, needs_nixl, pair
from .pairs import Memory as Bytes

_CALLS = ("prep_xfer_dlist", "register_memory", "deregister_memory", "make_prepped_xfer")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often this process has called functions of the library."""
    nixl = pytest.importorskip("nixl_cu12")
    counted: collections.Counter[str] = collections.Counter()

    def count(name: str) -> None:
        original = getattr(nixl.nixl_agent, name)

        def call(*arguments: object, **more: object) -> object:
            counted[name] += 1
            return original(*arguments, **more)

        monkeypatch.setattr(nixl.nixl_agent, name, call)

    for name in _CALLS:
        count(name)
    return counted


@needs_nixl
async def test_layouts_that_repeat_are_prepared_once(
    tmp_path: Path, calls: collections.Counter[str]
) -> None:
    """A put and a get of the same memory, too. Other memory has a list of its own."""
    async with pair(tmp_path, 16 * MB) as volume:
        link, mine, other = await volume.link(), Bytes(8 * MB, 5), Bytes(8 * MB)
        calls.clear()
        copies = [Copy(mine.address + at, 0, 2 * at, 4096) for at in range(0, 8 * MB, 8192)]
        for value in (1, 2, 3):
            mine.fill(value)
            await link.write(copies)
            mine.fill(0)
            await link.read(copies)
            assert mine.count(value) == 4 * MB
        assert (calls["prep_xfer_dlist"], calls["make_prepped_xfer"]) == (2, 6)
        await link.read([Copy(other.address, 0, 0, 8 * MB)])
        assert calls["prep_xfer_dlist"] == 4
        await link.read([Copy(other.address + 4096, 0, 0, 4096), Copy(other.address, 0, 8192, 1)])
        assert calls["prep_xfer_dlist"] == 6
        link.close()


@needs_nixl
async def test_a_prepared_list_ends_with_what_is_registered(
    tmp_path: Path, calls: collections.Counter[str]
) -> None:
    """It refers to that. What is registered anew needs another list, at the same addresses, too."""
    async with pair(tmp_path, 16 * MB, cuda_devices=1) as volume:
        link, mine = await volume.link(), Bytes(MB)
        assert isinstance(link, RegisteringLink)
        volume.fill(7)
        copies, owner = [mine.copy()], Owner()
        memory = [Memory(mine.address, mine.nbytes, owner)]
        for _ in range(3):
            await link.read_into(copies, memory)
        calls.clear()
        await link.read_into(copies, memory)
        assert not calls["prep_xfer_dlist"]
        owner = Owner()
        memory = [Memory(mine.address, mine.nbytes, owner)]
        for _ in range(3):
            await link.read_into(copies, memory)
        assert mine.count(7) == MB
        # This side's, once. The peer's segments stay registered.
        assert calls == {
            "prep_xfer_dlist": 1,
            "register_memory": 1,
            "deregister_memory": 1,
            "make_prepped_xfer": 4,
        }
        # Where a batch alone registers memory, its list ends with the batch.
        await link.read([Copy(mine.address, 0, MB, MB)])
        calls.clear()
        await link.read([Copy(mine.address, 0, MB, MB)])
        assert calls["prep_xfer_dlist"] == calls["register_memory"] == 1


@needs_nixl
async def test_many_tensors_are_registered_in_one_call(
    tmp_path: Path, calls: collections.Counter[str]
) -> None:
    size, many = 64 << 10, 64
    async with pair(tmp_path, size * many, cuda_devices=1) as volume:
        link = await volume.link()
        assert isinstance(link, RegisteringLink)
        volume.fill(7)
        # Apart from each other, so that they cannot be taken for one.
        blocks = [Bytes(2 * size) for _ in range(many)]
        owners = [Owner() for _ in blocks]
        memory = [Memory(b.address, size, o) for b, o in zip(blocks, owners, strict=True)]
        copies = [Copy(b.address, 0, at * size, size) for at, b in enumerate(blocks)]
        calls.clear()
        await link.read_into(copies, memory)
        assert link.kept() == (many * size, many, many)
        assert all(block.count(7) == size for block in blocks)
        await link.read_into(copies, memory)
        assert calls["register_memory"] == 1
        del memory[:], owners[:]
        await link.read_into([Copy(blocks[0].address, 0, 0, 8)], [])
        assert link.kept()[:2] == (0, 0)
        assert calls["deregister_memory"] <= 1 + 1  # of all of them; of the last batch's


class Owner:
    """Something that can be weakly referenced."""


class _Handle:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def _rows(address: int, count: int = 1) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([[address, 10, 0, 20, count]], dtype=np.uint64)


def test_the_least_recently_used_list_goes_when_it_is_not_in_use() -> None:
    made: list[_Handle] = []

    def prepare(_: str, rows: object) -> _Handle:
        made.append(_Handle())
        return made[-1]

    lists = Lists(prepare, most=2)
    first, second = (lists.take("", _rows(at), 1) for at in (0, 100))
    lists.give_back([second])
    assert lists.take("", _rows(0), 1) is first
    third = lists.take("", _rows(200), 1)  # the second goes
    assert [one.releases for one in made] == [0, 1, 0]
    lists.give_back([third])
    lists.take("peer", _rows(0), 1)  # the first goes, but is in use
    assert [one.releases for one in made] == [0, 1, 0, 0]
    lists.give_back([first])
    assert made[0].releases == 0
    lists.give_back([first])
    assert made[0].releases == 1
    # Larger than all that may be kept: for one transfer.
    large = lists.take("", _rows(300, 3), 3)
    lists.give_back([large])
    assert [one.releases for one in made] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("address", "nbytes", "stays"),
    [(0, 100, True), (0, 101, False), (149, 1, False), (150, 9, True), (110, 5, False)],
)
def test_lists_near_memory_that_is_deregistered_go(address: int, nbytes: int, stays: bool) -> None:
    handles = [_Handle(), _Handle()]
    lists = Lists(lambda peer, rows: handles[bool(peer)])
    lists.give_back([lists.take(peer, _rows(100, 3), 3) for peer in ("", "peer")])
    lists.forget([(address, nbytes)])  # [100, 150) is used
    assert [one.releases for one in handles] == [not stays, 0]
    lists.clear()
    assert [one.releases for one in handles] == [1, 1]


# ---- what UCX tells -----------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_link_tells_over_what_ucx_has_connected(fabric: str, tmp_path: Path) -> None:
    async with pair(tmp_path, MB, fabric) as volume:
        link = await volume.link()
        if fabric == "tcp":
            assert link.route == "UCX has connected over TCP (tcp/lo)"
        else:
            assert link.route.startswith("UCX has connected over ")
            assert "/memory" in link.route
        link.close()
        assert link.route == ""


def test_structures_are_laid_out_as_ucx_s() -> None:
    """Sizes and offsets of ``ucp_ep_attr_t`` and ``ucp_transport_entry_t``."""
    fields = ("mask", "name", "local", "remote", "entries", "count", "entry_size", "user_data")
    offsets = [getattr(ucx._Attributes, name).offset for name in fields]
    assert offsets == [0, 8, 40, 168, 296, 304, 312, 320]
    assert ctypes.sizeof(ucx._Named) == 16
