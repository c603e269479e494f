"""State dicts that cannot be stored, and arguments that make no sense: refused, nothing changed."""

from __future__ import annotations

import pytest
import torch
from tests.trees import assert_same

import torchstore_core as ts


@pytest.mark.parametrize(
    ("state_dict", "match"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"two entries are named 'a\.b'"),
        ({1: 1, "1": 2}, "two entries are named '1'"),
        ({"": torch.ones(1)}, "name is empty"),
        ({(1, 2): torch.ones(1)}, "names of entries"),
        ({"m": torch.empty(3, device="meta"), "ok": 1}, "meta"),
        ({"ok": 1, "s": torch.ones(3).to_sparse()}, "sparse"),
        ({"l": [torch.ones(1), (x for x in ())]}, r"l\.1"),
        ([torch.ones(1)], "dict of names"),
        ({"x" * 5000: torch.ones(1)}, "4096"),
    ],
    ids=["clash", "int", "empty", "tuple", "meta", "sparse", "function", "list", "long"],
)
async def test_a_state_dict_that_cannot_be_stored_changes_nothing(shared, state_dict, match):
    before = await ts.put_state_dict({"w": torch.ones(2)}, "k")
    with pytest.raises(ts.UnsupportedValueError, match=match):
        await ts.put_state_dict(state_dict, "k")
    assert await ts.latest_version("k") == before.version
    assert (await ts.stat("k")).pending == []
    assert (await ts.get_state_dict("k"))["w"].tolist() == [1, 1]


async def test_arguments_that_make_no_sense(shared):
    for arguments in (
        {"participants": 0},
        {"participants": 1.0},
        {"keep": 0},
        {"keep": True},
        {"version": 0},
        {"version": "1"},
        {"transfer_dtype": torch.int8},
        {"transfer_dtype": torch.complex64},
        {"transfer_dtype": "bfloat16"},
        {"transfer_dtype": {"*": torch.int8}},
        {"transfer_dtype": {5: torch.float16}},
    ):
        with pytest.raises(ts.ConfigurationError):
            await ts.put_state_dict({"w": torch.ones(1)}, "k", **arguments)
    with pytest.raises(ts.UnsupportedValueError, match="a key is a str"):
        await ts.put_state_dict("k", {"w": torch.ones(1)})
    assert not await ts.exists("k")
    await ts.put_state_dict({"w": torch.ones(1)}, "k")
    for wrong in ("1", 1.5, 1 << 70):
        with pytest.raises(ts.UnsupportedValueError, match="min_version"):
            await ts.get_state_dict("k", min_version=wrong)
    with pytest.raises(ts.ConfigurationError, match="version"):
        await ts.get_state_dict("k", version=0)
    with pytest.raises(ts.ConfigurationError, match="report is a StateDictReport"):
        await ts.get_state_dict("k", report=[])
    with pytest.raises(ts.ConfigurationError, match="below min_version"):
        await ts.get_state_dict("k", version=2, min_version=3)
    assert (await ts.get_state_dict("k"))["w"].item() == 1


class _Own:
    """Only pickle can keep it."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _Own

    __hash__ = None


async def test_pickle_is_needed_only_for_what_needs_it(shared):
    plain = {"w": torch.ones(3), "set": {1, 2}, "in": {"t": (1, "x", b"y", None)}}
    await ts.put_state_dict(plain, "plain", allow_pickle=False)
    assert_same(await ts.get_state_dict("plain", allow_pickle=False), plain)
    own = {"w": torch.ones(3), "in": {"own": _Own()}}
    with pytest.raises(ts.UnsafeObjectError, match=r"in\.own"):
        await ts.put_state_dict(own, "own", allow_pickle=False)
    assert not await ts.exists("own")
    await ts.put_state_dict(own, "own")
    assert_same(await ts.get_state_dict("own"), own)
    with pytest.raises(ts.UnsafeObjectError, match=r"in\.own"):
        await ts.get_state_dict("own", allow_pickle=False)
    with pytest.raises(ts.UnsafeObjectError):
        await ts.get("own", allow_pickle=False)
    assert (await ts.get("own/w", allow_pickle=False)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrong", ["no", 0, None])
async def test_bools_are_bools(shared, k, wrong):
    """Text that means no would be true."""
    value = {"w": torch.ones(3)}
    await ts.put_state_dict(value, k)
    mine = {"w": torch.zeros(3)}
    for name, call in {
        "strict": lambda: ts.get_state_dict(k, mine, strict=wrong),
        "cast": lambda: ts.get_state_dict(k, mine, cast=wrong),
        "partial": lambda: ts.put_state_dict(value, k, partial=wrong),
        "blocking": lambda: ts.put_state_dict(value, k, blocking=wrong),
        "rewind": lambda: ts.put(k, 1, version=9, rewind=wrong),
        "undo": lambda: ts.drain(0, undo=wrong),
        "wait": lambda: ts.drain(0, wait=wrong),
    }.items():
        with pytest.raises(ts.ConfigurationError, match=f"{name} is a bool"):
            await call()
    assert not mine["w"].any()
    assert (await ts.stat(k)).version == 1


async def test_an_optimizer_without_state_is_not_filled_and_the_error_says_how(shared):
    """Its state dict has an empty dict as its state, and no memory for what is stored of it."""
    weight = torch.nn.Parameter(torch.randn(300, 300))
    trained = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.randn(300, 300)
    trained.step()
    await ts.put_state_dict(trained.state_dict(), "optimizer")
    fresh = torch.optim.AdamW([torch.nn.Parameter(weight.detach().clone())], lr=0.1)
    for destination in (fresh.state_dict(), fresh.state_dict() | {"state": None}):
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_state_dict("optimizer", destination)
        assert caught.value.details["missing"] == ["state"]
        text = str(caught.value)
        assert f"'state' is {destination['state']!r} in the destination" in text
        assert "3 entries stored in it" in text
        assert "optimizer.load_state_dict(await get_state_dict(key))" in text

    # Both ways that it names:
    fresh.load_state_dict(await ts.get_state_dict("optimizer"))
    assert_same(fresh.state_dict(), trained.state_dict())
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(300, 300))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.zeros(300, 300)
    other.step()
    other.load_state_dict(await ts.get_state_dict("optimizer", other.state_dict()))
    assert_same(other.state_dict(), trained.state_dict())


async def test_a_module_on_the_meta_device_is_not_filled_and_the_error_says_how(shared):
    stored = torch.nn.Linear(3, 2)
    await ts.put_state_dict({"model": stored.state_dict(), "step": 1}, "meta")
    with torch.device("meta"):
        mine = torch.nn.Linear(3, 2)
    with pytest.raises(
        ts.LayoutMismatchError, match=r"2 mismatched: 'model\.weight': a meta"
    ) as caught:
        await ts.get_state_dict("meta", {"model": mine.state_dict(), "step": 0})
    assert "module.load_state_dict(await get_state_dict(key), assign=True)" in str(caught.value)
    mine.load_state_dict((await ts.get_state_dict("meta"))["model"], assign=True)
    assert torch.equal(mine.weight, stored.weight)
    with torch.device("meta"):
        mine = torch.nn.Linear(3, 2)
    mine.to_empty(device="cpu")
    await ts.get_state_dict("meta", {"model": mine.state_dict(), "step": 0})
    assert torch.equal(mine.weight, stored.weight)


async def test_nothing_is_hinted_about_other_containers(shared):
    await ts.put_state_dict({"state": {"w": torch.ones(2)}, "state2": {"w": torch.ones(2)}}, "k")
    for wrong in ({"other": {}}, {"state": 3}, {"stat": None}):
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_state_dict("k", wrong)
        assert "has no memory" not in str(caught.value)


async def test_names_that_differ_by_a_wrapper_are_said_to(shared):
    """A compiled module, or one in DistributedDataParallel, has other names than what is in it."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    plain = module.state_dict()
    wrapped = {f"module.{name}": tensor for name, tensor in plain.items()}
    compiled = {name.replace("0.", "0._orig_mod."): tensor for name, tensor in plain.items()}
    for stored, wanted, parts in (
        (wrapped, plain, "'module'"),
        (plain, wrapped, "'module'"),
        (compiled, plain, "'_orig_mod'"),
        ({"model": compiled}, {"model": wrapped}, "'_orig_mod' and 'module'"),
    ):
        await ts.put_state_dict(stored, "wrapped")
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_state_dict("wrapped", wanted)
        assert f"The names differ only by {parts}, which a wrapper adds" in str(caught.value)
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("wrapped", wrapped | {"lr": 0.1})
    assert "differ only" not in str(caught.value)


async def test_an_error_of_many_differences_begins_with_what_to_do(shared):
    """It has some of the names, and how many there are; its details have all."""
    plain = {f"layers.{index}.weight": torch.ones(1) for index in range(400)}
    wrapped = {f"module.{name}": tensor for name, tensor in plain.items()}
    await ts.put_state_dict(plain, "many")
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("many", wrapped)
    error, text = caught.value, str(caught.value)
    assert error.details["missing"] == [*wrapped]
    assert sorted(error.details["unexpected"]) == sorted(plain)
    assert len(text) < 2500
    assert "400 missing: " in text
    assert "400 unexpected: " in text
    assert text.count("'module.layers.") == text.count("'layers.") == 20
    assert text.count("and 380 more") == 2
    assert text.index("The names differ only by 'module'") < text.index("400 missing")
    assert text.endswith("(all of them are in the `details` of this error)")

    await ts.put_state_dict({name: torch.ones(2) for name in plain}, "many")
    with pytest.raises(ts.LayoutMismatchError) as caught:
        await ts.get_state_dict("many", plain)
    assert len(caught.value.details["mismatched"]) == 400
    assert "400 mismatched: " in str(caught.value)
    assert "and 380 more" in str(caught.value)


async def test_an_error_of_dtypes_alone_says_that_they_can_be_cast(shared):
    await ts.put_state_dict({"a": torch.ones(3).bfloat16(), "b": torch.ones(3)}, "half")
    mine = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(ts.LayoutMismatchError, match="Give cast=True"):
        await ts.get_state_dict("half", mine)
    assert not any(tensor.any() for tensor in mine.values())
    await ts.get_state_dict("half", mine, cast=True)
    assert all(tensor.all() for tensor in mine.values())
    for wrong in ({"a": torch.zeros(4)}, {"a": torch.zeros(3, dtype=torch.int32)}, {"a": 1}):
        with pytest.raises(ts.LayoutMismatchError) as caught:
            await ts.get_state_dict("half", mine | wrong)
        assert "cast=True" not in str(caught.value)
