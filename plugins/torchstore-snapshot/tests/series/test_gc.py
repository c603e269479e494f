"""Garbage collection: what died goes, and what is running or referred to stays."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.object_storage import object_store as _server
from tests.processes import Script, run_script
from tests.support import until

import torchstore_core as ts
from torchstore_snapshot import Snapshot, StateDict, TakeLostError, gc
from torchstore_snapshot.format.paths import MANIFEST, claim_file, new_take_id, take_of
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.series import claims
from torchstore_snapshot.series.claims import Claim
from torchstore_snapshot.series.retiring import mend_maps
from torchstore_snapshot.series.survey import folder_name
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.taking.take import TakeOptions, commit, discard, prepare, write


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(**{f"w{i}": torch.full((3000,), fill + i) for i in range(4)})}


def names(path: Path | str) -> list[str]:
    return sorted(info.name for info in open_storage(path).list())


@pytest.fixture(params=["files", pytest.param("objects", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "files":
        yield str(tmp_path)
        return
    with _server.object_store():
        yield f"s3://{_server.BUCKET}/series"


@pytest.mark.parametrize("place", ["files", "objects"], indirect=True)
def test_a_running_take_is_left_alone(place: str) -> None:
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    running = prepare(f"{place}/1", state(1), Ranks.alone(), None, TakeOptions(fsync=False))
    part = write(running)
    report = gc(place, grace=0)
    assert report.running == (running.take,)
    assert report.files == ()
    commit(running.storage, running.take, [part], running.options, claim=running.claim)
    assert not Snapshot(f"{place}/1").verify()
    assert gc(place, grace=0).running == ()


def test_the_base_of_a_running_take_is_left_alone(place: str) -> None:
    """At both moments: while it reads the base's manifest, and while it writes."""
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    Snapshot.take(f"{place}/1", state(9), fsync=False)
    take = new_take_id()
    storage = open_storage(f"{place}/2")
    storage.prepare(durable=False)
    reading = Claim(storage, take, reading=True)
    assert gc(place, keep_last=1, grace=0, dry_run=True).files == ()
    reading.release()
    options = TakeOptions(base=f"{place}/0", fsync=False)
    running = prepare(f"{place}/2", state(0), Ranks.alone(), None, options)
    part = write(running)
    assert running.files == []
    report = gc(place, keep_last=1, grace=0)
    assert report.dropped == ("0",)
    assert report.files == ()
    Snapshot.take(f"{place}/1", state(5), overwrite=True, fsync=False)
    commit(running.storage, running.take, [part], running.options, claim=running.claim)
    assert gc(place, grace=0).files == ()
    assert not Snapshot(f"{place}/2").verify()
    assert Snapshot(f"{place}/2").read_object("m/w3").tolist() == [3.0] * 3000


def test_a_base_that_is_replaced_while_a_take_refers_to_it(place: str) -> None:
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    options = TakeOptions(base=f"{place}/0", fsync=False)
    running = prepare(f"{place}/1", state(0), Ranks.alone(), None, options)
    Snapshot.take(f"{place}/0", state(50), overwrite=True, fsync=False)
    commit(running.storage, running.take, [write(running)], options, claim=running.claim)
    assert not Snapshot(f"{place}/1").verify()
    Snapshot.take(f"{place}/1", state(60), overwrite=True, fsync=False)
    assert gc(place, grace=0).files == ()  # what only the replaced snapshots had went with them
    kept = {file.name for file in Snapshot(f"{place}/0").manifest.files}
    assert {name for name in names(f"{place}/0") if name.endswith(".safetensors")} == kept


def test_the_last_snapshot_that_referred_to_files_is_replaced(place: str) -> None:
    """Those of a snapshot that was replaced earlier; but only if nobody can refer to them."""
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    Snapshot.take(f"{place}/1", state(0), base=f"{place}/0", fsync=False)
    Snapshot.take(f"{place}/2", state(0), base=f"{place}/0", fsync=False)
    Snapshot.take(f"{place}/0", state(50), overwrite=True, fsync=False)
    (old,) = {file.name for file in Snapshot(f"{place}/1").manifest.files if file.snapshot == "0"}
    Snapshot.take(f"{place}/1", state(60), overwrite=True, fsync=False)
    assert old in names(f"{place}/0")
    storage = open_storage(f"{place}/2")
    data = storage.read(MANIFEST)
    Snapshot.take(f"{place}/3", state(0), base=f"{place}/2", fsync=False)
    storage.publish(MANIFEST, data[:-20], take="", overwrite=True, durable=False)
    # The damaged one may refer to it.
    Snapshot.take(f"{place}/3", state(60), overwrite=True, fsync=False)
    assert old in names(f"{place}/0")
    storage.publish(MANIFEST, data, take="", overwrite=True, durable=False)
    Snapshot.take(f"{place}/2", state(60), overwrite=True, fsync=False)
    assert old not in names(f"{place}/0")
    for name in "0123":
        assert not Snapshot(f"{place}/{name}").verify()
    assert gc(place, grace=0).files == ()


def test_a_take_that_fails_leaves_no_claim(place: str) -> None:
    running = prepare(f"{place}/0", state(0), Ranks.alone(), None, TakeOptions(fsync=False))
    write(running)
    discard(running)
    assert names(f"{place}/0") == []


def _pretend(path: str, take: str, **fields: object) -> None:
    """Change a claim, as if it were that of another process or host."""
    storage = open_storage(path)
    record = claims.decode(storage.read(claim_file(take)))
    assert record is not None
    data = msgspec.json.encode(msgspec.structs.replace(record, **fields))
    storage.publish(claim_file(take), data, take=take, overwrite=True, durable=False)


def test_a_take_on_another_host(place: str) -> None:
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    slow = prepare(f"{place}/1", state(1), Ranks.alone(), None, TakeOptions(fsync=False))
    part = write(slow)
    _pretend(f"{place}/1", slow.take, host="elsewhere")
    assert gc(place, grace=60).running == (slow.take,)
    report = gc(place, grace=0)
    assert report.dead == (slow.take,)
    assert len(report.files) == 2
    with pytest.raises(TakeLostError):
        commit(slow.storage, slow.take, [part], slow.options, claim=slow.claim)
    assert names(f"{place}/1") == []


async def test_a_claim_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_RENEWED_S", 0.01)
    storage = open_storage(tmp_path / "0")
    storage.prepare(durable=False)
    take = new_take_id()
    claim = Claim(storage, take)
    path = tmp_path / "0" / claim_file(take)
    os.utime(path, (1, 1))
    await until(lambda: path.stat().st_mtime > 2, 30)
    claim.release()
    assert not path.exists()


def test_files_without_a_claim_wait_for_the_grace(place: str) -> None:
    """As those of programs that do not publish claims."""
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    storage = open_storage(f"{place}/0")
    storage.publish(
        f"m-{new_take_id()}-0-0.safetensors", b"1234", take="", overwrite=True, durable=False
    )
    storage.publish("config.json", b"{}", take="", overwrite=True, durable=False)
    assert gc(place).files == ()
    report = gc(f"{place}/0", grace=0)  # of a snapshot alone
    assert (len(report.files), report.nbytes) == (1, 4)
    assert "config.json" in names(f"{place}/0")
    with pytest.raises(ts.ConfigurationError):
        gc(f"{place}/0", keep_last=1)
    with pytest.raises(ts.ConfigurationError):
        gc(place, keep_last=0)


def test_a_manifest_that_cannot_be_read_stops_it(place: str) -> None:
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    Snapshot.take(f"{place}/1", state(0), base=f"{place}/0", fsync=False)
    storage = open_storage(f"{place}/1")
    data = storage.read(MANIFEST)
    storage.publish(MANIFEST, data[:-20], take="", overwrite=True, durable=False)
    report = gc(place, keep_last=1, grace=0)
    assert [*report.unreadable] == ["1"]
    assert (report.files, report.dropped) == ((), ())
    Snapshot.take(f"{place}/0", state(7), overwrite=True, fsync=False)
    storage.publish(MANIFEST, data, take="", overwrite=True, durable=False)
    assert not Snapshot(f"{place}/1").verify()


_DIES = """
import os, signal
from torchstore_snapshot import StateDict
from torchstore_snapshot.ranks import Ranks
from torchstore_snapshot.taking.take import TakeOptions, prepare, write
from torchstore_snapshot.storage.opening import open_storage
state = {{"m": StateDict(w=torch.full((3000,), 1.0))}}
prepared = prepare({path!r}, state, Ranks.alone(), None, TakeOptions())
write(prepared)
if {upload}:
    name = f"m-{{prepared.take}}-0-7.safetensors"
    writer = open_storage({path!r}).create(name, 40 << 20)
    writer.write(0, bytes(17 << 20))
print("ready", flush=True)
await asyncio.sleep(60)
"""


@pytest.mark.parametrize("place", ["files", "objects"], indirect=True)
async def test_a_take_that_is_killed(place: str) -> None:
    Snapshot.take(f"{place}/0", state(0), fsync=False)
    remote = place.startswith("s3")
    with Script(_DIES.format(path=f"{place}/1", upload=remote)) as script:

        def ready() -> bool:
            script._out.seek(0)
            return "ready" in script._out.read()

        await until(ready, 60)
        report = await asyncio.to_thread(gc, place)
        assert (len(report.running), report.files) == (1, ())
    before = await asyncio.to_thread(gc, place, dry_run=True)
    report = await asyncio.to_thread(gc, place)
    assert report.files == before.files
    assert len(report.dead) == 1
    assert {take_of(file.name) for file in report.files} == set(report.dead)
    assert names(f"{place}/1") == []
    if remote:  # an upload that was never completed
        assert [file.name[-13:] for file in report.files if not file.nbytes] == ["7.safetensors"]
        assert open_storage(f"{place}/1").unfinished() == []  # type: ignore[attr-defined]
    assert not Snapshot(f"{place}/0").verify()


@pytest.fixture
def of_all() -> Iterator[Path]:
    """A folder that every user may write to, like all those above it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_a_folder_that_may_not_be_looked_into_stops_it(of_all: Path) -> None:
    """It may hold a snapshot that refers to others. Root may look everywhere, so not as root."""
    Snapshot.take(of_all / "0", state(0), fsync=False)
    (of_all / "private").mkdir(mode=0)
    body = f"""
    import os
    from torchstore_snapshot import gc
    os.setresuid(65534, 65534, 65534)
    report = gc({str(of_all)!r}, keep_last=1, grace=0)
    print([*report.unreadable], report.files)
    """
    if os.getuid():
        report = gc(of_all, grace=0)
        assert ([*report.unreadable], report.files) == (["private"], ())
        return
    with Script(body) as script:
        script._process.wait(300)
        script._out.seek(0)
        assert script._out.read() == "['private'] ()\n"


def test_a_link_is_no_snapshot_of_its_own(tmp_path: Path) -> None:
    for step in range(3):
        Snapshot.take(f"{tmp_path}/{step}", state(step), fsync=False)
    (tmp_path / "latest").symlink_to("2")
    (tmp_path / "a-first").symlink_to("1")
    report = gc(tmp_path, keep_last=2, grace=0)
    assert report.dropped == ("0",)
    for step in (1, 2):
        assert not Snapshot(f"{tmp_path}/{step}").verify()
    assert torch.equal(Snapshot(f"{tmp_path}/latest").read_object("m/w1"), torch.full((3000,), 3.0))


def test_files_of_others_stay(tmp_path: Path) -> None:
    Snapshot.take(f"{tmp_path}/0", state(0), fsync=False)
    (tmp_path / "logs").mkdir()
    theirs = [
        tmp_path / "logs" / "train-202501021530-12345678.out",
        tmp_path / "0" / "notes-202501021530-12345678.txt",
        tmp_path / "run-202501021530-12345678.log",
    ]
    for file in theirs:
        file.write_text("mine")
        os.utime(file, (1, 1))
    gc(tmp_path, keep_last=1, grace=0)
    assert all(file.exists() for file in theirs)


async def test_a_process_killed_while_it_rewrites_a_file_stops_nobody(tmp_path: Path) -> None:
    take, name = new_take_id(), "file.json"
    await run_script(f"""
        import os
        from torchstore_snapshot.storage.opening import open_storage
        os.rename = lambda *_: os._exit(0)
        open_storage({str(tmp_path)!r}).publish(
            {name!r}, b"half", take={take!r}, overwrite=True, durable=False
        )
    """)
    (leaving,) = os.listdir(tmp_path)
    assert take_of(leaving) == take  # so that gc knows it
    storage = open_storage(str(tmp_path))
    storage.publish(name, b"whole", take=take, overwrite=True, durable=False)
    assert storage.read(name) == b"whole"


def test_names() -> None:
    assert folder_name(open_storage("/a/b/c")) == "c"
    assert folder_name(open_storage("memory://a/b/")) == "b"


@pytest.mark.parametrize("grace", [-1, float("nan")])
def test_a_grace_is_not_negative(tmp_path: Path, grace: float) -> None:
    with pytest.raises(ts.ConfigurationError, match="grace"):
        gc(tmp_path, grace=grace)


def test_a_folder_goes_with_the_last_file_that_others_referred_to(tmp_path: Path) -> None:
    kept = StateDict(w=torch.ones(3000))
    for step in range(3):
        base = f"{tmp_path}/{step - 1}" if step else None
        Snapshot.take(
            f"{tmp_path}/{step}", {"m": kept, "n": StateDict(step=step)}, base=base, fsync=False
        )
    assert gc(tmp_path, keep_last=1).dropped == ("0", "1")
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]
    Snapshot.take(f"{tmp_path}/3", {"m": StateDict(w=torch.zeros(3000))}, fsync=False)
    gc(tmp_path, keep_last=1)
    assert os.listdir(tmp_path) == ["3"]


def test_a_folder_whose_snapshot_others_have_removed_meanwhile_goes_with_the_claim(
    tmp_path: Path,
) -> None:
    """Those who removed the snapshot could not remove the folder, with the claim in it."""
    folder = tmp_path / "0"
    folder.mkdir()
    assert mend_maps(open_storage(folder)) == []
    assert not folder.exists()


def test_a_folder_in_the_place_of_a_map_does_not_end_a_collection(tmp_path: Path) -> None:
    for step in range(2):
        Snapshot.take(tmp_path / str(step), state(step), fsync=False)
    map_ = tmp_path / "1" / "m.safetensors.index.json"
    map_.unlink()
    map_.mkdir()
    report = gc(tmp_path, keep_last=1)
    assert (report.dropped, report.kept, report.mended) == (("0",), ("1",), ())
    assert os.listdir(tmp_path) == ["1"]
    assert map_.is_dir()
