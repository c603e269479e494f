"""An object store that answers late, or a byte at a time, for longer than anybody would wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.object_storage import object_store as _server
from tests.support import until

from torchstore_snapshot import Snapshot, SnapshotUnavailableError, StateDict, gc
from torchstore_snapshot.storage import asking, multipart
from torchstore_snapshot.storage.opening import open_storage

FOLDER = f"s3://{_server.BUCKET}/run"
URL = f"{FOLDER}/step-1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with _server.object_store() as server:
        Snapshot.take(URL, state(1))
        monkeypatch.setattr(asking, "_SLOWEST", 1 << 30)
        server.reset()
        yield server


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.full((5000,), fill))}


def restore() -> None:
    own = state(9)
    try:
        Snapshot(URL).restore(own)
    finally:
        assert float(own["m"]["w"][0]) == 9


def asked() -> int:
    """How many requests of this process are under way."""
    loop = open_storage(URL)._fs.loop  # type: ignore[attr-defined]

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), loop).result(30)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (restore, ".safetensors"),
        (restore, "/snapshot.json"),
        (lambda: Snapshot(URL).read_object("m/w"), ".safetensors"),
        (lambda: Snapshot(URL).verify(), ".safetensors"),
        (lambda: gc(FOLDER), "/bucket/"),
    ],
    ids=["restore", "manifest", "read_object", "verify", "gc"],
)
async def test_a_reply_that_trickles(
    store: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], name: str
) -> None:
    monkeypatch.setattr(asking, "_PATIENCE_S", 1.0)
    before = asked()
    store.trickle = lambda environ: (
        environ["REQUEST_METHOD"] == "GET"
        and environ["PATH_INFO"].rstrip("/").endswith(name.rstrip("/"))
    )
    with pytest.raises(SnapshotUnavailableError, match="within 1 s, or too slowly"):
        call()
    await until(lambda: asked() == before, 30)
    store.reset()
    monkeypatch.undo()
    assert float(Snapshot(URL).read_object("m/w")[0]) == 1


@pytest.mark.parametrize("parts", [False, True])
async def test_an_upload_that_is_never_answered(
    store: Any, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    if parts:
        monkeypatch.setattr(multipart, "PART", 5 << 20)
    go = threading.Event()

    def wait(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(".safetensors"):
            go.wait(300)

    store.before = wait
    before = asked()
    monkeypatch.setattr(asking, "_PATIENCE_S", 4.0)
    own = {"m": StateDict(w=torch.ones(3 << 20))} if parts else state(2)
    with pytest.raises(SnapshotUnavailableError, match="did not answer a request within 4 s"):
        Snapshot.take(URL, own, overwrite=True)
    await until(lambda: asked() == before, 30)
    go.set()
    store.reset()
    monkeypatch.undo()
    assert float(Snapshot(URL).read_object("m/w")[0]) == 1
    gc(FOLDER, grace=0)
    assert len(open_storage(URL).list()) == 3
    assert open_storage(URL).unfinished() == []  # type: ignore[attr-defined]
