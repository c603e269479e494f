"""Children of a fork server that is older than the store: their environment says nothing of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from tests.processes import Program, run_program
from tests.support import SMALL

import torchstore_core as ts
from torchstore_core.clients.stores import ancestors
from torchstore_core.machine import topology

_PROGRAM = """
import multiprocessing, os, sys, warnings
import torchstore_core.blocking as ts

SMALL = {small!r}

def there(name="torchstore"):
    try:
        return ts.get("k", store_name=name)
    except ts.StoreClosedError as error:
        return str(error)

def look(pipe, name):
    pipe.send(there(name))

def ask(name="torchstore", target=look):
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, name))
    child.start()
    answer = ours.recv()
    child.join()
    return answer

def grandchild(pipe, name):
    pipe.send(ask(name))

def own(pipe, name):
    # A child with a store of its own, whose child's system parent is the fork server, too.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ts.initialize(store_name=name, **SMALL)
    (second,) = [str(warning.message) for warning in caught]
    ts.put("k", "of the child", store_name=name)
    told = "a process that this one descends from has a store that is running" in second
    pipe.send(ask(name) if told else second)
    ts.shutdown(name)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torchstore_core.blocking"])

if __name__ == "__main__":
    print("nor in its living parents" in ask())  # starts the fork server
    ts.initialize(**SMALL)
    ts.put("k", 1)
    print(ask(), ask(target=grandchild))
    ts.initialize(store_name="other", **SMALL)
    ts.put("k", 2, store_name="other")
    print(ask("other"), ask("other", target=own), ask("other"))
    ts.shutdown("other")
    print("there is no store 'other'" in ask("other"))
    ts.shutdown()
    print("there is no store 'torchstore'" in ask())
    # A fork server whose environment has the address of a store that is gone.
    os.environ["TORCHSTORE_ADDRESS"] = "unix:/gone"
    ts.initialize(**SMALL)
    ts.put("k", 3)
    print(ask())
    ts.shutdown()
"""


async def test_children_of_an_older_fork_server_find_their_parents_stores(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(small=SMALL))
    _, out, err = await run_program(program, timeout=100)
    assert out.splitlines() == ["True", "1 1", "2 of the child 2", "True", "True", "3"], err


_OWNER = f"""
import asyncio, sys
import torchstore_core as ts

async def main():
    client = await ts.initialize(**{SMALL!r})
    print(client.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


async def test_nobody_finds_the_store_of_a_stranger(tmp_path: Path):
    """Of a process that is no ancestor, has got the pid of one, or is one in another container."""
    program = tmp_path / "owner.py"
    program.write_text(_OWNER)
    process = Program(program, environment=os.environ)
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60)
        address = line.decode().strip()
        folder = Path(address.removeprefix("unix:")).parent
        (note,) = folder.glob("published-*")
        said = msgspec.json.decode(note.read_bytes())
        assert said["pid"] == process.pid
        with pytest.raises(ts.StoreClosedError, match="there is no store"):
            await ts.get("k")

        mine = {**said, "pid": os.getppid(), "started": topology.start_time(os.getppid())}
        for wrong in ({"started": said["started"]}, {"pid_namespace": 1}, {"host_id": "other"}):
            note.write_bytes(msgspec.json.encode({**mine, **wrong}))
            assert ancestors.find("torchstore") is None
        note.write_bytes(b"{")
        assert ancestors.find("torchstore") is None
        note.write_bytes(msgspec.json.encode(mine))  # all else is right
        assert ancestors.find("torchstore") == address
        assert ancestors.find("other") is None
    finally:
        await asyncio.to_thread(process.communicate, 60)  # it ends, and its store
    assert not folder.exists()
