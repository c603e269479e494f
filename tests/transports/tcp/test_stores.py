"""Stores whose bytes go over ``tcp``: in the server's own process, with real clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.processes import Script
from tests.support import SMALL, bits, running_store, until
from tests.transports.asking import nothing_unfinished

import torchstore_core as ts

MB = 1 << 20


def _open_ports(pid: int) -> int:
    """At how many TCP ports a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was just closed
            link = os.readlink(entry)
            if link.startswith("socket:"):
                inodes.add(link[8:-1])
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return sum(fields[3] == "0A" and fields[9] in inodes for fields in lines)


async def _server(client: ts.Client) -> int:
    return (await client.status()).controller_pid


def _advice(address: int) -> list[str]:
    """The flags of the mapping that an address of this process lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "VmFlags:":
            if inside:
                return words[1:]
        elif "-" in words[0]:
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < end
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages"
)
async def test_large_new_tensors_prefer_huge_pages() -> None:
    """Filling new memory page by page takes two to four times as long as a copy."""
    async with running_store(prefer=["tcp"], block=["shm"]) as client:
        values = {"a": torch.zeros(2 * MB), "b": torch.zeros(2 * MB), "c": torch.zeros(3 * MB)}
        await client.put_batch(values)
        await client.put_state_dict(values, "state")
        await client.put("columns", torch.zeros(1 << 12, 1 << 12))
        got = [*(await client.get_batch(list(values))).values()]
        got += (await client.get_state_dict("state")).values()
        box = ts.TensorSlice((0, 1), (1 << 12, 1 << 11), (1 << 12, 1 << 12))
        got.append(await client.get("columns", tensor_slice_spec=box))
        for tensor in got:
            middle = tensor.data_ptr() + tensor.nbytes // 2
            assert "hg" in _advice(middle), (tensor.shape, _advice(middle))


@pytest.mark.quick
async def test_tensors_of_every_kind() -> None:
    async with running_store(prefer=["tcp"], **SMALL) as client:
        whole = torch.randn(1024, 2048)
        values = {
            "whole": whole,
            "columns": whole[:, 100:1300],
            "transposed": whole.t(),
            "steps": whole[::3, ::2],
            "bfloat16": whole.to(torch.bfloat16),
            "bool": whole > 0,
            "complex": torch.complex(whole, -whole),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 5),
        }
        await client.put_batch(values)
        got = await client.get_batch(list(values))
        for name, value in values.items():
            assert torch.equal(bits(got[name]), bits(value)), name
        place = torch.zeros(1024, 4096)
        await client.get("columns", place[:, 7:1207])
        assert torch.equal(place[:, 7:1207], values["columns"])
        assert not place[:, :7].any()
        assert not place[:, 1207:].any()
        assert {entry["chosen"] for entry in await client.explain()} == {"tcp"}


@pytest.mark.quick
async def test_state_dicts() -> None:
    async with running_store(prefer=["tcp"], **SMALL) as client:
        state = {"layers": [{"w": torch.randn(300, 700), "b": torch.randn(700)} for _ in range(40)]}
        for _ in range(3):
            await client.put_state_dict(state, "model")
        got = await client.get_state_dict("model")
        for ours, theirs in zip(state["layers"], got["layers"], strict=True):
            assert torch.equal(ours["w"], theirs["w"])
            assert torch.equal(ours["b"], theirs["b"])


async def test_no_port_is_open_unless_a_client_uses_it() -> None:
    async with running_store(**SMALL) as client:
        await client.put("t", torch.zeros(MB))
        server = await _server(client)
        assert _open_ports(server) == 0
        reader = f"""
            client = await ts.connect({await ts.address()!r}, prefer=["tcp"])
            got = await client.get("t", torch.ones({MB}))
            assert not got.any()
            print("got")
            sys.stdout.flush()
            await asyncio.Event().wait()
            """
        with Script(reader):
            await until(lambda: _open_ports(server) == 1, 30)
        await until(lambda: _open_ports(server) == 0, 10)


async def test_a_client_that_is_killed_while_it_puts() -> None:
    """Its memory is free again, and nothing of it arrives there later."""
    async with running_store(prefer=["tcp"], capacity=250 * MB, prefault=0) as client:
        putting = f"""
            client = await ts.connect({await ts.address()!r}, prefer=["tcp"])
            value = torch.full(({100 * MB},), 7, dtype=torch.uint8)
            print("ready", flush=True)
            while True:
                await client.put("late", value)
            """
        for _ in range(3):
            with Script(putting) as script:
                await until(lambda: _used(client), 30)
                os.kill(script.pid, signal.SIGKILL)
            await until(lambda: nothing_unfinished(client), 10)
            if await client.exists("late"):
                got = await client.get("late")
                assert bool((got == 7).all())
                del got
                await client.delete("late")
            ours = torch.full((100 * MB,), 9, dtype=torch.uint8)
            await client.put("ours", ours)
            assert torch.equal(await client.get("ours", torch.empty_like(ours)), ours)
            await client.delete("ours")


async def _used(client: ts.Client) -> bool:
    return any(volume.unfinished_bytes for volume in (await client.status()).volumes)


@pytest.mark.parametrize("what", ["put", "get"])
async def test_a_cancelled_operation(what: str) -> None:
    async with running_store(prefer=["tcp"], capacity=900 * MB, prefault=0) as client:
        value = torch.full((200 * MB,), 1, dtype=torch.uint8)
        await client.put("v", value)
        target = torch.zeros_like(value)
        for step in range(6):
            work = client.put("v", value) if what == "put" else client.get("v", target)
            running = asyncio.ensure_future(work)
            await asyncio.wait([running], timeout=0.01 * step)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled() or running.exception() is None
        target.zero_()
        await until(lambda: nothing_unfinished(client), 10)
        assert not target.any()
        assert torch.equal(await client.get("v", target), value)


async def test_several_threads_with_event_loops() -> None:
    async with running_store(prefer=["tcp"], **SMALL) as client:
        value = torch.arange(MB)
        await client.put("v", value)

        def read() -> bool:
            async def main() -> bool:
                got = [await client.get("v", torch.empty_like(value)) for _ in range(3)]
                return all(torch.equal(one, value) for one in got)

            return asyncio.run(main())

        assert all(await asyncio.gather(*(asyncio.to_thread(read) for _ in range(4))))
