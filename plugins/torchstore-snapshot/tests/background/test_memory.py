"""How much memory a take in the background needs, of all processes that take part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.memory import forget_peak, peak, rss
from tests.processes import Script
from tests.support import children, until

from torchstore_snapshot import Snapshot
from torchstore_snapshot.taking.strided import ranges_of

MIB = 1 << 20

_TAKES = """
import os
from tests.support import until
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.background.stores import bounded
folder = {folder!r}
kind = {kind!r}
budget = {budget}
if kind == "contiguous":
    tensors = [torch.empty(24 << 20).fill_(i) for i in range(2)]
elif kind == "transposed":
    tensors = [torch.empty(6 << 10, 4 << 10).fill_(i).t() for i in range(2)]
else:  # every second column, and a permutation of three dimensions
    tensors = [torch.empty(6 << 10, 8 << 10).fill_(0)[:, ::2]]
    tensors.append(torch.empty(256, 192, 512).fill_(1).permute(2, 0, 1))
state = {{"m": StateDict(a=tensors[0], b=tensors[1])}}
# The processes, and what they import, are there before, and until the end.
bounded.begin()
small = {{"m": StateDict(w=torch.ones(99).view(9, -1).t())}}
Snapshot.async_take(folder + "/before", small, fsync=False, memory_budget=budget).wait(300)
print("ready", flush=True)
await until(lambda: os.path.exists(folder + "/go"), 100)
Snapshot.async_take(folder + "/s", state, fsync=False, memory_budget=budget).wait(100)
print("written", flush=True)
await until(lambda: os.path.exists(folder + "/end"), 100)
"""


def used(pid: int) -> int:
    """Bytes of memory of a process and of its children: what is theirs alone, and segments, which
    count once however many processes map them.
    """
    total, before = 0, staged(pid)
    for each in [pid, *descendants(pid)]:
        try:
            total += rss(each)
        except (OSError, KeyError):
            continue  # it is gone
    # What was copied to or from a segment meanwhile counts once.
    return total + min(before, staged(pid))


def staged(pid: int) -> int:
    """Bytes that the segments of a process and its children occupy."""
    found: dict[int, int] = {}
    for each in [pid, *descendants(pid)]:
        try:
            for number in os.listdir(f"/proc/{each}/fd"):
                path = f"/proc/{each}/fd/{number}"
                if os.readlink(path).startswith("/memfd:"):
                    stat = os.stat(path)
                    found[stat.st_ino] = stat.st_blocks * 512
        except OSError:
            continue  # it, or its file, is gone
    return sum(found.values())


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def said(script: Script, what: str) -> bool:
    script._out.seek(0)
    return what in script._out.read()


async def peaks(script: Script, folder: Path, now: Callable[[int], int]) -> tuple[int, int]:
    """How much more memory than before there is while the script takes its snapshot: by ``now``,
    asked time and again; and of its own process, segments included, by the kernel, which misses
    nothing.
    """
    await until(lambda: said(script, "ready"), 90)
    before, own = now(script.pid), forget_peak(script.pid)
    (folder / "go").touch()
    seen = 0
    while not said(script, "written"):
        seen = max(seen, now(script.pid) - before)
        assert script._process.wait(0.005) is None
    return seen, peak(script.pid) - own


@pytest.mark.parametrize(
    "kind", ["contiguous", pytest.param("transposed", marks=pytest.mark.soak), "sliced"]
)
async def test_a_take_keeps_to_its_memory_budget(tmp_path: Path, kind: str) -> None:
    budget = 64 * MIB  # of 192 MiB
    body = _TAKES.format(folder=str(tmp_path), kind=kind, budget=budget)
    with Script(body) as script:
        grown, own = await peaks(script, tmp_path, used)
        (tmp_path / "end").touch()
        await script.output(30)
    assert own > budget // 2
    print(f"{kind}: {grown / MIB:.1f} MiB more at the peak, with a budget of {budget / MIB:.0f}")
    assert grown <= 1.1 * budget
    snapshot = Snapshot(tmp_path / "s")
    for number, name in enumerate("ab"):
        assert bool((snapshot.read_object(f"m/{name}") == number).all())


_AFTER_ANOTHER = """
import os
from tests.support import until
from torchstore_snapshot import Snapshot, StateDict
folder = {folder!r}
Snapshot.async_take(folder + "/small", {{"m": StateDict(w=torch.ones(9))}}, fsync=False).wait(300)
state = {{"m": StateDict({{f"w{{i}}": torch.full((1 << 20,), float(i)) for i in range(24)}})}}
print("ready", flush=True)
await until(lambda: os.path.exists(folder + "/go"), 100)
Snapshot.async_take(folder + "/s", state, fsync=False, memory_budget={budget}).wait(100)
print("written", flush=True)
await until(lambda: os.path.exists(folder + "/end"), 100)
"""


async def test_a_budget_holds_after_a_take_without_and_memory_is_given_back(tmp_path: Path) -> None:
    """A take without a budget has a store that keeps memory ready for as much again."""
    budget = 32 * MIB  # of 96 MiB
    body = _AFTER_ANOTHER.format(folder=str(tmp_path), budget=budget)
    with Script(body) as script:
        await until(lambda: said(script, "ready"), 90)
        before = staged(script.pid)
        grown, own = await peaks(script, tmp_path, staged)
        assert own > budget // 2
        assert grown <= 1.1 * budget
        await until(lambda: staged(script.pid) <= before, 30)
        (tmp_path / "end").touch()
        await script.output(30)


_STOPPED = """
import os, signal
from tests.support import children, commands, halt, until
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.background.stores import bounded_name
folder, budget = {folder!r}, {budget}
small = {{"m": StateDict(w=torch.ones(9))}}
Snapshot.async_take(folder + "/before", small, fsync=False, memory_budget=budget).wait(300)
(writer,) = commands(b"torchstore_snapshot.background.writer", children())

def written():
    with open(f"/proc/{{writer}}/io") as file:
        return int(file.read().split("wchar:")[1].split()[0])

async def two_batches_are_there():
    volumes = (await ts.status(store_name=bounded_name())).volumes
    return sum(volume.used_bytes for volume in volumes) >= budget

# Each batch ends in the middle of a row, of which a small part is staged by itself.
state = {{"m": StateDict(w=torch.empty(6 << 10, 4 << 10).fill_(1).t())}}
begun = written()
take = asyncio.create_task(asyncio.to_thread(
    Snapshot.async_take, folder + "/s", state, fsync=False, memory_budget=budget
))
await until(lambda: written() > begun + (1 << 20))
await halt(writer)
try:
    await until(two_batches_are_there)
finally:
    os.kill(writer, signal.SIGCONT)
(await take).wait(300)
print("written")
"""


async def test_all_memory_of_a_batch_comes_back_in_one_step(tmp_path: Path) -> None:
    """When it was written: if small parts of it came back when they were read, what is put next
    would be put there, and the large ones after it would not fit where large ones were.
    """
    with Script(_STOPPED.format(folder=str(tmp_path), budget=64 * MIB)) as script:
        assert (await script.output(90)).split() == ["written"]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_any_tensor_are_its_bytes(seed: int) -> None:
    torch.manual_seed(seed)
    shape = torch.randint(1, 7, (seed % 4 + 1,)).tolist()
    tensor = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int16).view(shape)
    tensor = tensor.permute(*torch.randperm(tensor.dim()).tolist())
    if seed % 2 and tensor.shape[-1] > 1:
        tensor = tensor[..., ::2]
    flat = tensor.flatten()
    for begin in range(flat.numel()):
        for end in range(begin + 1, flat.numel() + 1):
            views = ranges_of(tensor, begin * 2, end * 2)
            assert torch.equal(torch.cat([v.flatten() for v in views]), flat[begin:end])
            assert len(views) <= 2 * tensor.dim()
