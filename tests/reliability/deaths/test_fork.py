"""Forked children: a connection of their own, and inherited zero-copy tensors that stay intact."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import textwrap
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.processes import Program, run_script
from tests.reliability import children
from tests.reliability.harness import (
    MB,
    Account,
    Child,
    account,
    fds,
    is_running,
    kill,
    settled,
    under_way,
)
from tests.support import running_store, until

import torchstore_core as ts

VALUE = 8 * MB


def full_of(number: int) -> torch.Tensor:
    return torch.full((VALUE,), number, dtype=torch.uint8)


async def fill_up() -> list[str]:
    """Put until the store is full; the keys."""
    keys: list[str] = []
    while True:
        key = f"more {len(keys)}"
        try:
            await ts.put(key, full_of(100 + len(keys)))
        except ts.StoreFullError:
            return keys
        keys.append(key)


async def ask(pipe: Connection, message: str) -> object:
    """Tell a process something and return its answer."""
    pipe.send(message)
    assert await asyncio.to_thread(pipe.poll, 60), "no answer"
    return pipe.recv()


async def test_a_forked_child_has_a_connection_of_its_own():
    async with running_store():
        await ts.put("a", full_of(7))
        held = await ts.get("a")
        before = fds()
        with Child(children.inherit, [held], start="fork") as child:
            for _ in range(2):
                child.tell("own")
                assert await child.said() == (7, sorted([os.getpid(), child.pid]))
            child.tell("write")
            assert await child.said() == "written"
            # Nobody else saw it.
            assert children.uniform(held) == 7
            assert children.uniform(await ts.get("a")) == 7
            # The parent's connection still works, both ways.
            await ts.put("a", full_of(8))
            child.tell("own")
            assert (await child.said())[0] == 8
            child.tell("end")
            assert await child.ended() == 0
        await settled(Account(1, 2 * VALUE, VALUE))
        del held
        await settled(Account(1, VALUE))
        await until(lambda: fds() <= before)


async def test_inherited_tensors_outlive_the_parents_in_a_full_store():
    async with running_store(capacity=6 * VALUE):
        await ts.put_batch({"a": full_of(7), "b": full_of(8)})
        got = await ts.get_batch(["a", "b"])
        with Child(children.inherit, [got["a"], got["b"]], start="fork") as child:
            child.tell("check")
            assert await child.said() == [7, 8]
            del got
            await ts.put("a", full_of(9))
            await ts.delete("b")
            keys = await fill_up()
            assert len(keys) == 3
            child.tell("check")
            assert await child.said() == [7, 8]
            assert await account() == Account(1, 6 * VALUE, 2 * VALUE)
            for number, key in enumerate(keys):
                assert children.uniform(await ts.get(key)) == 100 + number
            child.kill()
        await settled(Account(1, 4 * VALUE))
        assert len(await fill_up()) == 5


async def test_tensors_that_the_parent_keeps_stay_leased_when_the_child_ends():
    async with running_store(capacity=4 * VALUE):
        await ts.put("a", full_of(7))
        held = await ts.get("a")
        with Child(children.inherit, [held], start="fork") as child:
            child.tell("end")
            await child.ended()
        await ts.delete("a")
        assert len(await fill_up()) == 3
        assert children.uniform(held) == 7


@pytest.mark.quick
async def test_inherited_tensors_outlive_a_killed_parent():
    async with running_store(capacity=4 * VALUE) as client:
        await ts.put("a", full_of(7))
        await ts.put_state_dict({"all": 1}, "dict")
        mine, theirs = multiprocessing.Pipe()
        with (
            mine,
            Child(children.fork_with_tensors, client.address, VALUE, theirs, "dict") as parent,
        ):
            theirs.close()
            forked = await parent.said()
            try:
                part = await ts.put_state_dict({"new": 3}, "dict", partial=True)
                assert await ts.latest_version("dict") < part.version  # the parent is half done
                parent.kill()
                await ts.wait("dict", min_version=part.version, timeout=10)
                assert await ts.get_state_dict("dict") == {"all": 1, "new": 3}
                await ts.delete("dict")
                assert await ask(mine, "check") == [7]
                # Another generation, and the one in between is killed too.
                forked_again = await ask(mine, "fork")
                assert isinstance(forked_again, int)
                kill(forked)
                forked = forked_again
                await ts.delete("a")
                assert len(await fill_up()) == 3
                assert await ask(mine, "check") == [7]
                assert (await account()).leased == VALUE
            finally:
                kill(forked)
        await settled(Account(1, 3 * VALUE))
        assert len(await fill_up()) == 4


async def test_inherited_tensors_outlive_the_store():
    mine, theirs = multiprocessing.Pipe()
    with mine, Child(children.fork_with_tensors, None, VALUE, theirs) as owner:
        theirs.close()
        forked = await owner.said()
        try:
            own = await ask(mine, "own")
            assert own == (7, sorted([owner.pid, forked]))
            owner.kill()
            assert await ask(mine, "check") == [7]

            async def closed() -> bool:
                return not await ask(mine, "still open?")

            await until(closed)
            assert await ask(mine, "check") == [7]
        finally:
            kill(forked)
        await until(lambda: not is_running(forked))


async def test_many_forks_leave_nothing_behind():
    async with running_store(capacity=4 * VALUE):
        await ts.put("a", full_of(7))
        held = await ts.get("a")
        before = fds()
        for _ in range(30):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        await until(lambda: fds() <= before)
        assert children.uniform(held) == 7
        del held
        await settled(Account(1, VALUE))


async def test_a_fork_in_the_middle_of_a_put():
    async with running_store(capacity=192 * MB):
        await ts.put("a", full_of(7))
        held = await ts.get("a")
        large = torch.full((64 * MB,), 3, dtype=torch.uint8)

        async def copying() -> bool:
            return (await account()).unfinished > 0

        put = await under_way(lambda: ts.put("large", large), copying)
        with Child(children.inherit, [held], start="fork") as child:
            child.tell("own")
            assert (await child.said())[0] == 7
            await put
            assert children.uniform(await ts.get("large")) == 3
            child.tell("check")
            assert await child.said() == [7]
        del held
        await settled(Account(1, 64 * MB + VALUE))


async def test_a_killed_parents_unfinished_put_goes_though_its_child_lives_on(tmp_path: Path):
    """The child keeps what it inherited; what only the parent could have committed is given up."""
    code = textwrap.dedent(
        """
        import asyncio, os, signal, sys
        import torch
        import torchstore_core as ts
        from torchstore_core.values import TensorMeta
        from torchstore_core.wire import messages as m

        async def main():
            client = await ts.connect(sys.argv[1])
            await client.put("held", torch.zeros(1 << 20))
            held = await client.get("held")
            child = os.fork()
            if not child:
                signal.pause()
            session, channel = client._here(client._watch("put", None))
            item = m.PutItem("never", TensorMeta("uint8", (1 << 20,)), 1 << 20)
            request = m.Put(channel.next_id(), session.next_id(), [item])
            await channel.call(request, m.Granted, 10)
            print(child, flush=True)
            signal.pause()

        asyncio.run(main())
        """
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    async with running_store() as client:
        parent = Program(program, client.address, environment=os.environ)
        child = int(await asyncio.to_thread(parent.stdout.readline))
        try:
            volume = (await ts.status()).volumes[0]
            assert (volume.unfinished_bytes, volume.leased_bytes) == (1 << 20, 4 << 20)
            parent.kill()
            parent.wait()

            async def given_up() -> bool:
                return (await ts.status()).volumes[0].unfinished_bytes == 0

            await until(given_up, 10)
            assert (await ts.status()).volumes[0].leased_bytes == 4 << 20
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()
            parent.wait()
            parent.stdin.close()
            parent.stdout.close()

        async def given_back() -> bool:
            return not (await ts.status()).volumes[0].leased_bytes

        await until(given_back)


async def test_a_forked_child_needs_no_threads_of_torch():
    """Those that its parent has used are not in the child, which would wait for them for ever: in a
    copy of more than 32,768 elements that torch makes, such as into columns or another dtype.
    """
    printed = await run_script(
        """
    import multiprocessing
    torch.set_num_threads(4)
    torch.ones(1 << 20).add_(1)  # in four threads

    def empty(dtype, *shape):
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return torch.frombuffer(bytearray(size), dtype=dtype).view(shape)

    async def work(client):
        for rows in (250, 1000, 4000):  # in a message, in shared memory, beside a copy thread
            for dtype in (torch.uint8, torch.float32):
                turned = empty(dtype, 240, rows).t()
                await client.get(f"{rows} {dtype}", turned)
                assert (turned[::25, 7] == 7).all()
                await client.put("turned", turned)
            part = ts.TensorSlice((0, 1), (rows, 239), (rows, 240))
            assert (await client.get(f"{rows} torch.uint8", tensor_slice_spec=part))[5, 5] == 7
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                state_dict = {"w": empty(torch.float32, 240, rows).t()}
                await client.put_state_dict(state_dict, "cast", transfer_dtype=dtype)
            cast = empty(torch.bfloat16, rows, 240)
            await client.get_state_dict(f"all {rows}", {"w": cast}, cast=True)
            assert cast[5, 5] == 7
        print("done")

    client = await ts.initialize(capacity=64 << 20, prefault=0)
    for rows in (250, 1000, 4000):
        for dtype in (torch.uint8, torch.float32):
            await ts.put(f"{rows} {dtype}", torch.full((rows, 240), 7, dtype=dtype))
        await ts.put_state_dict({"w": torch.full((rows, 240), 7.0)}, f"all {rows}")
    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(work(client)))
    child.start()
    await asyncio.to_thread(child.join, 60)
    child.kill()
    await ts.shutdown()
    """,
        timeout=200,
    )
    assert printed == "done\n"


_INTERRUPTED = """
import collections, os, signal, threading
from torchstore_core.clients.session import held_ref, holder, reclaimer, session
from torchstore_core.clients.stores import environment, table
await ts.initialize(capacity=64 << 20, prefault=0)
await ts.put("a", torch.ones(1 << 20, dtype=torch.uint8))
mapped, ref = await ts.get("a"), await ts.put_object(1)
modules = {one.__file__ for one in (holder, reclaimer, session, table)}

def interrupt(*_):
    raise KeyboardInterrupt

def trace(frame, event, _):
    if frame.f_code.co_filename not in modules or "fork" not in frame.f_code.co_name:
        return None
    lines[event] -= 1
    if not lines["line"]:
        signal.raise_signal(signal.SIGUSR1)
    return trace

def is_free(lock):
    return lock.acquire(timeout=20) and lock.release() is None

signal.signal(signal.SIGUSR1, interrupt)
sys.unraisablehook = lambda ignored: None
line, lines = 0, collections.Counter(line=0)
while lines["line"] <= 0:
    line += 1
    lines = collections.Counter(line=line)
    reading, writing = os.pipe()
    sys.settrace(trace)
    child = os.fork()
    sys.settrace(None)
    if not child:
        os.write(writing, bytes([ref._holder._connection is not None, len(reclaimer._inherited)]))
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 9) == bytes([1, 1]), line
    os.close(reading)
    os.waitpid(child, 0)
    for lock in (environment.lock, holder._lock, held_ref._lock, ref._holder._lock):
        assert await asyncio.to_thread(is_free, lock), (line, lock)
print(line > 30, await ts.get(ref))
await ts.shutdown()
"""


async def test_what_a_signal_handler_raises_within_a_fork_leaves_nothing_undone() -> None:
    """The interpreter forgets it. Locks stayed taken for ever, and children had inherited tensors
    whose memory was given to others.
    """
    assert await run_script(_INTERRUPTED) == "True 1\n"
