"""The transport in a store, with the real client and a second process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from tests.processes import Script, run_script
from tests.support import bits, commands, has_loaded, running_store, until
from tests.transports.asking import nothing_unfinished
from tests.transports.faults.frozen import frozen, newest_thread

import torchstore_core as ts
from torchstore_core.testing import leftovers

from .pairs import needs_nixl

pytestmark = needs_nixl
MB = 1 << 20
_BIG = 48 * MB
_RDMA = {"prefer": ["rdma"], "block": ["shm", "inline"], "capacity": 512 * MB, "prefault": 0}


@pytest.fixture(params=["all", pytest.param("tcp", marks=pytest.mark.soak)], autouse=True)
def fabric(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


async def _uses_rdma(client: ts.Client) -> bool:
    return {entry["chosen"] for entry in await client.explain()} == {"rdma"}


async def test_tensors_of_every_kind() -> None:
    whole = torch.arange(4 * MB).view(2048, 2048)
    values = {
        "plain": torch.randn(3, 5, 700),
        "bf16": torch.randn(1000, 100).bfloat16(),
        "fp8": torch.randn(999).to(torch.float8_e4m3fn),
        "bool": torch.randn(777) > 0,
        "complex": torch.randn(100, dtype=torch.complex128),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3.5),
        "rows": whole[::2],
        "columns": whole[:, 1::2],
        "turned": whole.t(),
        "same": torch.ones(1).expand(5000),
        "far": whole[:, 7],
    }
    async with running_store(**_RDMA) as client:
        assert await _uses_rdma(client)
        await client.put_batch(values)
        for key, value in values.items():
            assert torch.equal(bits(await client.get(key)), bits(value)), key
        into = {key: torch.zeros_like(value.contiguous()) for key, value in values.items()}
        await client.get_batch(into)
        for key, value in values.items():
            assert torch.equal(bits(into[key]), bits(value)), key
        wide = torch.zeros(2048, 2048, dtype=torch.int64)
        await client.get("columns", wide[:, ::2])
        assert torch.equal(wide[:, ::2], values["columns"])
        assert not wide[:, 1::2].any()
        assert await _uses_rdma(client)


async def test_ten_thousand_tensors_in_a_batch() -> None:
    values = {f"t{at}": torch.full((at % 37 + 1,), at) for at in range(10_000)}
    async with running_store(**_RDMA) as client:
        await client.put_batch(values)
        into = {key: torch.zeros_like(value) for key, value in values.items()}
        await client.get_batch(into)
        assert all(torch.equal(into[key], value) for key, value in values.items())
        assert await _uses_rdma(client)


@pytest.mark.quick
async def test_another_process_reads_what_was_put_and_the_reverse() -> None:
    async with running_store(**_RDMA) as client:
        await client.put("there", torch.arange(4 * MB))
        await run_script(
            f"""
            client = await ts.connect({(await ts.address())!r}, prefer=["rdma"], block=["shm"])
            got = torch.zeros(4 << 20, dtype=torch.int64)
            await client.get("there", got)
            assert torch.equal(got, torch.arange(4 << 20))
            await client.put("back", -got)
            assert [e["chosen"] for e in await client.explain()] == ["rdma"]
            """
        )
        got = torch.zeros(4 * MB, dtype=torch.int64)
        await client.get("back", got)
        assert torch.equal(got, -torch.arange(4 * MB))


async def test_two_event_loops_at_the_same_time() -> None:
    async with running_store(**_RDMA) as client:
        failures: list[BaseException] = []

        async def work(name: str) -> None:
            for at in range(6):
                sent = torch.full((MB // 4,), hash((name, at)))
                got = torch.zeros_like(sent)
                await asyncio.gather(
                    client.put(f"{name}/a", sent), client.put(f"{name}/b", sent + 1)
                )
                await asyncio.gather(client.get(f"{name}/a", got), client.get(f"{name}/b"))
                assert torch.equal(got, sent)

        def run(name: str) -> None:
            try:
                asyncio.run(work(name))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, args=("other",))
        thread.start()
        await work("main")
        await asyncio.to_thread(thread.join)
        assert not failures


async def test_a_client_that_is_killed_disturbs_nobody() -> None:
    async with running_store(**_RDMA) as client:
        await client.put("kept", torch.arange(MB))
        busy = f"""
            client = await ts.connect({(await ts.address())!r}, prefer=["rdma"], block=["shm"])
            mine = torch.ones({_BIG})
            while True:
                await client.put("theirs", mine[: {_BIG} // 8])
                await client.get("theirs", mine[: {_BIG} // 8])
                print("x", flush=True)
            """
        for _ in range(3):
            with Script(busy) as script:
                await until(lambda: client.exists("theirs"), 30)
                os.kill(script.pid, signal.SIGKILL)
            got = torch.zeros(MB, dtype=torch.int64)
            await client.get("kept", got)
            assert torch.equal(got, torch.arange(MB))
            await client.delete("theirs")
        await until(lambda: nothing_unfinished(client), 10)
        assert await _uses_rdma(client)


async def test_the_server_half_is_killed_in_the_middle() -> None:
    async with running_store(**_RDMA) as client:
        await client.put("t", torch.zeros(MB))
        (half,) = commands(b"isolated", _processes())
        sent = torch.randn(_BIG)
        putting = asyncio.ensure_future(client.put("big", sent))
        await asyncio.wait([putting], timeout=0.05)
        os.kill(half, signal.SIGKILL)
        await putting
        got = torch.zeros_like(sent)
        await client.get("big", got)
        assert torch.equal(got, sent)


@pytest.mark.parametrize("fabric", ["all"], indirect=True)
async def test_the_server_loads_neither_the_library_nor_torch() -> None:
    async with running_store(**_RDMA) as client:
        await client.put("t", torch.arange(MB))
        assert torch.equal(await client.get("t"), torch.arange(MB))
        (half,) = commands(b"isolated", _processes())
        server = (await client.status()).controller_pid
        assert has_loaded(half, "libnixl")
        assert not has_loaded(half, "libtorch")  # nor does the half need torch
        mapped = Path(f"/proc/{server}/maps").read_text()
        assert not [name for name in ("libnixl", "libucp", "libtorch") if name in mapped]


@pytest.mark.soak
@pytest.mark.parametrize("fabric", ["tcp"], indirect=True)  # others need no thread of the half
async def test_a_half_whose_polling_thread_hangs_is_replaced() -> None:
    """Its event loop answers, so that only the half itself can know."""
    async with running_store(**{**_RDMA, "block": []}) as client:
        sent = torch.arange(4 * MB)
        await client.put("t", sent)
        (half,) = commands(b"isolated", _processes())
        with frozen(newest_thread(half)), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            begun = time.monotonic()
            got = torch.zeros_like(sent)
            await client.get("t", got, timeout=9)
            assert torch.equal(got, sent)
            await until(lambda: not Path(f"/proc/{half}/fd/0").exists(), 40)
            assert time.monotonic() - begun < 30

            async def again() -> bool:
                await client.get("t", got)
                return await _uses_rdma(client)

            await until(again, 30)


async def test_a_forked_child_uses_something_else_and_leaves_its_parent_alone() -> None:
    async with running_store(**{**_RDMA, "block": []}) as client:
        await client.put("t", torch.arange(MB))
        said = await run_script(
            f"""
            import os, warnings
            warnings.simplefilter("ignore", DeprecationWarning)
            address = {(await ts.address())!r}
            client = await ts.connect(address, prefer=["rdma"])
            got = torch.zeros(1 << 20, dtype=torch.int64)
            await client.get("t", got)

            def child():
                async def work():
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        mine = torch.zeros(1 << 20, dtype=torch.int64)
                        client = await ts.connect(address, prefer=["rdma"])
                        await client.get("t", mine)
                        assert torch.equal(mine, torch.arange(1 << 20))
                        assert [e["chosen"] for e in await client.explain()] == ["shm"]
                        assert any("was forked" in str(one.message) for one in caught)
                asyncio.run(work())

            def fork():
                pid = os.fork()
                if not pid:
                    code = 1
                    try:
                        child()
                        code = 0
                    finally:
                        os._exit(code)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

            assert await asyncio.to_thread(fork) == 0
            got.zero_()
            await client.get("t", got)
            assert torch.equal(got, torch.arange(1 << 20))
            print([e["chosen"] for e in await client.explain()])
            """,
            fresh=True,
        )
        assert said.strip() == "['rdma']"


def _processes() -> list[int]:
    return [pid for pid, _ in leftovers.descendants(os.getpid())]
