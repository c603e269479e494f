"""What a process has received is not on its way any more, also if it is killed at that moment: its
sender lives, so nothing else would ever end the hold of a reference in flight.
"""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing.connection import Connection

import pytest
from tests.reliability.harness import Child
from tests.support import halt, running_store, until

import torchstore_core as ts
from torchstore_core import blocking

GRACE_S = 0.3


def receiver(pipe: Connection, address: str, joins: bool) -> None:
    """Decodes references, and is dead before any other of its threads has sent anything."""
    if joins:
        blocking.connect(address)
    pipe.send("ready")
    for encoded in pipe.recv():
        pickle.loads(encoded)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stopped", [False, True], ids=["", "before the server has read it"])
@pytest.mark.parametrize("joins", [True, False], ids=["joined", "not joined"])
async def test_what_was_received_by_a_process_that_died_is_not_in_flight(
    monkeypatch: pytest.MonkeyPatch, joins: bool, stopped: bool
) -> None:
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", str(GRACE_S))
    # With a keeper, a receiver that has not joined waits until the server has its connection.
    async with running_store(keeper=joins or not stopped) as client:
        pid = (await client.status()).controller_pid
        ref = await client.put_object("value")
        with Child(receiver, client.address, joins) as child:
            assert await child.said() == "ready"
            encoded = [pickle.dumps(ref) for _ in range(50)]
            if stopped:
                await halt(pid)
            child.tell(encoded)
            with pytest.raises(AssertionError, match="ended without a word"):
                await child.said()
            if stopped:
                os.kill(pid, signal.SIGCONT)

        async def nothing_is_in_flight() -> bool:
            (report,) = await client.refs()
            return [one.pid for one in report.holders] == [os.getpid()]

        await until(nothing_is_in_flight, GRACE_S + 10)
        assert await ts.get(ref) == "value"
