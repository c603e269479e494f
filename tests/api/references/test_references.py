"""References that own: what they keep alive, in this process, and what the API says of them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import cloudpickle
import msgspec
import pytest
import torch
from tests.support import running_store, until, used

import torchstore_core as ts
from torchstore_core.testing.timers import ends_within

BIG = 1 << 20


class Message(msgspec.Struct):
    ref: ts.HeldRef
    step: int


@pytest.fixture(autouse=True)
async def _no_references_are_left(shared: ts.Client) -> AsyncIterator[None]:
    """What a test that failed still has is not about the next one."""
    yield
    of = (await ts.status()).incarnation
    left = [ts.ObjectRef(one.key, one.version, of, one.timeline) for one in await ts.refs()]
    await ts.free(left)


async def until_free(timeout: float = 1.0) -> None:
    """References that have ended count for nothing, within a second."""

    async def nothing_is_held() -> bool:
        return not await ts.refs() and await used() == 0

    assert await ends_within(asyncio.ensure_future(until(nothing_is_held)), timeout)


async def test_refs_are_equal_or_different(shared):
    ref = await ts.put("k", 1)
    same = (await ts.wait("k"))["k"]
    for other in (same, pickle.loads(pickle.dumps(ref)), ts.ObjectRef(ref.key, ref.version)):
        assert other is not ref
        assert (other == ref, other != ref) == (True, False)
    newer = await ts.put("k", 2)
    for other in (newer, "k", None):
        assert (other == ref, other != ref) == (False, True)


@pytest.mark.parametrize("value", [torch.arange(BIG), torch.ones(3), {"a": [1, "b"]}, b"", None])
async def test_an_object_lives_as_long_as_its_reference(shared: ts.Client, value: object):
    ref = await ts.put_object(value)
    got = await ts.get(ref)
    assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
    assert (ref.key, ref.store_name) == ("", shared.store_name)
    assert await ts.keys() == []
    del ref, got
    await until_free()


@pytest.mark.local_only
async def test_what_has_arrived_elsewhere_makes_room(runtime: str):
    """As a queue does whose consumer has dropped what it got."""
    async with running_store(runtime, capacity=16 * BIG, store_name="small") as small:
        for at in range(6):
            ref = await small.put_object(torch.full((BIG,), float(at)))
            arrived = pickle.loads(pickle.dumps(ref))
            del ref
            assert (await small.get(arrived))[0] == at
            del arrived


@pytest.mark.local_only
async def test_values_keep_what_the_references_in_them_refer_to(
    runtime: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", "0.3")
    async with running_store(runtime, capacity=64 * BIG, store_name="outer") as outer:

        async def made(at: int) -> ts.HeldRef:
            return await outer.put_object(torch.full((BIG,), float(at)))

        async def left() -> int:
            return sum(volume.used_bytes for volume in (await outer.status()).volumes)

        async def read(found: ts.HeldRef) -> float:
            return float((await outer.get(found))[0])

        for at in range(12):  # more than there is room for, if each of them stayed
            await outer.put("latest", {"step": at, "ref": await made(at)})
        packed = await outer.put_object([await made(20), Message(await made(21), 1)])
        entries = {"w": torch.ones(3), "refs": [await made(22)]}
        await outer.put_state_dict(entries, "state")
        del entries
        await until(lambda: _is(left, 4))
        assert [state.state for one in await outer.refs() for state in one.holders].count(
            "in a value"
        ) == 4
        assert await read((await outer.get("latest"))["ref"]) == 11
        first, second = await outer.get(packed)
        assert [await read(first), await read(second.ref)] == [20, 21]
        assert await read((await outer.get_state_dict("state"))["refs"][0]) == 22
        del first, second, packed
        await outer.delete_batch(["latest", "state"])
        await until(lambda: _is(left, 0))


@pytest.mark.local_only
async def test_references_in_a_put_whose_outcome_is_unknown_are_held_by_its_value_alone(
    runtime: str, monkeypatch: pytest.MonkeyPatch
):
    """The server reads it when its client has given up."""
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", "0.1")
    async with running_store(runtime, store_name="late") as late:
        server = (await late.status()).controller_pid
        values = [[await late.put_object(at), bytes(at % 2 * BIG)] for at in range(4)]
        await late.put("large", bytes(BIG))
        os.kill(server, signal.SIGSTOP)
        try:
            for at, value in enumerate(values[:2]):
                with pytest.raises(ts.StoreTimeoutError):
                    await late.put(f"timed out {at}", value, timeout=0.1)
            tasks = [asyncio.ensure_future(late.put("cancelled", value)) for value in values[2:]]
            await asyncio.wait(tasks, timeout=0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        finally:
            os.kill(server, signal.SIGCONT)
        values.clear()
        del value, tasks, task

        async def only_values_hold() -> list[ts.RefReport]:
            gc.collect()  # the errors and their frames
            refs = await late.refs()
            states = {holder.state for one in refs for holder in one.holders}
            return refs if states <= {"in a value"} else []

        await until(only_values_hold)
        for key in await late.keys():
            if key != "large":
                assert (await late.get(key))[0] is not None
        await late.delete_batch(await late.keys())
        await until(lambda: _is(lambda: _held(late), 0))


async def _held(client: ts.Client) -> int:
    return len(await client.refs())


class _NotStored:
    def __reduce__(self) -> str:
        raise ValueError("not this one")


@pytest.mark.local_only
async def test_references_in_values_that_are_not_put_are_not_in_flight(
    runtime: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", "0.3")
    async with running_store(runtime, store_name="small") as small:
        await small.put("newer", 1, version=7)
        large = torch.zeros(1).expand(1 << 40)
        calls: list[tuple[type[ts.TorchStoreError], Callable[[ts.HeldRef], Awaitable[Any]]]] = [
            (ts.StoreFullError, lambda ref: small.put_batch({"a": [ref], "b": large})),
            (ts.StoreFullError, lambda ref: small.put_state_dict({"a": [ref], "b": large}, "s")),
            (ts.UnsupportedValueError, lambda ref: small.put("a", [ref, _NotStored()])),
            (ts.UnsupportedValueError, lambda ref: small.put_batch({"a": [ref], "": 1})),
            (ts.VersionGoneError, lambda ref: small.put("newer", [ref], version=3)),
        ]

        async def nothing_is_held() -> bool:
            gc.collect()  # the error and its frames, which have the reference itself
            return not await small.refs()

        for kind, call in calls:
            with pytest.raises(kind):
                await call(await small.put_object(1))
        await until(nothing_is_held)


async def _is(left: Callable[[], Awaitable[int]], count: int) -> bool:
    gc.collect()
    return (await left()) // (4 * BIG) == count


async def test_a_held_version_outlives_its_key(shared: ts.Client):
    first = await ts.put("w", torch.zeros(BIG))
    held = await ts.hold("w")
    await ts.put("w", torch.ones(BIG))
    assert held.ref == first
    assert repr(held) == f"HeldRef(key='w', version={first.version})"
    assert (await ts.get(held)).sum() == 0
    assert (await ts.get(first)).sum() == 0  # who names it reads it, too
    assert await ts.versions("w") == [first.version + 1]
    await ts.delete("w")
    assert not await ts.exists("w")
    assert (await ts.get(held)).sum() == 0
    assert (await ts.put("w", torch.ones(3))).version == first.version + 2
    await ts.delete("w")
    del held
    await until_free()
    with pytest.raises(ts.VersionGoneError):
        await ts.get(first)


async def test_a_version_of_a_state_dict_and_its_entries_can_be_held(shared: ts.Client):
    await ts.put_state_dict({"w": torch.zeros(BIG), "step": 1}, "model")
    whole, entry = await ts.hold("model"), await ts.hold("model/w")
    whole_version = whole.version
    await ts.put_state_dict({"w": torch.ones(BIG), "step": 2}, "model")
    assert (await ts.get(whole))["step"] == 1
    assert (await ts.get_state_dict("model", version=whole.version))["step"] == 1
    assert (await ts.get(ts.ObjectRef("model/w", whole_version))).sum() == 0
    del whole
    assert (await ts.get(entry)).sum() == 0
    second = await ts.hold("model")
    await ts.put_state_dict({"step": 3}, "model", partial=True)
    held = await ts.get(second)
    assert (held["w"].sum(), held["step"]) == (BIG, 2)
    del second, held
    await ts.delete("model")
    assert (await ts.get(entry)).sum() == 0
    del entry
    await until_free()


async def test_what_cannot_be_held_says_why(shared: ts.Client):
    with pytest.raises(ts.KeyNotFoundError):
        await ts.hold("nothing")
    ref = await ts.put("w", 1)
    await ts.put("w", 2)
    with pytest.raises(ts.VersionGoneError, match=f"version {ref.version} of 'w' is gone"):
        await ts.hold(ref)
    with pytest.raises(ts.UnsupportedValueError):
        await ts.hold("")
    shard = ts.TensorShard(torch.ones(2), ts.TensorSlice((0,), (2,), (4,)))
    with pytest.raises(ts.UnsupportedValueError, match="needs a key"):
        await ts.put_object(shard)
    with pytest.raises(TypeError, match="returned by put_object"):
        ts.HeldRef()
    assert await ts.refs() == []


async def test_a_reference_can_be_encoded_and_decoded_many_times(shared: ts.Client):
    ref = await ts.put_object(torch.ones(BIG))
    pickled, packed = pickle.dumps([ref, ref]), msgspec.msgpack.encode(Message(ref, 1))
    text = msgspec.json.encode({"refs": [ref]})
    original = ref.ref
    del ref
    gc.collect()
    received = [pickle.loads(pickled) for _ in range(3)]
    received += [msgspec.msgpack.decode(packed, type=Message).ref for _ in range(2)]
    received += [msgspec.json.decode(text, type=dict[str, list[ts.HeldRef]])["refs"][0]]
    for one in received:
        first = one[0] if isinstance(one, list) else one
        assert first.ref == original
        assert (await ts.get(first)).sum() == BIG
    assert received[0][0] == received[1][1] == received[4]
    assert len({received[0][0], received[4]}) == 1
    (report,) = await ts.refs()
    states = [holder.state for holder in report.holders]
    assert states.count("held") == 6
    assert states.count("received") == 3
    await ts.free([received[0][0]])
    await until_free()


async def test_a_reference_is_held_in_what_cloudpickle_makes(shared: ts.Client):
    """As Ray sends arguments, with buffers apart, and functions with what they refer to."""
    ref = await ts.put_object(torch.ones(BIG))
    original = ref.ref
    buffers: list[pickle.PickleBuffer] = []
    argument = cloudpickle.dumps({"ref": ref}, protocol=5, buffer_callback=buffers.append)
    function = cloudpickle.dumps((lambda held: lambda: held)(ref))
    del ref
    gc.collect()
    received = [pickle.loads(argument, buffers=buffers)["ref"], pickle.loads(function)()]
    for one in received:
        assert one.ref == original
        assert (await ts.get(one)).sum() == BIG
    await ts.free([received[0]])
    await until_free()


async def test_copies_are_the_reference_itself_and_it_does_not_change(shared: ts.Client):
    ref = await ts.put_object(1)
    assert copy.copy(ref) is copy.deepcopy([ref])[0] is ref
    with pytest.raises(AttributeError):
        ref.version = 3
    for name in ("ref", "store", "ticket"):
        value = getattr(ref, name)
        with pytest.raises(AttributeError, match="does not change"):
            setattr(ref, name, value)
    with pytest.raises(AttributeError):
        ref.other = 1
    await ts.free([ref])


@dataclasses.dataclass
class Job:
    ref: ts.HeldRef


async def test_what_dataclasses_make_of_a_reference_holds_nothing(shared: ts.Client):
    """Each of these left it in flight until the process ended."""
    ref = await ts.put_object(torch.ones(BIG))
    for what in (ref, Job(ref)):
        made = dataclasses.asdict(what)
        assert dataclasses.astuple(what) is not None
        assert (made if what is ref else made["ref"])["ref"] == ref.ref
    with pytest.raises(TypeError):
        dataclasses.replace(ref)  # type: ignore[type-var]
    assert dataclasses.replace(Job(ref)).ref is ref
    (report,) = await ts.refs()
    assert [holder.state for holder in report.holders] == ["held"]
    del ref, what
    await until_free()


async def test_a_reference_ends_with_its_block(shared: ts.Client):
    with await ts.put_object(torch.arange(BIG)) as ref:
        assert len(await ts.get(ref)) == BIG
        other = await ts.hold(ref)
    assert [one.version for one in await ts.refs()] == [ref.version]
    assert len(await ts.get(ref)) == BIG  # another one keeps it alive
    other.release()
    other.release()
    await until_free()
    for gone in (ref, other):
        with pytest.raises(ts.VersionGoneError):
            await ts.get(gone)
    with pytest.raises(KeyError), await ts.put_object(b"x" * BIG) as ref:
        raise KeyError("of the user")
    await until_free()


async def test_a_released_reference_keeps_nothing_alive_wherever_it_is_sent(shared: ts.Client):
    ref = await ts.put_object([1, 2])
    ref.release()
    await until_free()
    with pytest.raises(ts.VersionGoneError):
        await ts.get(pickle.loads(pickle.dumps(ref)))
    assert (ref, ref.version, ref.store_name) == (ref, ref.ref.version, shared.store_name)


async def test_references_in_cycles_are_collected(shared: ts.Client):
    cycle: list[object] = [await ts.put_object(torch.ones(BIG))]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert len(await ts.refs()) == 1
    finally:
        gc.enable()
    gc.collect()
    await until_free()


async def test_freed_objects_are_gone_for_everybody(shared: ts.Client):
    ref, other = await ts.put_object(torch.ones(BIG)), await ts.put_object(2)
    mapped = await ts.get(ref)
    in_flight = pickle.dumps(ref)
    assert await ts.free([ref]) == 1
    assert await ts.free([ref]) == 0
    with pytest.raises(ts.VersionGoneError, match="was freed"):
        await ts.get(ref)
    with pytest.raises(ts.VersionGoneError, match="was freed"):
        await ts.get(pickle.loads(in_flight))
    assert mapped.sum() == BIG  # who has read it already keeps it
    assert await ts.get(other) == 2
    await ts.put("w", 1)
    held = await ts.hold("w")
    assert await ts.free([held, other]) == 2
    assert await ts.get(held) == 1  # its key still has it
    with pytest.raises(ts.UnsupportedValueError, match="list"):
        await ts.free(held)
    with pytest.raises(ts.UnsupportedValueError, match="deleted with delete"):
        await ts.free(["w"])
    wrong: Any = [held, None]
    with pytest.raises(ts.UnsupportedValueError, match="references, not NoneType"):
        await ts.free(wrong)
    del mapped
    await ts.delete("w")
    await until_free()


async def test_wait_any_as_users_of_ray_know_it(shared: ts.Client):
    ready = await ts.put_object(1)
    await ts.put("here", 2)
    version = ts.ObjectRef("late", 2)
    refs = [version, "later", ready, "here"]
    assert await ts.wait_any(refs, timeout=0) == ([ready], [version, "later", "here"])
    assert await ts.wait_any(refs, num_returns=2) == ([ready, "here"], [version, "later"])
    assert await ts.wait_any(refs, num_returns=3, timeout=0.05) == (
        [ready, "here"],
        [version, "later"],
    )
    await ts.put("late", 1)
    waiting = asyncio.create_task(ts.wait_any(refs, num_returns=3, timeout=20))
    await until(lambda: _waits())
    await ts.put("late", 2)
    assert await waiting == ([version, ready, "here"], ["later"])
    for wrong in (0, 5, "2"):
        with pytest.raises(ts.ConfigurationError, match="num_returns"):
            await ts.wait_any(refs, num_returns=wrong)
    with pytest.raises(ts.ConfigurationError, match="comes twice"):
        await ts.wait_any(["a", "a"])
    assert await ts.wait_any([]) == ([], [])
    held = await ts.hold("here")
    await ts.delete("here")
    assert await ts.wait_any([held, "here"], timeout=0) == ([held], ["here"])
    elsewhere = ts.ObjectRef("here", 9, incarnation=1)
    assert await ts.wait_any([elsewhere], timeout=0) == ([elsewhere], [])
    await ts.free([ready])


async def _waits() -> bool:
    return (await ts.status()).operations.get("WaitAny", 0) >= 4


async def test_several_references_are_read_at_once(shared: ts.Client):
    first, second = await ts.put_object(1), await ts.put_object(torch.ones(3))
    await ts.put("w", 3)
    held = await ts.hold("w")
    await ts.put("other", 4)
    got = await ts.get_batch([first, second, held, "other"])
    assert (got[first], got["w"], got["other"]) == (1, 3, 4)
    assert torch.equal(got[second], torch.ones(3))
    await ts.free([first, second, held])


async def test_the_report_names_holders_and_lines(
    shared: ts.Client, monkeypatch: pytest.MonkeyPatch
):
    ref = await ts.put_object(torch.ones(3))
    (report,) = await ts.refs()
    (holder,) = report.holders
    assert (report.key, report.version, report.nbytes, report.kind) == (
        "",
        ref.version,
        12,
        "tensor",
    )
    assert not report.current
    assert (holder.where, holder.state) == ("", "held")
    del ref
    monkeypatch.setenv("TORCHSTORE_TRACE_REFS", "1")
    await ts.put("w", {"a": 1})
    held = await ts.hold("w")
    await until_one()
    (report,) = await ts.refs()
    assert (report.kind, report.current) == ("object", True)
    assert "test_references.py:" in report.holders[0].where
    assert report.holders[0].where.endswith("in test_the_report_names_holders_and_lines")
    received = pickle.loads(pickle.dumps(held))

    async def its_line_is_known() -> bool:  # another connection than the question's carries it
        holders = (await ts.refs())[0].holders[1:]
        return any("test_references.py:" in one.where for one in holders)

    await until(its_line_is_known)
    await ts.free([received])


async def until_one() -> None:
    async def one() -> bool:
        return len(await ts.refs()) == 1

    await until(one)


async def test_memory_of_ended_references_is_there_for_the_next_put(shared: ts.Client):
    """A put that does not fit waits for what has just ended to be known to the server."""
    value = torch.ones(40 << 20)  # 160 of 256 MB
    for _ in range(8):
        ref = await ts.put_object(value)
        del ref
    await until_free()


async def test_a_held_version_outlives_a_rewind(shared: ts.Client):
    """Its number is used again, for another version."""
    for step in (1, 2, 3):
        await ts.put("run", torch.full((BIG,), step), version=10 + step)
        await ts.put_state_dict({"step": step}, "state", version=10 + step)
    held, state = await ts.hold("run"), await ts.hold("state")
    lost = await ts.put("run", 4, version=14)
    await ts.put("run", torch.full((BIG,), 20), version=12, rewind=True)
    await ts.put_state_dict({"step": 20}, "state", version=12, rewind=True)
    newer = await ts.put("run", torch.full((BIG,), 30), version=13)
    await ts.put_state_dict({"step": 30}, "state", version=13)
    assert held.ref != newer
    for one in (held, pickle.loads(pickle.dumps(held))):
        assert (await ts.get(one))[0] == 3
    assert (await ts.get(state))["step"] == 3
    assert (await ts.get(newer))[0] == 30
    again = await ts.hold("run")
    assert (await ts.get(again))[0] == 30
    assert again != held
    with pytest.raises(ts.VersionGoneError):
        await ts.hold(lost)
    assert len(await ts.refs()) == 3
    assert [ref.current for ref in await ts.refs() if ref.version == 13].count(True) == 1
    assert await ts.free([held]) == 1
    with pytest.raises(ts.VersionGoneError):
        await ts.get(held)
    assert (await ts.get(again))[0] == 30
    await ts.delete_batch(["run", "state"])
