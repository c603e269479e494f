"""A server says where its event loop stands still."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.support import until
from tests.unit.plugins.test_plugins import TRANSPORTS, Site

from torchstore_core.server import stalled_loop
from torchstore_core.server.stalled_loop import LoopWatch

WATCH = "torchstore-loop-watch"

# A server whose watch looks often.
SERVER = """
import sys
from torchstore_core.server import stalled_loop
stalled_loop.EVERY_S = 0.05
from torchstore_core.server import __main__
sys.exit(__main__.main())
"""
BLOCKING_HALF = """
import time
from torchstore_core.contracts.transport import Refusal, TransportServer, TransportSpec

class Half(TransportServer):
    async def start(self, context, segments):
        while True:
            time.sleep(0.01)

    async def close(self):
        pass

@hookimpl
def torchstore_transport():
    bid = lambda context: Refusal("no")
    return TransportSpec({name!r}, bid, "no.such:Link", f"{__name__}:Half")
"""


def wait_without_turning(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Block the event loop until the log has a text."""
    deadline = time.monotonic() + 60
    while text not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_where_a_loop_stands_is_said_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalled_loop, "EVERY_S", 0.02)
    watch = LoopWatch()
    wait_without_turning(caplog, "stood still")
    said = [r.getMessage() for r in caplog.records if r.name == stalled_loop.__name__]
    assert len(said) == 1
    assert "goes_on of the plug-in tests.unit.server.test_stalled_loop has not returned" in said[0]
    assert f"it is at {os.path.basename(__file__)}:" in said[0]
    await until(lambda: "the event loop goes on" in caplog.text)
    watch.close()


class Counted(LoopWatch):
    turns = 0

    def _turn(self) -> None:
        self.turns += 1
        super()._turn()


async def test_a_loop_that_turns_is_not_said_to_stand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stalled_loop, "EVERY_S", 0.02)
    watch = Counted()
    await until(lambda: watch.turns > 3 * stalled_loop._QUESTIONS)
    watch.close()
    assert "stood still" not in caplog.text


async def test_a_closed_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalled_loop, "EVERY_S", 0.02)
    watch = LoopWatch()
    assert any(thread.name == WATCH for thread in threading.enumerate())
    watch.close()
    await until(lambda: all(thread.name != WATCH for thread in threading.enumerate()))


def test_a_server_says_which_plug_in_holds_up_its_start(tmp_path: Path) -> None:
    """It said nothing, and its owner only that it had not come up."""
    Site(tmp_path).install("blocking", TRANSPORTS, stands=BLOCKING_HALF)
    options = {"store_name": "s", "capacity": 1 << 20, "prefault": 0}
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", SERVER, msgspec.json.encode(options).decode()]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as server:
        late = threading.Timer(60, server.kill)
        late.start()
        try:
            said = next(line for line in server.stderr or () if "stood still" in line)
        finally:
            late.cancel()
            server.kill()
    assert "Half.start of the plug-in site_blocking_stands has not returned" in said
    assert "site_blocking_stands.py:" in said
