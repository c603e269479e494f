"""State dicts into the reader's own: all of it is filled in place, or nothing is."""

from __future__ import annotations

import logging
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.support import bits
from tests.trees import assert_same

import torchstore_core as ts

SIZES = pytest.mark.parametrize("rows", [4, 300], ids=["small", "large"])
COLUMNS = 512


def _stored(rows: int) -> dict[str, Any]:
    return {
        "w": torch.randn(rows, COLUMNS),
        "layers": [{"w": torch.randn(rows, COLUMNS), "step": 4}, torch.arange(rows)],
        "pair": (torch.randn(rows), "theirs"),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "own": torch.randn(rows, COLUMNS),
        "config": {"lr": 0.1, "names": ["a", "b"], "none": None},
    }


def _mine(rows: int) -> dict[str, Any]:
    """The same entries, each in memory of another kind, full of -1."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0)

    return {
        "w": full(COLUMNS, rows).t(),
        "layers": [
            {"w": full(2 * rows, COLUMNS + 6)[::2, 3:-3], "step": None},
            torch.full((rows,), -1),
        ],
        "pair": (full(rows, 3)[:, 1], "mine"),
        "scalar": full(3)[1],
        "nothing": torch.empty(0, 3),
        "own": torch.nn.Parameter(full(rows, COLUMNS)),
        "config": OrderedDict(lr=1, names=(), none=5),
    }


# ---- filling ------------------------------------------------------------------------------


@SIZES
async def test_every_entry_lands_in_the_readers_own_memory(shared, rows):
    theirs, mine = _stored(rows), _mine(rows)
    await ts.put_state_dict(theirs, "k")
    layers, first, pair, config = mine["layers"], mine["layers"][0], mine["pair"], mine["config"]
    tensors = [mine["w"], first["w"], layers[1], pair[0], mine["scalar"], mine["own"]]

    assert await ts.get_state_dict("k", mine) is mine

    assert_same({**mine, "config": dict(config)}, theirs)
    assert mine["layers"] is layers
    assert layers[0] is first
    assert mine["config"] is config
    assert type(config) is OrderedDict
    found = [mine["w"], first["w"], layers[1], mine["pair"][0], mine["scalar"], mine["own"]]
    assert all(a is b for a, b in zip(found, tensors, strict=True))
    for tensor in tensors:
        tensor.detach().fill_(-1)
        whole = tensor if tensor._base is None else tensor._base
        assert (whole == -1).all(), "written outside of the view"
    assert pair[1] == "mine"  # a tuple cannot change: a new one took its place
    assert mine["pair"] is not pair


async def test_what_may_stay_is_not_replaced(shared):
    await ts.put_state_dict(
        {"pair": (torch.ones(2), torch.ones(3)), "in": {"w": torch.ones(2)}}, "k"
    )
    mine = {
        "pair": (torch.zeros(2), torch.zeros(3)),
        "in": types.MappingProxyType({"w": torch.zeros(2)}),
    }
    pair, inner = mine["pair"], mine["in"]
    await ts.get_state_dict("k", mine)
    assert mine["pair"] is pair
    assert mine["in"] is inner
    assert pair[1].tolist() == [1, 1, 1]
    assert inner["w"].tolist() == [1, 1]


@SIZES
async def test_none_takes_a_new_tensor_or_whatever_it_is(shared, rows):
    theirs = _stored(rows)
    await ts.put_state_dict({**theirs, "t": (theirs["w"], 1)}, "k")
    mine: dict[str, Any] = {**_mine(rows), "w": None, "t": (None, torch.zeros(1))}
    mine["layers"][0]["w"] = None
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get_state_dict("k", mine)  # a number is no tensor
    mine["t"] = {0: None, 1: None}
    await ts.get_state_dict("k", mine)
    assert torch.equal(mine["w"], theirs["w"])
    assert torch.equal(mine["layers"][0]["w"], theirs["layers"][0]["w"])
    assert torch.equal(mine["t"][0], theirs["w"])
    assert mine["t"][1] == 1


@SIZES
async def test_a_module_is_filled_through_its_state_dict(shared, rows):
    theirs, mine = (torch.nn.Sequential(torch.nn.Linear(COLUMNS, rows)) for _ in range(2))
    await ts.put_state_dict(theirs.state_dict(), "k")
    before = mine[0].weight._version
    got = await ts.get_state_dict("k", mine.state_dict())
    assert torch.equal(mine[0].weight, theirs[0].weight)
    assert torch.equal(mine[0].bias, theirs[0].bias)
    assert got["0.weight"].data_ptr() == mine[0].weight.data_ptr()
    assert mine[0].weight.requires_grad
    assert mine[0].weight._version > before  # autograd knows


@SIZES
async def test_an_optimizer_state_comes_back_into_another_optimizer(shared, rows):
    def trained(steps: int) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(rows, COLUMNS))
        optimizer = torch.optim.AdamW([weight], lr=0.1 / (steps + 1))
        for _ in range(steps):
            weight.grad = torch.randn(rows, COLUMNS)
            optimizer.step()
        return optimizer

    theirs, mine = trained(3), trained(1)
    await ts.put_state_dict(theirs.state_dict(), "optimizer")
    state_dict = mine.state_dict()
    moment = state_dict["state"][0]["exp_avg"]
    got = await ts.get_state_dict("optimizer", state_dict)
    assert got is state_dict
    assert got["state"][0]["exp_avg"] is moment
    mine.load_state_dict(got)
    assert_same(mine.state_dict(), theirs.state_dict())
    assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


@SIZES
async def test_tied_destinations_are_filled_once_and_stay_tied(shared, rows):
    table = torch.randn(rows, COLUMNS)
    await ts.put_state_dict({"embedding": table, "head": table, "other": table + 1}, "k")
    mine = torch.zeros(rows, COLUMNS)
    state_dict = {"embedding": mine, "head": mine.detach(), "other": torch.zeros(rows, COLUMNS)}
    head = state_dict["head"]
    await ts.get_state_dict("k", state_dict)
    assert torch.equal(mine, table)
    assert state_dict["head"] is head
    assert head.data_ptr() == mine.data_ptr()
    assert torch.equal(state_dict["other"], table + 1)
    apart = {name: torch.zeros(rows, COLUMNS) for name in state_dict}
    await ts.get_state_dict("k", apart)
    assert torch.equal(apart["embedding"], table)
    assert torch.equal(apart["head"], table)


async def test_a_tied_destination_is_filled_from_whichever_name_is_stored(shared):
    """Checkpoints often leave one of two tied weights out."""
    mine = torch.zeros(3)
    state_dict = {"embedding": mine, "head": mine}
    for stored in ("embedding", "head"):
        await ts.put_state_dict({stored: torch.ones(3)}, stored)
        mine.zero_()
        assert await ts.get_state_dict(stored, state_dict) is state_dict
        assert mine.tolist() == [1, 1, 1], stored
    await ts.put_state_dict({"norm": torch.ones(3)}, "neither")
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("neither", state_dict)
    assert caught.value.details["missing"] == ["embedding", "head"]
    await ts.put_state_dict({"embedding": torch.ones(3), "head": torch.ones(4)}, "one")
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("one", state_dict)
    assert list(caught.value.details["mismatched"]) == ["head"]


@SIZES
@pytest.mark.parametrize("more", [0, 200])
async def test_tied_destinations_of_different_values_are_refused(shared, k, rows, more):
    """The model of the trainer has untied them: its reader got the first of both, silently."""
    others = {f"{at}": torch.randn(3) for at in range(more)}
    table, head = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    await ts.put_state_dict({"embedding": table, "head": head, **others}, k)
    mine = torch.zeros(rows, COLUMNS)
    tied = {"embedding": mine, "head": mine.detach(), **others}
    with pytest.raises(ts.LayoutMismatchError, match="as the destination ties the two") as caught:
        await ts.get_state_dict(k, tied)
    assert caught.value.details == {"overlapping": ["embedding", "head"]}
    assert torch.equal(mine, table)  # whole, and no mixture
    report = ts.StateDictReport()
    assert await ts.get_state_dict(k, tied, strict=False, report=report) is tied
    assert list(report.mismatched) == ["head"]
    assert "not the same as" in report.mismatched["head"]
    # Equal values may be stored twice, and be cast on their way.
    await ts.put_state_dict({"embedding": table, "head": table.clone(), **others}, k)
    mine.zero_()
    await ts.get_state_dict(k, tied)
    assert torch.equal(mine, table)
    half = mine.bfloat16()
    await ts.get_state_dict(k, {**tied, "embedding": half, "head": half}, cast=True)
    await ts.put_state_dict({"embedding": half, "head": table, **others}, k)
    await ts.get_state_dict(k, {**tied, "embedding": half, "head": half}, cast=True)
    assert torch.equal(half, table.bfloat16())


@SIZES
async def test_tied_destinations_of_different_shards_are_refused(shared, k, rows):
    whole = (2 * rows, COLUMNS)
    halves = [ts.TensorSlice((at, 0), (rows, COLUMNS), whole) for at in (0, rows)]
    first, second = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    for rank, box in enumerate(halves):
        other = (first.clone(), second)[rank]
        shards = {"a": ts.TensorShard(first, box), "b": ts.TensorShard(other, box)}
        await ts.put_state_dict(shards, k, participants=2, participant=rank)
    for rank, box in enumerate(halves):
        mine = ts.TensorShard(torch.zeros(rows, COLUMNS), box)
        if rank == 0:
            await ts.get_state_dict(k, {"a": mine, "b": mine})
        else:
            with pytest.raises(ts.LayoutMismatchError, match="ties the two"):
                await ts.get_state_dict(k, {"a": mine, "b": mine})
        assert torch.equal(mine.tensor, first)


# ---- strict -------------------------------------------------------------------------------


def _wrong(rows: int) -> dict[str, Any]:
    """Against ``_stored``: something of every kind is wrong, and much is right."""
    return {
        **_mine(rows),
        "w": torch.full((rows, COLUMNS + 1), -1.0),  # shape
        "layers": [{"w": torch.full((rows, COLUMNS), -1.0, dtype=torch.float64), "step": 5}, -1],
        "extra": torch.full((2,), -1.0),  # missing
        "more": {"x": 5},  # missing
        "scalar": torch.tensor(-1.0),
        "config": {"lr": torch.full((2,), -1.0), "names": None},  # an object into a tensor
        "pair": (torch.full((1,), -1.0).expand(rows), "mine"),  # memory that overlaps itself
        "nothing": torch.empty(0, 4),
    }


WRONG = {
    "missing": ["extra", "more.x"],
    "unexpected": ["config.none"],
    "mismatched": {"w", "layers.0.w", "layers.1", "config.lr", "pair.0", "nothing"},
}


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _tensors_of(inner)]
    return []


@SIZES
async def test_a_strict_get_names_everything_that_is_wrong_and_writes_nothing(shared, rows):
    theirs, mine = _stored(rows), _wrong(rows)
    ref = await ts.put_state_dict(theirs, "k")
    before = {**mine, "config": dict(mine["config"]), "layers": list(mine["layers"])}
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("k", mine)
    error = caught.value
    assert error.key == "k"
    assert error.details["missing"] == WRONG["missing"]
    assert error.details["unexpected"] == WRONG["unexpected"]
    assert set(error.details["mismatched"]) == WRONG["mismatched"]
    text = str(error)
    assert f"version {ref.version}" in text
    assert "nothing was written" in text
    for name in (*WRONG["missing"], *WRONG["unexpected"], *WRONG["mismatched"]):
        assert f"'{name}'" in text, name
    assert "2 missing" in text
    assert "1 unexpected" in text
    assert "6 mismatched" in text
    assert isinstance(error, ValueError)
    for tensor in _tensors_of(mine):
        assert (tensor == -1).all()
    assert_same(mine, before)
    assert mine["layers"][0]["step"] == 5


@SIZES
async def test_what_matches_is_filled_and_the_rest_reported(shared, caplog, rows):
    theirs, mine = _stored(rows), _wrong(rows)
    ref = await ts.put_state_dict(theirs, "k")
    report = ts.StateDictReport(missing=["from before"])
    with caplog.at_level(logging.WARNING, logger="torchstore_core"):
        assert await ts.get_state_dict("k", mine, strict=False, report=report) is mine
    assert report
    assert report.missing == WRONG["missing"]
    assert report.unexpected == WRONG["unexpected"]
    assert set(report.mismatched) == WRONG["mismatched"]
    assert "torch.float64" in report.mismatched["layers.0.w"]
    (record,) = caplog.records
    assert f"'k' version {ref.version}" in record.getMessage()
    assert str(report) in record.getMessage()
    for name in (*WRONG["missing"], *WRONG["unexpected"], *WRONG["mismatched"]):
        assert f"'{name}'" in str(report), name
    assert torch.equal(mine["own"], theirs["own"])  # this one fits
    assert mine["scalar"] == 2.5
    assert mine["layers"][0]["step"] == 4
    assert mine["pair"][1] == "theirs"
    assert mine["config"]["names"] == ["a", "b"]
    config, pair = mine["config"], mine["pair"]
    for left in (mine["w"], mine["layers"][0]["w"], mine["extra"], config["lr"], pair[0]):
        assert (left == -1).all()
    assert mine["layers"][1] == -1
    assert mine["more"] == {"x": 5}


async def test_a_warning_names_some_and_a_report_all(shared, caplog):
    """Readers of a few entries of a large model would log all of its names at each call."""
    await ts.put_state_dict({f"layer.{at}": at for at in range(300)}, "k")
    report = ts.StateDictReport()
    with caplog.at_level(logging.WARNING, logger="torchstore_core"):
        await ts.get_state_dict("k", {"layer.7": 0}, strict=False, report=report)
    (record,) = caplog.records
    assert "299 unexpected: 'layer.0', " in record.getMessage()
    assert record.getMessage().endswith(" and 279 more")
    assert str(report).count("'layer.") == 299


async def test_a_report_of_what_matches_is_empty(shared, caplog):
    await ts.put_state_dict({"w": torch.ones(2)}, "k")
    report = ts.StateDictReport(["old"], ["old"], {"old": "old"})
    for strict in (True, False):
        with caplog.at_level(logging.WARNING, logger="torchstore_core"):
            await ts.get_state_dict("k", {"w": torch.zeros(2)}, strict, report=report)
        assert not report
        assert str(report) == "everything matched"
    assert caplog.records == []
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get_state_dict("k", {}, report=report)
    assert report.unexpected == ["w"]  # a strict get fills it in as well


@pytest.mark.parametrize(
    ("destination", "match"),
    [
        (torch.zeros(3), r"float32 \[2\].*float32 \[3\]"),
        (torch.zeros(2, dtype=torch.float16), r"float32 \[2\].*float16"),
        (torch.zeros(2, dtype=torch.int32), "int32"),
        (torch.zeros(1).expand(2), "share memory"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2).to_sparse(), "sparse"),
        ("a str", "stored as a tensor, the destination is a str"),
        ({}, "stored as a tensor, the destination is a dict"),
        ([torch.zeros(2)], "missing"),
    ],
    ids=["shape", "dtype", "int", "overlap", "meta", "sparse", "object", "dict", "list"],
)
async def test_a_destination_that_does_not_fit_leaves_the_others_alone(shared, destination, match):
    await ts.put_state_dict({"a": torch.ones(300_000), "w": torch.ones(2), "n": 1}, "k")
    mine = {"a": torch.zeros(300_000), "w": destination, "n": 0}
    with pytest.raises(ts.LayoutMismatchError, match=match):
        await ts.get_state_dict("k", mine)
    assert not mine["a"].any()
    assert mine["n"] == 0
    assert mine["w"] is destination
    report = ts.StateDictReport()
    await ts.get_state_dict("k", mine, strict=False, report=report)
    assert mine["a"].all()
    assert mine["n"] == 1
    assert mine["w"] is destination
    assert report


async def test_a_destination_that_contradicts_itself_is_refused_before_asking(shared):
    before = (await ts.status()).operations.get("Fetch", 0)
    shard = ts.TensorShard(torch.zeros(2), ts.TensorSlice((0,), (3,), (4,)))
    with pytest.raises(ts.LayoutMismatchError, match="'w'"):
        await ts.get_state_dict("k", {"w": shard})
    with pytest.raises(ts.UnsupportedValueError, match="two entries are named"):
        await ts.get_state_dict("k", {"a": {"b": 1}, "a.b": 2})
    for wrong in ([], "w", torch.ones(2)):
        with pytest.raises(ts.UnsupportedValueError, match="dict of names"):
            await ts.get_state_dict("k", wrong)
    assert (await ts.status()).operations.get("Fetch", 0) == before


async def test_a_leaf_and_a_container_of_the_same_name_are_told_apart(shared):
    theirs = {"a.b": "leaf", "a": {"b": {"c": torch.ones(2), "d": "inner"}}, "l": [1, 2], "l.0": 3}
    await ts.put_state_dict(theirs, "k")
    mine = {"a.b": 0, "a": {"b": {"c": torch.zeros(2), "d": 0}}, "l": [0, 0], "l.0": 0}
    await ts.get_state_dict("k", mine)
    assert_same(mine, theirs)


@SIZES
async def test_an_entry_may_be_a_slice_of_the_readers_choice(shared, rows):
    weight = torch.randn(rows, COLUMNS)
    await ts.put_state_dict({"w": weight, "in": {"w": weight + 1}}, "k")
    part = ts.TensorSlice((1, 5), (2, 70), (rows, COLUMNS))
    shard = ts.TensorShard(torch.full((70, 2), -1.0).t(), part)
    mine = {"w": shard, "in": {"w": torch.zeros(rows, COLUMNS)}}
    await ts.get_state_dict("k", mine)
    assert mine["w"] is shard
    assert torch.equal(bits(shard.tensor), bits(weight[1:3, 5:75]))
    wrong = ts.TensorShard(torch.zeros(2, 70), ts.TensorSlice((1, 5), (2, 70), (rows, COLUMNS + 1)))
    with pytest.raises(ts.LayoutMismatchError, match=r"1 mismatched.*'w'"):
        await ts.get_state_dict("k", {"w": wrong, "in": {"w": None}})


@pytest.mark.parametrize("count", [2, 6, 40])
async def test_entries_whose_destinations_overlap_are_refused_however_strict(shared, count):
    stored = {f"{at}": torch.full((300, COLUMNS), float(at)) for at in range(count)}
    await ts.put_state_dict(stored, "k")
    memory = torch.full((600, COLUMNS), -1.0)
    mine = {name: torch.full((300, COLUMNS), -1.0) for name in stored}
    mine |= {"0": memory[:300], "1": memory[299:-1]}
    for strict in (True, False):
        with pytest.raises(ts.LayoutMismatchError, match="'0' and '1' overlap in memory"):
            await ts.get_state_dict("k", mine, strict=strict)
        assert all((t == -1).all() for t in [memory, *mine.values()])
    mine["1"] = memory[300:]
    assert_same(await ts.get_state_dict("k", mine), stored)


async def test_a_whole_and_its_parts_are_destinations_if_only_either_is_stored(shared):
    """A model with a fused weight reads what was put of it, fused or not."""
    whole = torch.randn(6, COLUMNS)
    mine = torch.zeros(6, COLUMNS)
    destinations = {"qkv": mine, "q": mine[:2], "k": mine[2:4], "v": mine[4:]}
    for stored in ({"qkv": whole}, {"q": whole[:2], "k": whole[2:4], "v": whole[4:]}):
        mine.zero_()
        await ts.put_state_dict(stored, "k")
        await ts.get_state_dict("k", destinations, strict=False)
        assert torch.equal(mine, whole)
    await ts.put_state_dict(destinations, "k")
    with pytest.raises(ts.LayoutMismatchError, match=r"'[qk]' and 'qkv' overlap"):
        await ts.get_state_dict("k", destinations)
