"""What every transport over pairs has to do. Each plug-in's tests subclass :class:`PairTests`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.processes import Script, run_script
from tests.strangers import Strangers, listening
from tests.support import (
    SMALL,
    bits,
    children,
    commands,
    emptied,
    halt,
    noise,
    running_store,
    start_store,
    until,
)
from tests.transports.asking import nothing_unfinished
from tests.transports.faults.frozen import frozen, newest_thread

import torchstore_core as ts
from torchstore_core.contracts.transport import Copy
from torchstore_core.testing.timers import ends_within, within
from torchstore_transports.pairs.link import PairLink
from torchstore_transports.pairs.pair import TIMEOUT_S

MB = 1 << 20
_SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (64, 3), (1000, 77), (3 * MB + 5,)]
_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
#: So large that it is as a rule still under way when a test looks, and room for one such value.
_LARGE = 128 * MB
_ROOM = 192 * MB
_LASTING = "lasting"
#: The functions of torch, of the compiled module and of ctypes that copy.
_COPIES = {
    "copy_",
    "copy_columns",
    "copy_rows",
    "copy_runs",
    "copy_strided",
    "contiguous",
    "memmove",
}


class PairTests:
    """Attributes: ``name`` of the transport, and ``half``, the module of its server half."""

    name: str
    half: str

    @asynccontextmanager
    async def store(self, **arguments: Any) -> AsyncIterator[ts.Client]:
        async with running_store(prefer=[self.name], **{**SMALL, **arguments}) as client:
            yield client
            assert {entry["chosen"] for entry in await client.explain()} == {self.name}

    @pytest.fixture(scope="class")
    @classmethod
    def lasting(cls) -> Iterator[None]:
        """A store for all tests after which its half, which imports torch, is as it was."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TORCHSTORE_BLOCK", raising=False)
            asyncio.run(start_store(store_name=_LASTING, prefer=[cls.name], capacity=_ROOM))
        try:
            yield
        finally:
            asyncio.run(ts.shutdown(_LASTING))

    @pytest.fixture
    async def shared(self, lasting: None) -> AsyncIterator[ts.Client]:
        client = await ts.client(_LASTING)
        yield client
        assert {entry["chosen"] for entry in await client.explain()} == {self.name}
        await emptied(client)

    async def link(self, client: ts.Client) -> PairLink:
        """The link that the client uses."""
        session = await client._joined.session(10)
        (volume,) = session.volumes
        candidate = next(c for c in volume.candidates(1) if c.spec.name == self.name)
        link = await volume.connect(candidate)
        assert isinstance(link, PairLink)
        return link

    async def half_pid(self, client: ts.Client) -> int:
        """The process of the server half."""
        (pid,) = self._halves((await client.status()).controller_pid)
        return pid

    def _halves(self, server: int) -> set[int]:
        return commands(self.half.encode(), children(server))

    async def test_strangers_find_no_open_port(self) -> None:
        """gloo would keep a descriptor for each of them in both processes."""
        others = listening(os.getpid())
        async with self.store() as client:
            value = torch.arange(MB)
            await client.put("first", value)
            assert torch.equal(await client.get("first"), value)
            strangers = Strangers(os.getpid(), await self.half_pid(client), besides=others)
            assert strangers.ports
            assert strangers.let_in([b"", bytes(64), b"GET / HTTP/1.1\r\n\r\n"]) == 0
            await client.put("second", value)
            assert torch.equal(await client.get("second"), value)
            await until(strangers.left_nothing)

    async def test_the_server_loads_no_torch_while_its_half_does(self, shared: ts.Client) -> None:
        await shared.put("t", torch.arange(MB))
        assert torch.equal(await shared.get("t"), torch.arange(MB))
        server = (await shared.status()).controller_pid
        (half,) = self._halves(server)
        assert "libtorch" in Path(f"/proc/{half}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{server}/maps").read_text()

    # ---- bytes ----------------------------------------------------------------------------

    async def test_every_byte_arrives(self, shared: ts.Client) -> None:
        torch.manual_seed(1)
        for dtype in _DTYPES:
            values = {f"{dtype}/{shape}": torch.randint(0, 2, shape).to(dtype) for shape in _SHAPES}
            await shared.put_batch(values)
            got = {key: torch.zeros_like(value) for key, value in values.items()}
            await shared.get_batch(got)
            for key, value in values.items():
                assert torch.equal(bits(got[key]), bits(value)), key

    async def test_strides_and_slices(self, shared: ts.Client) -> None:
        rows = torch.arange(4 * MB).view(2048, 2048)
        await shared.put("columns", rows[:, ::2])
        assert torch.equal(await shared.get("columns"), rows[:, ::2])
        into = torch.zeros(1024, 2048, dtype=torch.int64).t()
        await shared.get("columns", into)
        assert torch.equal(into, rows[:, ::2])

    async def test_large_tensors_are_not_packed_on_the_event_loop(self, shared: ts.Client) -> None:
        """Up to half a MiB is: a thread would take longer to begin than the copy lasts."""
        columns = torch.arange(8 * MB, dtype=torch.float32).view(2048, 4096)[:, ::2]
        turned = torch.zeros(4096, 2048).t()[:, ::2]
        for value, into, is_large in (
            (columns, turned, True),
            (columns[:100, :100], turned[:100, :100], False),
        ):
            with _copies_here() as put:
                await shared.put("columns", value)
            with _copies_here() as got:
                await shared.get("columns", into)
            assert torch.equal(into, value)
            assert bool(put) is bool(got) is not is_large, (put, got)

    async def test_thousands_of_pieces(self, shared: ts.Client) -> None:
        """Some are large, so that there is everything: messages of one piece and of many."""
        sizes = [1 + 37 * i % 4001 for i in range(9000)] + [MB, 9 * MB + 1, 100_000, 3]
        values = {f"{i}": noise(n, i) for i, n in enumerate(sizes)}
        for _ in range(2):
            await shared.put_batch(values)
            got = {key: torch.zeros_like(value) for key, value in values.items()}
            await shared.get_batch(got)
            assert all(torch.equal(got[key], values[key]) for key in values)

    async def test_another_process(self, shared: ts.Client) -> None:
        address = await ts.address(_LASTING)
        await run_script(f"""
            client = await ts.connect({address!r}, prefer=[{self.name!r}])
            await client.put("t", torch.arange({4 * MB}))
            assert {{e["chosen"] for e in await client.explain()}} == {{{self.name!r}}}
            """)
        got = torch.zeros(4 * MB, dtype=torch.int64)
        await shared.get("t", got)
        assert torch.equal(got, torch.arange(4 * MB))

    async def test_many_at_the_same_time(self, shared: ts.Client) -> None:
        """On two event loops: batches must not be mixed up."""

        async def one(number: int) -> None:
            value = torch.full((MB // 4 + number,), float(number))
            for _ in range(5):
                await shared.put(f"{number}", value)
                got = torch.zeros_like(value)
                await shared.get(f"{number}", got)
                assert torch.equal(got, value)

        async def some(first: int) -> None:
            await asyncio.gather(*(one(first + i) for i in range(8)))

        await asyncio.gather(asyncio.to_thread(asyncio.run, some(100)), some(0))

    async def test_only_ranges_of_the_segment(self, shared: ts.Client) -> None:
        """Others are refused before anything moves, and the link can be used afterwards."""
        memory = torch.full((64,), 7, dtype=torch.uint8)
        at, size = memory.data_ptr(), _ROOM
        wrong = [(0, size - 63), (0, size + 1), (0, 1 << 63), (1, 0), (0, (1 << 64) - 64)]
        link = await self.link(shared)
        for segment, offset in wrong:
            for call in (link.write, link.read):
                with pytest.raises(ts.TransportError, match="not inside of segment"):
                    await call([Copy(at, segment, offset, 64)])
        assert not link.unsettled
        assert torch.equal(memory, torch.full((64,), 7, dtype=torch.uint8))
        await link.write([Copy(at, 0, size - 64, 64)])
        back = torch.zeros(64, dtype=torch.uint8)
        await link.read([Copy(back.data_ptr(), 0, size - 64, 64)])
        assert torch.equal(back, memory)

    # ---- what goes wrong ------------------------------------------------------------------

    async def test_a_cancelled_read_writes_nothing_afterwards(self, shared: ts.Client) -> None:
        """In the middle of a message: the half is stopped while it sends one, and the rest would
        arrive after the read was cancelled.
        """
        await shared.put("large", torch.full((_LARGE,), 3, dtype=torch.uint8))
        half = await self.half_pid(shared)
        into = torch.zeros(_LARGE, dtype=torch.uint8)
        getting = await self._stopped_in_a_read(shared, half, into)
        try:
            await self._cancel(getting)
            before = _sum(into)
            assert not _all(into, 3)
        finally:
            os.kill(half, signal.SIGCONT)
        with pytest.raises(AssertionError):  # now the half would send the rest
            await until(lambda: _sum(into) != before, 1)
        again = torch.zeros(_LARGE, dtype=torch.uint8)
        await shared.get("large", again)
        assert _all(again, 3)
        assert _sum(into) == before

    async def _stopped_in_a_read(
        self, client: ts.Client, half: int, into: torch.Tensor
    ) -> asyncio.Future[Any]:
        """A get that is under way while the half is stopped; tried until it is."""
        for _ in range(20):
            getting = asyncio.ensure_future(client.get("large", into.zero_()))
            await until(lambda: int(into[0]) == 3 or getting.done(), 20)  # noqa: B023
            await halt(half)
            # What was on its way arrives, and that may be all: this thread may have stood still.
            # A message that ends while the call is cancelled would end the thread that waits for
            # it, and so hide that the pair lives on.
            await until(lambda: _is_quiet(into), 20)
            if not getting.done() and not _all(into, 3):
                return getting
            os.kill(half, signal.SIGCONT)
            await getting
        raise AssertionError("every get was over before its half was stopped")

    async def test_a_cancelled_write_is_settled(self, shared: ts.Client) -> None:
        """Its memory is not used before the half has given it up, and the link lives on."""
        link = await self.link(shared)
        value = torch.ones(_LARGE, dtype=torch.uint8)
        for _ in range(20):  # until one is cancelled in the middle
            putting = asyncio.ensure_future(shared.put("large", value))
            await until(lambda put=putting: _moves(shared, put), 10)
            if not putting.done():
                break
            await shared.delete("large")
        await self._cancel(putting)
        await until(lambda: nothing_unfinished(shared), 10)
        assert not link.unsettled
        got = torch.zeros(_LARGE, dtype=torch.uint8)
        for number in range(3):  # in the same memory
            await shared.put("next", value.fill_(number))
            await shared.get("next", got.fill_(7))
            assert _all(got, number)
            await shared.delete("next")
        assert await self.link(shared) is link

    async def test_a_write_cancelled_while_the_half_is_stopped_is_in_quarantine(
        self, shared: ts.Client
    ) -> None:
        await shared.put("small", torch.zeros(MB))
        half = await self.half_pid(shared)
        await halt(half)
        try:
            putting = asyncio.ensure_future(shared.put("t", torch.ones(16 * MB)))
            await until(lambda: _moves_bytes(shared), 10)
            await self._cancel(putting)
            assert not await nothing_unfinished(shared)
        finally:
            os.kill(half, signal.SIGCONT)
        await until(lambda: nothing_unfinished(shared), 10)
        await shared.put("t", torch.ones(16 * MB))
        assert torch.equal(await shared.get("t"), torch.ones(16 * MB))

    async def test_cancelling_one_call_does_not_disturb_others(self, shared: ts.Client) -> None:
        for _ in range(20):  # until some are cancelled in the middle
            others = [
                asyncio.ensure_future(shared.put(f"{i}", torch.full((4 * MB,), float(i))))
                for i in range(6)
            ]
            together = asyncio.gather(*others, return_exceptions=True)
            await until(lambda puts=together: _moves(shared, puts), 10)
            if not others[0].done() and not others[3].done():
                break
            await together
        others[0].cancel()
        others[3].cancel()
        await asyncio.wait(others)
        for i in (1, 2, 4, 5):
            await others[i]
            assert torch.equal(await shared.get(f"{i}"), torch.full((4 * MB,), float(i)))

    async def test_the_half_is_killed_in_the_middle(self) -> None:
        """The operation carries on over a new pair, or over another transport."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            async with running_store(prefer=[self.name], capacity=768 * MB) as client:
                value = torch.ones(4 * _LARGE, dtype=torch.uint8)
                await client.put("small", torch.ones(MB))
                half = await self.half_pid(client)
                for _ in range(20):  # until it is in the middle
                    putting = asyncio.ensure_future(client.put("large", value))
                    await until(lambda put=putting: _moves(client, put), 10)
                    if not putting.done():
                        break
                    await client.delete("large")
                os.kill(half, signal.SIGKILL)
                await asyncio.wait_for(putting, 30)
                got = torch.zeros_like(value)
                await client.get("large", got)
                assert torch.equal(got, value)
                await until(lambda: self._used_again(client), 30)
                assert await self.half_pid(client) != half

    async def test_a_half_that_dies_in_the_middle_of_a_message_is_noticed(self) -> None:
        """At once, though a library may wait for the rest of the message as long as it may take."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            async with running_store(prefer=[self.name], capacity=_ROOM) as client:
                await client.put("large", torch.full((_LARGE,), 3, dtype=torch.uint8))
                half = await self.half_pid(client)
                into = torch.zeros(_LARGE, dtype=torch.uint8)
                getting = await self._stopped_in_a_read(client, half, into)
                async with within(TIMEOUT_S / 2):
                    os.kill(half, signal.SIGKILL)
                    await getting
                assert _all(into, 3)

    async def test_a_pair_that_died_unnoticed_is_made_anew(self) -> None:
        async with self.store() as client:
            await client.put("t", torch.arange(MB))
            half = await self.half_pid(client)
            os.kill(half, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{half}/fd/0").exists(), 10)
            await client.put("t", torch.arange(MB) + 1)
            assert torch.equal(await client.get("t"), torch.arange(MB) + 1)

    @pytest.mark.soak  # anew: the test above
    async def test_a_pair_is_made_anew_though_the_new_half_starts_slowly(self) -> None:
        """As on a busy machine: its process is stopped for a while before it says anything."""
        async with self.store() as client:
            await client.put("t", torch.arange(MB))
            server = (await client.status()).controller_pid
            for number in range(20):  # until it is stopped before it has said anything
                half = await self.half_pid(client)
                os.kill(half, signal.SIGKILL)
                await until(lambda pid=half: not Path(f"/proc/{pid}/fd/0").exists(), 10)
                putting = asyncio.ensure_future(client.put("t", torch.arange(MB) + number))
                await until(lambda pid=half: self._halves(server) - {pid}, 10)
                (started,) = self._halves(server) - {half}
                await halt(started)
                try:
                    over = (await asyncio.wait([putting], timeout=2))[0]
                finally:
                    os.kill(started, signal.SIGCONT)
                await putting
                assert await self.half_pid(client) == started
                assert torch.equal(await client.get("t"), torch.arange(MB) + number)
                if not over:
                    return
            raise AssertionError("every half was there before it was stopped")

    @pytest.mark.soak
    async def test_a_half_that_is_stopped_fails_within_the_time_of_the_pair(self) -> None:
        async with running_store(prefer=[self.name]) as client:
            await client.put("t", torch.arange(4 * MB))
            half = await self.half_pid(client)
            await halt(half)
            try:
                got = torch.zeros(4 * MB, dtype=torch.int64)
                begun = time.monotonic()
                with pytest.warns(RuntimeWarning, match=f"{self.name}.* failed"):
                    await client.get("t", got)
                assert 15 < time.monotonic() - begun < 30
                assert torch.equal(got, torch.arange(4 * MB))
            finally:
                os.kill(half, signal.SIGCONT)
            await until(lambda: self._used_again(client), 30)

    @pytest.mark.soak
    async def test_a_half_of_which_one_thread_hangs_is_replaced(self) -> None:
        """Its event loop answers, and its clients have new pairs: only its thread is missing."""
        async with running_store(prefer=[self.name], capacity=_ROOM) as client:
            await client.put("large", torch.full((_LARGE,), 3, dtype=torch.uint8))
            half = await self.half_pid(client)
            into = torch.zeros(_LARGE, dtype=torch.uint8)
            for _ in range(20):  # until it is frozen in the middle
                getting = asyncio.ensure_future(client.get("large", into.zero_(), timeout=9))
                await until(lambda get=getting: int(into[0]) == 3 or get.done(), 20)
                with frozen(newest_thread(half)), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    if (await asyncio.wait([getting], timeout=1))[0]:
                        continue
                    begun = time.monotonic()
                    await getting
                    assert time.monotonic() - begun < 9
                    assert _all(into, 3)
                    await until(lambda: not Path(f"/proc/{half}/fd/0").exists(), 40)
                    assert time.monotonic() - begun < TIMEOUT_S + 15
                    await until(lambda: self._used_again(client), 30)
                    assert await self.half_pid(client) != half
                    return
            raise AssertionError("every get was over before a thread of its half was frozen")

    async def test_a_killed_client_leaves_nothing(self) -> None:
        async with self.store() as client:
            await client.put("t", torch.zeros(MB))
            half = await self.half_pid(client)
            before = _open_files(half)
            body = f"""
                client = await ts.connect({(await ts.address())!r}, prefer=[{self.name!r}])
                await client.put("mine", torch.zeros({8 * MB}))
                while True:
                    await client.put("mine", torch.zeros({8 * MB}))
                """
            for _ in range(3):
                with Script(body):
                    await until(lambda: client.exists("mine"), 30)
            await until(lambda: nothing_unfinished(client), 30)
            await until(lambda: _open_files(half) <= before, 30)
            await client.put("t", torch.ones(MB))
            assert torch.equal(await client.get("t"), torch.ones(MB))

    @pytest.mark.soak
    async def test_nothing_is_left_of_pairs_that_were_given_up(self) -> None:
        async with self.store() as client:
            await client.put("t", torch.zeros(MB))
            half = await self.half_pid(client)
            baseline = [_open_files(os.getpid()), _open_files(half)]
            threads = threading.active_count()
            for _ in range(8):
                putting = asyncio.ensure_future(client.put("u", torch.ones(8 * MB)))
                await until(lambda put=putting: _is_moving() or put.done(), 10)
                putting.cancel()
                await asyncio.wait([putting])
                await client.put("t", torch.zeros(MB))
            # The thread of a transfer that was under way ends with the time of its pair.
            await until(lambda: threading.active_count() <= threads, 40)
            await until(lambda: _open_files(half) <= baseline[1] + 1, 40)
            await until(lambda: _open_files(os.getpid()) <= baseline[0] + 1, 40)

    async def test_a_forked_child(self, shared: ts.Client) -> None:
        """It makes a pair of its own, and its parent's lives on."""
        address = await ts.address(_LASTING)
        out = await run_script(f"""
            import os
            client = await ts.connect({address!r}, prefer=[{self.name!r}])
            await client.put("parent", torch.arange({MB}))

            async def child():
                got = torch.zeros({MB}, dtype=torch.int64)
                await client.get("parent", got)
                assert torch.equal(got, torch.arange({MB}))
                await client.put("child", got)

            import multiprocessing, threading
            def in_child():
                thread = threading.Thread(target=asyncio.run, args=(child(),))
                thread.start(); thread.join()

            process = multiprocessing.get_context("fork").Process(target=in_child)
            process.start()
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0
            assert torch.equal(await client.get("child"), torch.arange({MB}))
            print("done")
            """)
        assert "done" in out
        assert torch.equal(await shared.get("child"), torch.arange(MB))

    # ---- parts ----------------------------------------------------------------------------

    async def _cancel(self, work: asyncio.Future[Any]) -> None:
        work.cancel()
        assert await ends_within(work, 2)
        assert work.cancelled()

    async def _used_again(self, client: ts.Client) -> bool:
        await client.put("any", torch.zeros(MB))
        return {entry["chosen"] for entry in await client.explain()} == {self.name}


@contextmanager
def _copies_here() -> Iterator[Counter[str]]:
    """Count the calls by which the thread of the caller copies bytes of tensors."""
    calls: Counter[str] = Counter()

    def note(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in _COPIES:
            calls[called.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def _sum(memory: torch.Tensor) -> int:
    """Of its words of eight bytes: a sum of bytes takes seven times as long."""
    return int(memory.view(torch.int64).sum())


def _all(memory: torch.Tensor, byte: int) -> bool:
    """Whether it is full of a byte."""
    return bool((memory.view(torch.int64) == int.from_bytes(bytes([byte]) * 8)).all())


def _is_moving() -> bool:
    """Whether a batch has begun in this process."""
    return any(thread.name == "torchstore-pair" for thread in threading.enumerate())


async def _moves_bytes(client: ts.Client) -> bool:
    """Whether a put has been granted memory, and a batch has begun."""
    return not await nothing_unfinished(client) and _is_moving()


async def _moves(client: ts.Client, put: asyncio.Future[Any]) -> bool:
    """Whether it moves bytes, or is over."""
    return put.done() or await _moves_bytes(client)


async def _is_quiet(into: torch.Tensor) -> bool:
    """Whether nothing arrives there for a while. One byte of each page is looked at: on a busy
    machine, to read all of them takes longer than what arrives.
    """
    bytes_of_pages = into[::4096]
    before = bytes_of_pages.clone()
    await asyncio.sleep(0.1)
    return torch.equal(bytes_of_pages, before)


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
