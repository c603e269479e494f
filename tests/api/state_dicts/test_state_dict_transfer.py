"""How state dicts are moved: cast on the way, without waiting for the commit, in few messages."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from tests.processes import run_script
from tests.support import before_commits, bits, running_store, stop, turn, until
from tests.trees import assert_same

import torchstore_core as ts

SIZES = pytest.mark.parametrize("rows", [4, 300], ids=["small", "large"])
COLUMNS = 512
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def _whole(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, COLUMNS).to(dtype)


# ---- casting on the way in ----------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
async def test_floating_point_entries_are_stored_in_the_dtype_asked_for(shared, rows, dtype):
    base = _whole(2 * rows)
    state_dict = {
        **{str(own): _whole(rows, own) for own in FLOATS},
        "strided": base[::2],
        "transposed": _whole(rows).t(),
        "trained": _whole(rows).requires_grad_(),
        "scalar": torch.tensor(2.3),
        "nothing": torch.empty(0, 3),
        "nested": [{"w": _whole(rows)}],
    }
    untouched = {
        "int": torch.arange(rows),
        "bool": torch.ones(rows, dtype=torch.bool),
        "complex": torch.complex(_whole(rows), _whole(rows)),
        "object": 2.3,
    }
    await ts.put_state_dict({**state_dict, **untouched}, "k", transfer_dtype=dtype)
    got = await ts.get_state_dict("k")
    nested = state_dict.pop("nested"), got["nested"]
    for name, tensor in [*state_dict.items(), ("nested", nested[0][0]["w"])]:
        found = nested[1][0]["w"] if name == "nested" else got[name]
        assert_same(found, tensor.detach().to(dtype), name)
    for name, value in untouched.items():
        assert_same(got[name], value, name)
    assert (await ts.stat("k/strided")).nbytes == rows * COLUMNS * dtype.itemsize


PATTERNS = {
    "*": torch.bfloat16,
    "*.norm.*": None,
    "*.norm.scale": torch.float16,
    "layers.?.w": torch.float64,
    "layers.[01].w": torch.float16,
    "layers.0.w": None,
}


@pytest.mark.parametrize("order", [1, -1], ids=["as written", "backwards"])
async def test_the_pattern_with_most_literal_characters_counts(shared, order):
    """Wildcards are not literal, and neither is what stands between brackets."""
    w = torch.randn(300, COLUMNS)
    state_dict = {
        "head": w,
        "layers": {"0": {"w": w + 0}, "1": {"w": w + 1}, "2": {"w": w + 2}, "12": {"w": w + 3}},
        "m.norm.bias": w + 4,
        "m.norm.scale": w + 5,
        "m.norm.count": torch.arange(3),
    }
    patterns = dict([*PATTERNS.items()][::order])
    await ts.put_state_dict(state_dict, "k", transfer_dtype=patterns)
    stored = {name: (await ts.stat(f"k/{name}")).meta.dtype for name in DTYPES}
    assert stored == DTYPES
    got = await ts.get_state_dict("k")
    assert torch.equal(bits(got["head"]), bits(w.bfloat16()))
    assert torch.equal(got["layers"]["0"]["w"], w)
    assert torch.equal(got["m.norm.scale"], (w + 5).half())


# "layers.?.w" and "layers.[01].w" have as many literal characters: the first one given counts.
DTYPES = {
    "head": "bfloat16",
    "layers.0.w": "float32",
    "layers.2.w": "float64",
    "layers.12.w": "bfloat16",
    "m.norm.bias": "float32",
    "m.norm.scale": "float16",
    "m.norm.count": "int64",
}


async def test_without_a_pattern_that_fits_an_entry_keeps_its_dtype(shared):
    state_dict = {"a": torch.ones(3), "A": torch.ones(3), "b": torch.ones(3)}
    await ts.put_state_dict(state_dict, "k", transfer_dtype={"a": torch.float16, "b": None})
    got = await ts.get_state_dict("k")
    assert [t.dtype for t in got.values()] == [torch.float16, torch.float32, torch.float32]
    await ts.put_state_dict(state_dict, "k", transfer_dtype={})
    assert_same(await ts.get_state_dict("k"), state_dict)


async def test_patterns_of_which_none_fits_are_warned_of(shared):
    state_dict = {"layers.0.weight": torch.ones(3), "norm": torch.ones(3)}
    patterns = {"layer.*": torch.float16, "head": None}
    with pytest.warns(RuntimeWarning, match=r"'k': no entry matches .*\(layer\.\*, head\)") as told:
        await ts.put_state_dict(state_dict, "k", transfer_dtype=patterns)
    assert "the first entry is 'layers.0.weight'" in str(told[0].message)
    assert told[0].filename == __file__
    assert_same(await ts.get_state_dict("k"), state_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await ts.put_state_dict(state_dict, "k", transfer_dtype={**patterns, "norm": None})
        one = {"norm": torch.ones(3)}  # the others may have entries that fit
        await ts.put_state_dict(one, "k", transfer_dtype=patterns, partial=True)
        for rank in range(2):
            mine = {f"{rank}": torch.ones(3)}
            options = {"participants": 2, "participant": rank, "transfer_dtype": patterns}
            await ts.put_state_dict(mine, "stages", **options)


@SIZES
async def test_tied_weights_are_cast_once(shared, rows):
    table = _whole(rows)
    state_dict = {"embedding": table, "head": table, "kept": table}
    patterns = {"*": torch.bfloat16, "kept": None}
    await ts.put_state_dict(state_dict, "k", transfer_dtype=patterns)
    assert (await ts.stat("k")).nbytes == table.numel() * (2 + 4)
    got = await ts.get_state_dict("k")
    assert got["embedding"].data_ptr() == got["head"].data_ptr()
    assert torch.equal(got["head"], table.bfloat16())
    assert torch.equal(got["kept"], table)


@SIZES
async def test_shards_are_cast(shared, rows):
    whole = _whole(2 * rows)
    for i in range(2):
        part = ts.TensorSlice((i * rows, 0), (rows, COLUMNS), (2 * rows, COLUMNS))
        shard = ts.TensorShard(whole[i * rows : (i + 1) * rows], part)
        await ts.put_state_dict(
            {"w": shard}, "k", participants=2, participant=i, transfer_dtype=torch.bfloat16
        )
    assert_same(await ts.get_state_dict("k"), {"w": whole.bfloat16()})
    part = ts.TensorSlice((1, 3), (2 * rows - 2, 30), (2 * rows, COLUMNS))
    mine = {"w": ts.TensorShard(torch.zeros(2 * rows - 2, 30), part)}
    with pytest.raises(ts.LayoutMismatchError, match="float32"):
        await ts.get_state_dict("k", mine)
    await ts.get_state_dict("k", mine, cast=True)
    assert torch.equal(mine["w"].tensor, whole.bfloat16().float()[1:-1, 3:33])


async def test_casts_of_different_versions_and_partial_publishes(shared):
    w = torch.randn(300, COLUMNS)
    await ts.put_state_dict({"a": w, "b": w + 1}, "k", transfer_dtype=torch.bfloat16)
    await ts.put_state_dict({"a": w + 2}, "k", partial=True)
    got = await ts.get_state_dict("k")
    assert torch.equal(got["a"], w + 2)
    assert torch.equal(got["b"], (w + 1).bfloat16())


# ---- casting on the way out ---------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("stored", FLOATS, ids=str)
async def test_a_destination_of_another_dtype_is_cast_to_only_if_asked(shared, rows, stored):
    theirs = {"w": _whole(rows, stored), "s": torch.tensor(1.5).to(stored), "n": torch.arange(3)}
    await ts.put_state_dict(theirs, "k")
    for mine_dtype in FLOATS:

        def mine(dtype: torch.dtype = mine_dtype) -> dict[str, torch.Tensor]:
            strided = torch.zeros(COLUMNS, rows, dtype=dtype).t()
            scalar, numbers = torch.zeros((), dtype=dtype), torch.zeros_like(theirs["n"])
            return {"w": strided, "s": scalar, "n": numbers}

        destination = mine()
        if mine_dtype is not stored:
            with pytest.raises(ts.LayoutMismatchError, match="2 mismatched") as caught:
                await ts.get_state_dict("k", destination)
            assert sorted(caught.value.details["mismatched"]) == ["s", "w"]
            assert not any(bits(tensor).any() for tensor in destination.values())
        tensors = dict(destination)
        await ts.get_state_dict("k", destination, cast=True)
        assert all(destination[name] is tensor for name, tensor in tensors.items())
        for name in ("w", "s"):
            assert_same(destination[name], theirs[name].to(mine_dtype), name)
        assert_same(destination["n"], theirs["n"])


async def test_only_floating_point_is_ever_cast(shared):
    await ts.put_state_dict({"i": torch.ones(3, dtype=torch.int32), "f": torch.ones(3)}, "k")
    wrong = [("i", torch.int64), ("i", torch.float32), ("f", torch.int32), ("f", torch.complex64)]
    for name, dtype in wrong:
        mine = {"i": None, "f": None, name: torch.zeros(3, dtype=dtype)}
        with pytest.raises(ts.LayoutMismatchError, match=f"1 mismatched: '{name}'"):
            await ts.get_state_dict("k", mine, cast=True)
        assert not mine[name].any()


# ---- memory -------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_a_cast_publish_takes_hardly_more_memory_than_the_store_holds():
    """No second copy of the model, in the publisher or in the server."""
    out = await run_script(
        fresh=True,
        body="""
        from pathlib import Path

        def memory(pid, name):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return next(int(x.split()[1]) << 10 for x in lines if x.startswith(name))

        await ts.initialize(store_name="own", capacity=512 << 20, prefault=0)
        client = await ts.client("own")
        server = (await client.status()).controller_pid
        state_dict = {f"w{i}": torch.ones(2048, 2048) for i in range(16)}
        state_dict["columns"] = torch.ones(2048, 2048).t()
        small = {"w": torch.ones(1 << 18)}
        await client.put_state_dict(small, "first", transfer_dtype=torch.half)
        await client.delete("first")
        before = memory("self", "VmRSS") + memory(server, "VmRSS")
        await client.put_state_dict(state_dict, "k", transfer_dtype=torch.bfloat16)
        # The highest they ever were: at least what they rose to just now.
        after = memory("self", "VmHWM") + memory(server, "VmHWM")
        print(after - before, (await client.stat("k")).nbytes)
        await ts.shutdown("own")
        """,
    )
    grown, stored = map(int, out.split())
    assert stored == 17 * 2048 * 2048 * 2
    assert stored * 0.5 < grown <= stored * 1.05


# ---- without waiting for the commit -------------------------------------------------------


@SIZES
async def test_values_may_be_changed_as_soon_as_the_call_returns(shared, rows):
    for number in range(1, 11):
        value = torch.full((rows, COLUMNS), float(number))
        state_dict = {"w": value, "columns": value.t(), "cast": value + 0, "list": [value + 0, 5]}
        pending = await ts.put_state_dict(
            state_dict, "k", blocking=False, transfer_dtype={"cast": torch.bfloat16}
        )
        for tensor in (value, state_dict["cast"], state_dict["list"][0]):
            tensor.fill_(-1)
        state_dict["list"][1] = -1
        assert isinstance(pending, ts.PendingPut)
        assert pending.key == "k"
        ref = await pending
        assert isinstance(ref, ts.ObjectRef)
        assert ref.key == "k"
        assert pending.done()
        assert await pending == ref  # as often as you like
        got = await ts.get_state_dict("k", version=ref.version)
        for tensor in (got["w"], got["cast"], got["columns"], got["list"][0]):
            assert (tensor == number).all()
        assert got["list"][1] == 5


async def test_it_commits_without_being_awaited(shared):
    pending = await ts.put_state_dict({"w": torch.ones(300_000)}, "k", blocking=False)
    assert "committing" in repr(pending)
    del pending
    ref = (await ts.wait("k", timeout=10))["k"]
    assert (await ts.get_state_dict("k", version=ref.version))["w"].all()


async def test_the_handle_says_when_it_is_done(shared):
    pending = await ts.put_state_dict({"w": torch.ones(300_000)}, "k", blocking=False)
    assert not pending.done()
    await until(pending.done)
    assert repr(pending) == "<PendingPut of 'k', done>"
    small = await ts.put_state_dict({"w": torch.ones(3)}, "k", blocking=False)
    assert small.done()
    assert (await small).version == (await pending).version + 1


async def test_the_trainer_goes_on_while_versions_commit_in_order(shared):
    value = torch.zeros(300_000)
    handles = []
    for number in range(10):
        value.fill_(number)
        handles.append(await ts.put_state_dict({"w": value}, "k", blocking=False, keep=10))
    refs = await asyncio.gather(*handles)
    assert [ref.version - refs[0].version for ref in refs] == [*range(10)]
    there = await ts.versions("k")
    assert there[-1] == refs[-1].version
    for number, ref in enumerate(refs):
        if ref.version in there:
            assert (await ts.get_state_dict("k", version=ref.version))[
                "w"
            ].unique().item() == number


async def test_what_is_wrong_with_the_values_is_raised_at_once(shared):
    with pytest.raises(ts.UnsupportedValueError):
        await ts.put_state_dict({"w": torch.empty(2, device="meta")}, "k", blocking=False)
    large = {"w": torch.empty(300 << 20, dtype=torch.uint8)}
    with pytest.raises(ts.StoreFullError):
        await ts.put_state_dict(large, "k", blocking=False)
    with pytest.raises(ts.KeyNotFoundError):
        await ts.put_state_dict({"w": torch.ones(300_000)}, "k", blocking=False, partial=True)
    assert not await ts.exists("k")
    assert (await ts.status()).volumes[0].unfinished_bytes == 0


@pytest.mark.parametrize("lost", ["while it is sent", "before"])
async def test_a_commit_that_fails_raises_when_awaited_and_is_logged(caplog, lost):
    async with running_store(store_name="killed", keeper=False) as client:
        pid = (await client.status()).controller_pid

        def kill() -> None:
            ended = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            if lost == "before":
                select.select([ended], [], [], 20)
            os.close(ended)

        with before_commits(kill):
            pending = await client.put_state_dict({"w": torch.ones(300_000)}, "k", blocking=False)
        with pytest.raises(ts.StoreClosedError):
            await pending
        with pytest.raises(ts.StoreClosedError):
            await pending
    assert pending.done()
    (record,) = [r for r in caplog.records if "blocking=False failed" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert "the server had not said yet whether 'k' has committed" in record.getMessage()


async def test_a_commit_for_which_no_time_is_left_leaves_nothing_behind(shared):
    with (
        before_commits(lambda: time.sleep(1)),  # which is all that there is
        pytest.raises(ts.StoreTimeoutError),
    ):
        await ts.put_state_dict({"w": torch.ones(300_000)}, "late", blocking=False, timeout=1)

    async def given_back() -> bool:
        return (await ts.status()).volumes[0].unfinished_bytes == 0

    await until(given_back)
    assert not await ts.exists("late")


def test_a_loop_may_end_before_the_commit_is_answered(module_store):
    async def publish() -> ts.PendingPut:
        return await ts.put_state_dict({"w": torch.ones(300_000)}, "ended", blocking=False)

    async def look() -> None:
        await ts.wait("ended", timeout=10)
        assert (await ts.get_state_dict("ended"))["w"].all()
        await ts.delete("ended")

    assert asyncio.run(publish()).done()
    asyncio.run(look())


async def test_a_commit_that_is_cancelled_has_been_sent(shared):
    """As a program does that cancels all its tasks when it ends: its last put is there."""
    before = asyncio.all_tasks()
    pending = await ts.put_state_dict({"w": torch.ones(300_000)}, "k", blocking=False)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert pending.done()

    async def given_back() -> bool:
        return (await ts.status()).volumes[0].unfinished_bytes == 0

    await until(given_back)
    assert (await ts.get_state_dict("k"))["w"].all()


async def test_a_cancelled_await_does_not_stop_the_commit():
    async with running_store(store_name="stopped") as client:
        pid = (await client.status()).controller_pid
        try:
            with before_commits(lambda: stop(pid)):
                value = {"w": torch.ones(300_000)}
                pending = await client.put_state_dict(value, "k", blocking=False)

            async def wait_for_it() -> None:
                await pending

            task = asyncio.create_task(wait_for_it())
            await turn()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not pending.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await pending).version == 1
        assert await client.latest_version("k") == 1


async def test_a_handle_is_made_by_a_put_only(shared):
    with pytest.raises(ts.ConfigurationError, match="blocking=False"):
        await ts.PendingPut("k", None)


# ---- few messages -------------------------------------------------------------------------


async def _requests() -> dict[str, int]:
    """What the server was asked so far, but for this."""
    counted = dict((await ts.status()).operations)
    counted.pop("Status")
    return counted


async def _asked(before: dict[str, int], names: set[str]) -> None:
    """Every request since ``before`` is one of each of ``names``.

    A request has at most one reply, so that many times two messages were sent at most.
    """

    async def all_there() -> bool:
        now = await _requests()
        since = {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in since.items() if count} == dict.fromkeys(names, 1)

    assert 2 * len(names) <= 8
    await until(all_there)


async def _until_quiet() -> None:
    """Tensors that died have been given back: no more messages come by themselves."""

    async def nothing_leased() -> bool:
        return (await ts.status()).volumes[0].leased_bytes == 0

    await until(nothing_leased)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [2, 1024], ids=["inline-sized", "4 KB"])
async def test_a_put_and_a_get_of_18000_entries_take_a_few_messages(shared, width):
    state_dict: dict[str, Any] = {
        f"layers.{i}.experts.w": torch.full((width,), float(i)) for i in range(17_999)
    }
    state_dict["config"] = {"step": 5}
    await ts.put_state_dict({"w": torch.ones(300_000)}, "warm")  # the connection stands
    await ts.get_state_dict("warm")
    await _until_quiet()
    before = await _requests()
    await ts.put_state_dict(state_dict, "k")
    await _asked(before, {"Put", "Commit"})

    before = await _requests()
    mine = {name: torch.zeros(width) for name in state_dict if name != "config"}
    await ts.get_state_dict("k", {**mine, "config": {"step": None}})
    await _asked(before, {"Fetch", "Release"})
    assert all(tensor[-1] == i for i, tensor in enumerate(mine.values()))

    before = await _requests()
    got = await ts.get_state_dict("k")
    await _asked(before, {"Fetch", "Release"})
    assert_same(got, state_dict)

    before = await _requests()
    await ts.put_state_dict({"layers.7.experts.w": torch.zeros(width)}, "k", partial=True)
    await _asked(before, {"Put"})  # so little rides in the message
    assert (await ts.get("k/layers.7.experts.w")).sum() == 0
    assert (await ts.get("k/layers.8.experts.w"))[0] == 8
