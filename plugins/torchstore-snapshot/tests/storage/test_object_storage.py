"""Snapshots in an object store: a real server on loopback, which counts bytes and fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.object_storage import object_store as _server
from tests.processes import run_script
from tests.support import SMALL

import torchstore_core as ts
from torchstore_cli import main
from torchstore_snapshot import (
    BucketNotFoundError,
    Series,
    Snapshot,
    SnapshotAccessError,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    SnapshotUnavailableError,
    SnapshotWriterError,
    StateDict,
    gc,
    load_into_store,
    snapshot_store,
)
from torchstore_snapshot.background import process
from torchstore_snapshot.dcp import SnapshotStorageReader, SnapshotStorageWriter
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.restoring import fetching, reading
from torchstore_snapshot.restoring.restore import Verify
from torchstore_snapshot.storage import remote
from torchstore_snapshot.storage.opening import open_storage

URL = f"s3://{_server.BUCKET}/run/step-1"


@pytest.fixture
def store() -> Iterator[Any]:
    with _server.object_store() as server:
        yield server


def state(fill: float, count: int = 6, numel: int = 3000) -> StateDict:
    values = {f"w{i}": torch.full((numel,), fill + i) for i in range(count)}
    return StateDict(values | {"t": torch.full((40, 30), fill).t(), "n": int(fill)})


def same(own: StateDict, expected: StateDict) -> bool:
    return own.keys() == expected.keys() and all(
        torch.equal(own[k], v) if isinstance(v, torch.Tensor) else own[k] == v
        for k, v in expected.items()
    )


@pytest.mark.parametrize("url", [URL, "memory://run/step-1"])
def test_round_trip(store: Any, url: str) -> None:
    Snapshot.take(url, {"m": state(1)}, file_max=20_000, overwrite=True)
    own = state(9)
    Snapshot(url).restore({"m": own})
    assert same(own, state(1))
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, {"m": state(2)})
    Snapshot.take(url, {"m": state(3)}, overwrite=True)
    assert same(StateDict(Snapshot(url).get_state_dict_for_key("m")), state(3))
    assert len(open_storage(url).list()) == 3  # data, manifest, map of weights
    assert not Snapshot(url).verify()


def test_large_files_are_uploaded_in_parallel_parts(store: Any) -> None:
    own = state(1.0, count=4, numel=3 << 20)  # 50 MB
    store.before = store.meet
    Snapshot.take(URL, {"m": own})
    parts = [r for r in store.requests if "partNumber" in r]
    assert len(parts) == 4
    assert store.parallel >= 2
    assert open_storage(URL).unfinished() == []  # type: ignore[attr-defined]
    store.reset()
    Snapshot.take(URL, {"m": state(2)}, overwrite=True)
    assert not [r for r in store.requests if "partNumber" in r]


def hurried_writer(folder: Path) -> process.WriterProcess:
    """The process that writes, with the priority of this one: where others keep all processors
    busy, importing what talks to object stores would take it minutes.
    """
    Snapshot.async_take(folder, {"m": StateDict(n=1)}, fsync=False).wait(300)
    writer = process.the_writer()
    for thread in os.listdir(f"/proc/{writer.pid}/task"):
        with contextlib.suppress(PermissionError, ProcessLookupError):  # or it has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
    return writer


def test_in_the_background(store: Any, tmp_path: Path) -> None:
    hurried_writer(tmp_path / "local")
    pending = Snapshot.async_take(URL, {"m": state(4)})
    assert same(StateDict(pending.wait(300).get_state_dict_for_key("m")), state(4))
    assert len(open_storage(URL).list()) == 3
    with pytest.raises(ts.ConfigurationError, match="another process"):
        Snapshot.async_take("memory://x/y", {"m": state(4)})


@pytest.fixture(params=["options"])
def unknown_server(
    request: pytest.FixtureRequest, store: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """No environment variable says where the server is: fsspec's configuration does, or options
    that are returned.
    """
    client = {"region_name": "us-east-1"}
    known = {"key": "a", "secret": "b", "endpoint_url": store.url, "client_kwargs": client}
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if request.param == "options":
        return {"storage_options": known}
    monkeypatch.setitem(fsspec.config.conf, "s3", known)
    return {}


@pytest.mark.parametrize(
    "unknown_server",
    ["options", pytest.param("configuration", marks=pytest.mark.soak)],
    indirect=True,
)
def test_settings_of_the_program(unknown_server: dict[str, Any], tmp_path: Path) -> None:
    """They also reach the process that writes."""
    hurried_writer(tmp_path / "local")
    Snapshot.take(URL, {"m": state(1)}, **unknown_server)
    pending = Snapshot.async_take(f"{URL}-b", {"m": state(2)}, base=URL, **unknown_server)
    assert same(StateDict(pending.wait(300).get_state_dict_for_key("m")), state(2))
    own = state(9)
    Snapshot(URL, **unknown_server).restore({"m": own})
    assert same(own, state(1))
    series = Series(URL.rpartition("/")[0], keep_last=2, **unknown_server)
    series.async_take("step-2", {"m": state(3)}).wait(300)
    assert series.names() == ["step-1-b", "step-2"]
    assert series.latest().read_object("m/n") == 3
    report = gc(URL.rpartition("/")[0], keep_last=1, dry_run=True, **unknown_server)
    assert (report.dropped, report.kept) == (("step-1-b",), ("step-2",))


async def test_settings_of_the_program_for_stores(unknown_server: dict[str, Any]) -> None:
    client = await ts.initialize(**SMALL)
    try:
        await client.put("w", torch.arange(5))
        await client.put_state_dict({"a": torch.ones(3)}, "sd")
        snapshot = await snapshot_store(URL, **unknown_server)
        assert snapshot.read_object("w/value").tolist() == [*range(5)]
        await client.delete_batch(["w", "sd"])
        refs = await load_into_store(URL, keep_versions=False, **unknown_server)
        assert sorted(refs) == ["sd", "w"]
        assert (await client.get("w")).tolist() == [*range(5)]
    finally:
        await ts.shutdown()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_settings_of_the_program_for_checkpoints(unknown_server: dict[str, Any]) -> None:
    writer = SnapshotStorageWriter(URL, fsync=False, **unknown_server)
    dcp.save({"m": {"w": torch.arange(5)}, "n": 3}, storage_writer=writer)
    own: dict[str, Any] = {"m": {"w": torch.zeros(5, dtype=torch.int64)}, "n": 0}
    reader = SnapshotStorageReader(**unknown_server)
    dcp.load(own, checkpoint_id=URL, storage_reader=reader)
    assert own["m"]["w"].tolist() == [*range(5)]
    assert own["n"] == 3
    with pytest.raises(ts.ConfigurationError, match="dict"):
        SnapshotStorageReader(URL, storage_options="key=a")  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="dict"):
        SnapshotStorageWriter(URL, storage_options={1: "a"})  # type: ignore[dict-item]


def test_settings_of_the_command_line(
    unknown_server: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Snapshot.take(URL, {"m": StateDict(w=torch.arange(6))}, **unknown_server)
    # A shard that is the whole tensor: to compare it, both have to be read.
    shard = ts.TensorShard(torch.arange(6), ts.TensorSlice((0,), (6,), (6,)))
    Snapshot.take(tmp_path / "a", {"m": StateDict(w=shard)}, fsync=False)
    given = unknown_server["storage_options"]
    texts = (v if isinstance(v, str) else json.dumps(v) for v in given.values())
    options = [f"--storage-option={name}={text}" for name, text in zip(given, texts, strict=True)]

    def call(*arguments: object) -> int:
        status = main(["snapshot", *map(str, arguments), *options])
        capsys.readouterr()
        return status

    assert call("ls", URL) == call("show", URL, "m/w") == call("verify", URL) == 0
    assert call("convert", URL, tmp_path / "tensors", "--to", "safetensors") == 0
    assert call("convert", tmp_path / "tensors", f"{URL}-b") == 0
    assert call("diff", URL, f"{URL}-b") == 1  # there, the key has another name
    assert call("diff", URL, tmp_path / "a") == 0
    folder = URL.rpartition("/")[0]
    assert call("ls", folder) == 0
    assert call("ls", folder, "none") == 1
    assert call("gc", folder, "--keep-last", 1) == 0
    assert call("ls", URL) == 1
    assert main(["snapshot", "ls", str(tmp_path / "a"), *options]) == 1
    assert "storage_options" in capsys.readouterr().err
    assert main(["snapshot", "ls", URL, "--storage-option", "key"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_settings_that_no_other_process_can_have(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"storage_options\['x'\]\['session'\]"):
        Snapshot.async_take(URL, {"m": state(1)}, storage_options={"x": {"session": object()}})
    monkeypatch.setitem(fsspec.config.conf, "s3", {"session": object()})
    with pytest.raises(ts.ConfigurationError, match=r"conf\['s3'\]\['session'\]"):
        Snapshot.async_take(URL, {"m": state(1)})
    assert store.requests == []
    with pytest.raises(ts.ConfigurationError, match="folder"):
        Snapshot("folder", storage_options={"key": "a"})
    with pytest.raises(ts.ConfigurationError, match="dict"):
        Snapshot(URL, storage_options=[("key", "a")])  # type: ignore[arg-type]


def test_a_take_leaves_no_claim_that_its_writer_could_not_remove(
    store: Any, tmp_path: Path
) -> None:
    process.the_writer().close()  # one that has no connection to the server
    writer = hurried_writer(tmp_path / "local")
    resource.prlimit(writer.pid, resource.RLIMIT_NOFILE, (3, 3))  # nor gets one
    try:
        with pytest.raises((ts.TorchStoreError, OSError)) as raised:
            Snapshot.async_take(URL, {"m": state(1)}).wait(300)
        assert not isinstance(raised.value, SnapshotWriterError)
        assert writer.alive
    finally:
        writer.close()
    assert any("/.claim-" in request for request in store.requests)
    assert open_storage(URL).list() == []


def test_a_tensor_of_a_thousand(store: Any) -> None:
    many = StateDict({f"w{i}": torch.full((1000,), float(i)) for i in range(1000)})
    Snapshot.take(URL, {"m": many})
    manifest = len(open_storage(URL).read(MANIFEST))
    store.reset()
    assert Snapshot(URL).read_object("m/w500").tolist() == [500.0] * 1000
    assert store.sent <= 4000 + (64 << 10) + manifest
    assert len(store.requests) <= 5
    store.reset()
    piece = ts.TensorSlice((10,), (5,), (1000,))
    assert Snapshot(URL).read_object("m/w7", tensor_slice=piece).tolist() == [7.0] * 5
    assert store.sent <= 20 + (64 << 10) + manifest


def test_a_part_of_a_tensor_takes_its_own_bytes(store: Any) -> None:
    """To restore it, too; of what lies close together, one request takes also what is between."""
    whole = torch.randn(4096, 1024)
    Snapshot.take(URL, {"m": StateDict(w=whole)})
    manifest = len(open_storage(URL).read(MANIFEST))
    rows = ts.TensorSlice((1000, 0), (1024, 1024), (4096, 1024))
    mine = ts.TensorShard(torch.zeros(1024, 1024), rows)
    for verify in ("streaming", False):
        mine.tensor.zero_()
        store.reset()
        Snapshot(URL).restore({"m": StateDict(w=mine)}, verify=verify)
        assert torch.equal(mine.tensor, whole[1000:2024])
        assert store.sent <= mine.tensor.nbytes + (64 << 10) + manifest
    columns = ts.TensorSlice((0, 512), (4096, 512), (4096, 1024))
    store.reset()
    assert torch.equal(Snapshot(URL).read_object("m/w", tensor_slice=columns), whole[:, 512:])
    assert store.sent <= whole.nbytes + (64 << 10) + manifest
    assert len(store.requests) <= 6


def test_what_lies_between_rows_that_are_far_apart_is_not_read(store: Any) -> None:
    """To read it would take longer than to ask for each row."""
    whole = (torch.arange(6 << 20) % 1009).short().view(6, 1 << 20)
    Snapshot.take(URL, {"m": StateDict(w=whole)})
    manifest = len(open_storage(URL).read(MANIFEST))
    box = ts.TensorSlice((0, 5000), (6, 2048), (6, 1 << 20))
    modes: list[Verify] = [True, "streaming", False]
    for verify in modes:
        mine = ts.TensorShard(torch.zeros(6, 2048, dtype=torch.int16), box)
        store.reset()
        Snapshot(URL).restore({"m": StateDict(w=mine)}, verify=verify)
        assert torch.equal(mine.tensor, whole[:, 5000:7048])
        assert store.sent <= mine.tensor.nbytes + (64 << 10) + manifest
        assert len(store.ranges) == 6
    for budget in (None, 1 << 20):
        store.reset()
        found = Snapshot(URL).read_object("m/w", tensor_slice=box, memory_budget_bytes=budget)
        assert torch.equal(found, mine.tensor)
        assert store.sent <= mine.tensor.nbytes + (64 << 10) + manifest
        assert len(store.ranges) == 6


def test_reads_are_coalesced_and_not_repeated(store: Any) -> None:
    many = {f"w{i}": torch.full((1000,), float(i)) for i in range(500)}
    Snapshot.take(URL, {"m": StateDict(many, big=torch.ones(5 << 20))})
    total = sum(info.nbytes for info in open_storage(URL).list())
    store.reset()
    own = StateDict({name: torch.zeros(1000) for name in many}, big=torch.zeros(5 << 20))
    store.before = store.meet
    Snapshot(URL).restore({"m": own})
    assert all(torch.equal(own[name], many[name]) for name in many)
    assert bool((own["big"] == 1).all())
    assert store.sent <= total
    assert len(store.ranges) <= 5  # 22 MB, in requests of 8 MB
    assert store.parallel >= 2
    store.reset()
    assert not Snapshot(URL).verify()
    assert store.sent <= total


def test_what_does_not_fit_into_memory_is_checked_first(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot.take(URL, {"m": state(1)})
    monkeypatch.setattr(reading, "hold_max", lambda: 20_000)
    monkeypatch.setattr(fetching, "_REQUEST_MAX", 5000)
    own = state(9)
    Snapshot(URL).restore({"m": own})
    assert same(own, state(1))
    _damage()
    own = state(9)
    with pytest.raises(SnapshotCorruptError):
        Snapshot(URL).restore({"m": own})
    assert same(own, state(9))


def _damage() -> None:
    storage = open_storage(URL)
    name = next(i.name for i in storage.list() if i.name.endswith(".safetensors"))
    data = bytearray(storage.read(name))
    data[-5] ^= 1
    storage.publish(name, bytes(data), take="", overwrite=True, durable=False)


def test_damage(store: Any) -> None:
    Snapshot.take(URL, {"m": state(1)})
    _damage()
    own = state(9)
    with pytest.raises(SnapshotCorruptError):
        Snapshot(URL).restore({"m": own})
    assert same(own, state(9))
    assert len(Snapshot(URL).verify()) == 1
    storage = open_storage(URL)
    storage.delete(next(i.name for i in storage.list() if i.name.endswith(".safetensors")))
    with pytest.raises(SnapshotCorruptError):
        Snapshot(URL).restore({"m": own})


@pytest.mark.parametrize("url", [URL, "memory://race/step-1"])
def test_one_of_many_publishes(store: Any, url: str) -> None:
    storage = open_storage(url)
    won: list[int] = []
    start = threading.Barrier(6)

    def publish(number: int) -> None:
        start.wait()
        try:
            storage.publish(MANIFEST, b"%d" % number, take="", overwrite=False, durable=True)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read(MANIFEST) == b"%d" % won[0]
    # As when the reply to the first request was lost, and the library has repeated it.
    storage.publish(MANIFEST, b"%d" % won[0], take="", overwrite=False, durable=True)
    storage.delete(MANIFEST)


def test_no_bucket(store: Any) -> None:
    missing = "s3://no-such-bucket/run/1"
    for overwrite in (False, True):
        with pytest.raises(BucketNotFoundError):
            Snapshot.take(missing, {"m": state(1)}, overwrite=overwrite)
    with pytest.raises(BucketNotFoundError):
        Snapshot(missing).restore({"m": state(1)})
    assert not [r for r in store.requests if r == "PUT /no-such-bucket?"]
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(f"s3://{_server.BUCKET}/nothing").restore({"m": state(1)})


def test_no_credentials(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a cloud's metadata service is asked, and refuses at once."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SnapshotAccessError):
        Snapshot.take(URL, {"m": state(1)})


def test_refused_credentials(store: Any) -> None:
    Snapshot.take(URL, {"m": state(1)})
    store.refuse = True
    with pytest.raises(SnapshotAccessError):
        Snapshot(URL).restore({"m": state(1)})
    with pytest.raises(SnapshotAccessError):
        Snapshot.take(URL, {"m": state(1)}, overwrite=True)


def test_a_document_is_read_by_one_request(store: Any) -> None:
    Snapshot.take(URL, {"m": state(1)})
    store.reset()
    assert Snapshot(URL).manifest.world_size == 1
    (request,) = store.requests
    assert request.startswith("GET ")
    assert request.split("?")[0].endswith("/snapshot.json")


def test_a_store_that_asks_to_slow_down(store: Any) -> None:
    """It refuses each fifth request, of whatever kind."""
    numbers = itertools.count()
    refused: list[str] = []

    def busy(environ: dict[str, Any]) -> bool:
        if next(numbers) % 5 == 4:
            refused.append(environ["REQUEST_METHOD"])
            return True
        return False

    store.busy = busy
    Snapshot.take(URL, {"m": state(1)})
    Snapshot.take(URL, {"m": state(2)}, overwrite=True)
    own = state(0)
    Snapshot(URL).restore({"m": own})
    assert same(own, state(2))
    assert {"GET", "PUT"} <= {*refused}
    store.reset()
    assert gc(URL, grace=0).files == ()


def test_a_store_that_is_too_busy_to_say_a_size_is_asked_again(store: Any) -> None:
    """The reply to a HEAD has no text, so that the library gives it up after three attempts."""
    Snapshot.take(URL, {"m": state(1)})
    left = [3]

    def busy(environ: dict[str, Any]) -> bool:
        left[0] -= environ["REQUEST_METHOD"] == "HEAD"
        return environ["REQUEST_METHOD"] == "HEAD" and left[0] >= 0

    store.busy = busy
    own = state(9)
    Snapshot(URL).restore({"m": own})
    assert same(own, state(1))
    assert left[0] < 0


def test_a_connection_that_breaks_is_tried_again(store: Any) -> None:
    Snapshot.take(URL, {"m": state(1)})
    broken = []

    def first_only(environ: dict[str, Any]) -> None:
        if environ["PATH_INFO"] not in broken:
            broken.append(environ["PATH_INFO"])
            raise ConnectionResetError

    store.before = first_only
    own = state(9)
    Snapshot(URL).restore({"m": own})
    assert same(own, state(1))
    assert len(broken) == 2
    broken.clear()
    Snapshot.take(URL, {"m": state(2)}, overwrite=True)
    assert not Snapshot(URL).verify()


def test_a_server_that_goes_away_in_the_middle(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(remote._S3_CONFIG, "retries", {"max_attempts": 1})
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    Snapshot.take(URL, {"m": state(1)})

    def gone(environ: dict[str, Any]) -> None:
        if "safetensors" in environ["PATH_INFO"]:
            raise ConnectionResetError

    store.before = gone
    own = state(9)
    with pytest.raises(SnapshotUnavailableError):
        Snapshot(URL).restore({"m": own})
    assert same(own, state(9))
    with pytest.raises(SnapshotUnavailableError):
        Snapshot.take(URL, {"m": state(2)}, overwrite=True)
    store.before = None
    Snapshot(URL).restore({"m": own})
    assert same(own, state(1))
    assert len(open_storage(URL).list()) == 3


def test_urls_that_cannot_be_used() -> None:
    for url in ("nonsense://x/y", "gs://bucket/x"):
        with pytest.raises(ts.ConfigurationError):
            Snapshot(url)


async def test_importing_needs_no_library_of_a_store() -> None:
    await run_script(
        """
        import torchstore_snapshot.storage.remote
        from torchstore_snapshot import Snapshot
        assert not {"s3fs", "botocore", "aiohttp"} & sys.modules.keys()
        """,
        fresh=True,
    )
