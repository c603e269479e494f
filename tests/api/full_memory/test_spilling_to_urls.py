"""Values that move to object storage when memory is full, and come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from tests.object_storage.object_store import BUCKET, ObjectStore, object_store
from tests.reliability.harness import is_running
from tests.support import noise, running_store, until

import torchstore_core as ts
from torchstore_cli.doctor.examination import examine
from torchstore_core.machine.processes import pid_namespace, started

pytestmark = pytest.mark.local_only
MB = 1 << 20
URL = f"s3://{BUCKET}/spilled"
SPILLS: dict[str, Any] = {"capacity": 16 * MB, "spill": URL, "when_full": "spillable"}


def value(seed: int, nbytes: int = 4 * MB) -> torch.Tensor:
    """Bytes that no other seed has."""
    return noise(nbytes, seed)


@pytest.fixture
def objects() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


async def is_empty(objects: ObjectStore) -> bool:
    return not await asyncio.to_thread(objects.listed)


async def fill(count: int, **how: Any) -> None:
    for at in range(count):
        await ts.put(f"k{at}", value(at), **how)


@pytest.mark.thorough
async def test_three_times_the_memory(runtime: str, objects: ObjectStore) -> None:
    """Large values and small ones, one after the other and together; in place, and not copied."""
    sizes = [20 * MB + 64, *[4 * MB] * 5, *[700_000 + 64 * at for at in range(8)]]
    async with running_store(runtime, **{**SPILLS, "capacity": 24 * MB}):
        for at, nbytes in enumerate(sizes):
            await ts.put(f"k{at}", value(at, nbytes))
        small = {f"s{at}": value(at, 1000 + 97 * at) for at in range(500)}
        await ts.put_batch(small)
        await ts.put("last", value(99, 23 * MB))
        status = (await ts.status()).spill
        assert status.directory == URL
        assert status.file_system == "s3"
        assert status.capacity_bytes == 1 << 40
        assert status.spilled_bytes > 40 * MB
        assert URL in str(await ts.status())
        assert objects.parallel > 1
        for at, nbytes in reversed(list(enumerate(sizes))):
            assert torch.equal(await ts.get(f"k{at}"), value(at, nbytes)), at
        into = torch.empty(sizes[0], dtype=torch.uint8)
        await ts.get("k0", into)
        assert torch.equal(into, value(0, sizes[0]))
        part = ts.TensorSlice((100,), (5000,), (sizes[1],))
        assert torch.equal(await ts.get("k1", tensor_slice_spec=part), value(1)[100:5100])
        before = len(objects.requests)
        got = await ts.get_batch(list(small))
        assert all(torch.equal(got[key], tensor) for key, tensor in small.items())
        assert len(objects.requests) - before < 20  # each object is asked for once
        del got
        gc.collect()
        await ts.delete_batch(await ts.keys())
        await until(lambda: is_empty(objects))  # also of what is overwritten or deleted
        await ts.put_batch({"a": value(1, 8 * MB), "b": value(2, 8 * MB)})
        await ts.put("c", value(3, 12 * MB))
        assert objects.listed()
    assert not objects.listed()


@pytest.mark.thorough
async def test_what_was_damaged_or_removed_is_lost_alone(
    runtime: str, objects: ObjectStore
) -> None:
    async with running_store(runtime, **SPILLS):
        await fill(8)
        assert all([(await ts.stat(f"k{at}")).spilled_bytes for at in range(4)])
        places: dict[int, str] = {}
        for key in objects.listed():
            content = objects.call("GET", f"{BUCKET}/{key}")
            for at in range(4):
                if content.find(bytes(value(at)[:64].tolist())) >= 0:
                    places[at] = f"{BUCKET}/{key}"
        assert sorted(places) == [0, 1, 2, 3]
        changed = bytearray(objects.call("GET", places[0]))
        changed[3 * MB] ^= 1
        objects.call("PUT", places[0], bytes(changed))
        objects.call("DELETE", places[1])
        objects.call("PUT", places[2], bytes(100))
        for at, why in enumerate(("checksum", "is gone", "has become shorter")):
            for _ in range(2):  # it stays so
                with pytest.raises(ts.ObjectLostError, match=why) as caught:
                    await ts.get(f"k{at}")
                assert caught.value.key == f"k{at}"
                assert caught.value.details["spill"] == URL
        for at in range(3, 8):
            assert torch.equal(await ts.get(f"k{at}"), value(at))
        await ts.put("k1", value(50))
        assert torch.equal(await ts.get("k1"), value(50))


async def refused_put(start: int) -> tuple[int, ts.TorchStoreError]:
    """Put values until one is refused, soon; which one, and the error."""
    for at in range(start, 100):
        try:
            await ts.put(f"k{at}", value(at), timeout=12)
        except (ts.StoreTimeoutError, ts.StoreFullError) as error:
            return at, error
    raise AssertionError("it is never full")


@pytest.mark.thorough
async def test_storage_that_is_away_for_a_while(runtime: str, objects: ObjectStore) -> None:
    """Puts and gets say so in time, and go on when it is back; nothing is lost."""

    def away(environ: dict[str, Any]) -> None:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        raise ConnectionResetError

    async with running_store(runtime, timeout=60, **SPILLS):
        await fill(6)
        objects.before = away
        refused, error = await refused_put(6)
        assert URL in error.message
        assert "Connection" in error.message
        with pytest.raises((ts.StoreTimeoutError, ts.ObjectLostError, ts.StoreFullError)) as caught:
            await ts.get("k0", timeout=3)
        assert URL in caught.value.message
        assert "Connection" in (await ts.status()).spill.trouble
        assert any("Connection" in note for note in (await examine(await ts.address(), 10.0)).notes)
        os.kill((await ts.status()).controller_pid, signal.SIGKILL)
        assert (await ts.stat("k0")).spilled_bytes  # it comes back all the same
        objects.before = None

        async def goes_on() -> bool:
            try:
                await ts.put(f"k{refused}", value(refused))
            except ts.StoreFullError:
                return False
            return True

        await until(goes_on)
        for at in range(refused + 1):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at)), at
        assert not (await ts.status()).spill.trouble
    assert not objects.listed()


@pytest.mark.thorough
async def test_storage_that_is_busy_now_and_then(runtime: str, objects: ObjectStore) -> None:
    """Requests that fail are repeated, also those that were carried out; nobody notices."""
    seen: list[str] = []

    def every_third(environ: dict[str, Any]) -> bool:
        seen.append(environ["REQUEST_METHOD"])
        return len(seen) % 3 == 0

    objects.busy = every_third
    objects.cut = lambda environ: len(objects.requests) % 5 == 0
    async with running_store(runtime, **SPILLS):
        await fill(8)
        for at in range(8):
            assert torch.equal(await ts.get(f"k{at}", torch.empty_like(value(0))), value(at)), at
        assert not (await ts.status()).spill.trouble
    assert {"PUT", "GET"} < set(seen)
    objects.busy = objects.cut = lambda environ: False
    assert not objects.listed()


@pytest.mark.thorough
async def test_what_killed_stores_have_left_is_deleted(runtime: str, objects: ObjectStore) -> None:
    """By the next one that spills there; what belongs to others is not touched."""
    client = await ts.initialize(store_name="killed", timeout=60, **SPILLS)
    pids = (await client.status()).keeper_pid, (await client.status()).controller_pid
    for at in range(6):
        await client.put(f"k{at}", value(at))
    [left] = {key.split("/")[1] for key in objects.listed()}
    assert f".{pids[0]}." in left
    boot, namespace, owner, then, number = left.removeprefix("torchstore-spill-").split(".")
    mine = f"{os.getpid()}.{started(os.getpid())}"
    others = [
        f"torchstore-spill-{boot}.{namespace}.{mine}.{number}",  # of a store that lives
        f"torchstore-spill-{'0' * 32}.{namespace}.{owner}.{then}.{number}",  # another host
        f"torchstore-spill-{boot}.{pid_namespace() + 1}.{owner}.{then}.{number}",  # a container
        f"torchstore-spill-{boot}.{namespace}.{owner}.{then}.backup",
        "data",
    ]
    for folder in others:
        objects.call("PUT", f"{BUCKET}/spilled/{folder}/1-0-0-1000", b"x")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(map(is_running, pids)))
    await ts.shutdown("killed")
    assert any(left in key for key in objects.listed())
    async with running_store(runtime, **SPILLS):

        async def swept() -> bool:
            return not any(left in key for key in await asyncio.to_thread(objects.listed))

        await until(swept)
        await fill(6)
    assert sorted(objects.listed()) == sorted(f"spilled/{one}/1-0-0-1000" for one in others)


@pytest.mark.thorough
async def test_what_is_being_stored_when_a_store_ends_is_deleted_too(
    runtime: str, objects: ObjectStore
) -> None:
    """Storage may carry out a request whose sender is gone, and after it was told to delete all."""
    arrived, ended = threading.Event(), threading.Event()

    def slow(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "PUT" and not arrived.is_set():
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            arrived.set()
            ended.wait(2)  # nobody says when storage carries out what it has received

    async with running_store(runtime, **SPILLS):
        await fill(2)
        objects.before = slow
        filling = asyncio.create_task(fill(6))
        assert await asyncio.to_thread(arrived.wait, 60)
        filling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await filling
    ended.set()
    await until(lambda: not objects.active)
    assert arrived.is_set()
    assert not objects.listed()


@pytest.mark.thorough
async def test_where_nothing_can_be_stored(objects: ObjectStore) -> None:
    with pytest.raises(ts.ConfigurationError, match="no such bucket"):
        await ts.initialize(spill="s3://nobody/spilled")
    objects.refuse = True
    with pytest.raises(ts.ConfigurationError, match=rf"cannot spill to '{URL}'.*no") as caught:
        await ts.initialize(spill=URL)
    assert "store, read and delete" in caught.value.message
    with pytest.raises(ts.ConfigurationError, match="ocifs"):
        await ts.initialize(spill="oci://bucket@namespace/spilled")


@pytest.mark.thorough
async def test_a_password_is_seen_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_LOG_LEVEL", "DEBUG")
    async with running_store(**{**SPILLS, "spill": "memory://me:pass%20word@host/spilled"}):
        await fill(6)
        status = await ts.status()
        assert status.spill.directory == "memory://***@host/spilled"
        for pid in (status.keeper_pid, status.controller_pid):
            assert b"pass" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        said = repr((status, await examine(await ts.address(), 10.0)))
        assert "is in memory" in said
    out, err = capfd.readouterr()
    assert "***@host" in err
    assert "pass%20word" not in said + out + err
    with pytest.raises(ts.ConfigurationError, match=r"\*\*\*@host") as caught:
        await ts.initialize(spill="nowhere://me:pass%20word@host/spilled")
    assert "pass" not in str(caught.value) + repr(caught.value.details)


async def test_settings_of_the_program(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No environment variable says where the storage is: fsspec's configuration does."""
    client = {"region_name": "us-east-1"}
    known = {"key": "a", "secret": "b", "endpoint_url": objects.url, "client_kwargs": client}
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setitem(fsspec.config.conf, "s3", known)
    async with running_store(**SPILLS):
        await fill(6)
        assert objects.listed()
        assert torch.equal(await ts.get("k0"), value(0))
    assert not objects.listed()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"session": object()})
    with pytest.raises(ts.ConfigurationError, match=r"conf\['s3'\]"):
        await ts.initialize(spill=URL)
