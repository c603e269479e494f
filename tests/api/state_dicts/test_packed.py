"""The packed form: one blob and a header, to a state dict and back, filling tensors in place."""

from __future__ import annotations

import asyncio
import datetime
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from tests.support import bits
from tests.trees import assert_same, state_dicts

import torchstore_core as ts
from torchstore_core import TensorShard, TensorSlice, TorchStoreStateDict
from torchstore_core.clients.values.sharding import ShardList

pack = TorchStoreStateDict.from_state_dict
_ALL = (getattr(torch, name) for name in dir(torch))
DTYPES = sorted({d for d in _ALL if isinstance(d, torch.dtype)}, key=str)
PLAIN = [d for d in DTYPES if not str(d).startswith(("torch.qint", "torch.quint"))]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def again(packed: TorchStoreStateDict, **how: Any) -> TorchStoreStateDict:
    return TorchStoreStateDict.from_bytes(packed.to_bytes(), **how)


def shard(tensor: torch.Tensor, offsets: tuple[int, ...], *whole: int, **mesh: Any) -> TensorShard:
    return TensorShard(tensor, TensorSlice(offsets, tuple(tensor.shape), whole, **mesh))


def places(packed: TorchStoreStateDict) -> dict[str, tuple[int, int]]:
    return {n: (r.offset, r.nbytes) for n, (r,) in packed.references.items()}


# ---- to a state dict and back -------------------------------------------------------------


@given(state_dicts())
def test_any_state_dict_comes_back_the_same_directly_and_through_bytes(tree):
    try:
        packed = pack(tree)
    except ts.UnsupportedValueError:  # two entries of one name, say
        assume(False)
    assert_same(packed.to_state_dict(), tree)
    assert_same(again(packed).to_state_dict(), tree)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_in_every_form_keeps_its_bits(dtype):
    base = random_bits(dtype, 6, 96)
    forms = {
        "contiguous": base,
        "transposed": base.t(),
        "strided": base[1::2, ::3],
        "expanded": base[:1].expand(6, -1),
        "0-dim": base[0, 0],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base, requires_grad=dtype.is_floating_point),
        "large": random_bits(dtype, 1500, 1024 // dtype.itemsize),
        "large transposed": random_bits(dtype, 1500, 1024 // dtype.itemsize).t(),
    }
    expected = {name: bits(tensor).clone() for name, tensor in forms.items()}
    for packed in (pack(forms), again(pack(forms))):
        got = packed.to_state_dict()
        assert list(got) == list(forms)
        for name, tensor in got.items():
            assert type(tensor) is torch.Tensor
            assert not tensor.requires_grad
            assert (tensor.dtype, tensor.shape) == (dtype, forms[name].shape)
            assert torch.equal(bits(tensor), expected[name]), name


def test_conjugate_and_negative_views_keep_their_values():
    tensor = torch.randn(5, 4, dtype=torch.complex64)
    got = pack({"conj": tensor.conj(), "neg": tensor.conj().imag}).to_state_dict()
    assert torch.equal(got["conj"], tensor.conj())
    assert torch.equal(got["neg"], -tensor.imag)


def test_the_blob_is_one_run_of_aligned_tensors_in_order():
    sizes = [3, 16, 17, 1, 0, 64]
    packed = pack({str(n): torch.arange(float(n)) for n in sizes})
    assert packed.blob.dtype == torch.uint8
    assert packed.blob.is_contiguous()
    assert packed.nbytes == packed.blob.numel()
    end = 0
    for name, (offset, nbytes) in places(packed).items():
        assert offset == end
        assert nbytes == 4 * int(name)
        end += -(-nbytes // 64) * 64
        held = packed.blob[offset : offset + nbytes].view(torch.float32)
        assert torch.equal(held, torch.arange(float(name)))
    assert packed.nbytes == end


def test_to_state_dict_gives_views_and_not_copies():
    packed = pack({"a": torch.zeros(100), "b": {"c": torch.zeros(3, 3, dtype=torch.int8)}})
    first, second = packed.to_state_dict(), packed.to_state_dict()
    first["a"][7] = 1
    first["b"]["c"][2, 2] = 5
    assert second["a"][7] == 1
    assert packed.blob[28:32].view(torch.float32) == 1
    low, high = packed.blob.data_ptr(), packed.blob.data_ptr() + packed.nbytes
    for tensor in (second["a"], second["b"]["c"]):
        assert low <= tensor.data_ptr() < high


def test_it_is_a_snapshot():
    weight = torch.zeros(1 << 20)
    packed = pack({"w": weight, "t": weight.view(1024, 1024).t(), "n": [1]})
    weight += 1
    got = packed.to_state_dict()
    assert not got["w"].any()
    assert not got["t"].any()
    got["n"].append(2)
    assert packed.to_state_dict()["n"] == [1]


def test_tied_weights_are_stored_once_and_are_one_tensor_again():
    w = torch.randn(100, 10)
    tied = {"embed": w, "head": {"w": torch.nn.Parameter(w)}, "copy": w.clone(), "t": w.t()}
    packed = pack(tied)
    at = places(packed)
    assert at["embed"] == at["head.w"]
    assert len({at[name] for name in ("embed", "copy", "t")}) == 3
    assert packed.nbytes == 3 * 4032
    for one in (packed, again(packed)):
        got = one.to_state_dict()
        assert got["embed"] is got["head"]["w"]
        assert got["copy"] is not got["embed"]
        assert_same(got, tied)


def test_tensors_that_only_begin_at_one_place_are_not_taken_for_tied():
    base = torch.arange(16.0)
    several = {
        "all": base,
        "half": base[:8],
        "square": base.view(4, 4),
        "bits": base.view(torch.int32),
    }
    packed = pack(several)
    assert_same(packed.to_state_dict(), several)
    assert len(set(places(packed).values())) == 4


def test_empty_tensors_are_never_tied():
    packed = pack({"a": torch.empty(0), "b": torch.empty(0, 7), "c": torch.empty(0)})
    assert packed.nbytes == 0
    for one in (packed, again(packed)):
        got = one.to_state_dict()
        assert [tuple(t.shape) for t in got.values()] == [(0,), (0, 7), (0,)]
        assert got["a"] is not got["c"]


def test_an_empty_state_dict():
    for packed in (pack({}), again(pack({}))):
        assert packed.to_state_dict() == {}
        assert len(packed) == 0
        assert packed.participants == 1


async def test_it_works_on_a_running_event_loop_and_in_inference_mode():
    with torch.inference_mode():
        state_dict = {"w": torch.randn(700, 500), "t": torch.randn(700, 500).t()}
        packed = pack(state_dict)
        loaded = TorchStoreStateDict.from_bytes(bytearray(packed.to_bytes()))
    for one in (packed, loaded):
        got = one.to_state_dict()
        assert_same(got, state_dict)
        got["t"] += 1  # no inference tensor: it can be written to
        one.blob.zero_()
        assert not got["w"].any()
    other = await asyncio.to_thread(pack, state_dict)
    assert_same(other.to_state_dict(), state_dict)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.eye(2).to_mkldnn(), "opaque"),
    ],
    ids=["meta", "sparse", "opaque"],
)
def test_what_cannot_be_stored_is_refused_by_name(value, says):
    with pytest.raises(ts.UnsupportedValueError, match=f"'a.b'.*{says}"):
        pack({"a": {"b": value}})


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ts.UnsupportedValueError, match="list"):
        pack([torch.ones(1)])
    for participants in (0, -1, 1.5, True):
        with pytest.raises(ts.ConfigurationError, match="participants"):
            pack({}, participants=participants)
    bad_shard = TensorShard(torch.ones(3), TensorSlice((2,), (3,), (4,)))
    with pytest.raises(ts.LayoutMismatchError, match="'w'"):
        pack({"w": bad_shard})


# ---- other values -------------------------------------------------------------------------


def test_objects_are_encoded_without_pickle():
    values = {"step": 7, "lr": 1e-3, "names": ("a", {"b"}), "raw": b"\x00", "nothing": None}
    packed = pack({"meta": values, "w": torch.ones(1)})
    data = packed.to_bytes()
    assert_same(TorchStoreStateDict.from_bytes(data).to_state_dict()["meta"], values)
    assert packed.nbytes == 64  # they are in the header


def test_what_needs_pickle_is_refused_unless_allowed_on_both_sides():
    state_dict = {"when": datetime.timedelta(3), "w": torch.ones(2)}
    with pytest.raises(ts.UnsafeObjectError, match="'when'"):
        pack(state_dict)
    packed = pack(state_dict, allow_pickle=True)
    assert packed.to_state_dict()["when"] == datetime.timedelta(3)
    careful = again(packed)
    with pytest.raises(ts.UnsafeObjectError, match="'when'"):
        careful.to_state_dict()
    assert again(packed, allow_pickle=True).to_state_dict()["when"] == datetime.timedelta(3)


# ---- shards -------------------------------------------------------------------------------


def test_of_a_sharded_tensor_only_the_local_part_is_stored():
    local = torch.randn(2, 6)
    mine = shard(local, (2, 0), 400, 6, mesh_shape=(200,), coordinates=(1,))
    packed = pack({"layer": {"w": mine}, "b": torch.ones(3)})
    assert packed.nbytes == 128
    for one in (packed, again(packed)):
        got = one.to_state_dict()["layer"]["w"]
        assert isinstance(got, TensorShard)
        assert torch.equal(got.tensor, local)
        assert got.tensor_slice == mine.tensor_slice
        assert one.participants == 200
        assert one.participant == "1"
        (reference,) = one.references["layer.w"]
        assert reference.tensor_slice == mine.tensor_slice
        assert reference.shape == (2, 6)


def test_who_puts_is_the_rank_or_the_place_in_the_largest_mesh(monkeypatch):
    small = shard(torch.ones(1), (0,), 2, mesh_shape=(2,), coordinates=(0,))
    large = shard(torch.ones(1), (3,), 4, mesh_shape=(2, 2), coordinates=(1, 0))
    packed = pack({"a": small, "b": large})
    assert (packed.participants, packed.participant) == (4, "1,0")
    monkeypatch.setenv("RANK", "3")
    packed = pack({"a": small, "b": large})
    assert (packed.participants, packed.participant) == (4, "3")
    packed = pack({"a": small}, participants=5, participant=4)
    assert (packed.participants, packed.participant) == (5, "4")
    assert (pack({}).participants, pack({}).participant) == (1, "")


def test_tied_shards_are_stored_once_if_they_are_the_same_slice():
    local = torch.randn(2, 3)
    one, same = shard(local, (0, 0), 4, 3), shard(local, (0, 0), 4, 3)
    other = shard(local, (2, 0), 4, 3)
    packed = pack({"one": one, "same": same, "other": other})
    at = places(packed)
    assert at["one"] == at["same"] != at["other"]
    got = again(packed).to_state_dict()
    assert got["one"].tensor is got["same"].tensor
    assert got["other"].tensor_slice.offsets == (2, 0)


def test_several_pieces_of_one_tensor_are_one_entry():
    parts = ShardList(
        [shard(torch.ones(1, 2), (0, 0), 4, 2), shard(torch.zeros(1, 2), (2, 0), 4, 2)]
    )
    packed = pack({"l": [parts, torch.ones(1)]})
    assert [len(found) for found in packed.references.values()] == [2, 1]
    got = again(packed).to_state_dict()["l"]
    assert [part.tensor_slice.offsets for part in got[0]] == [(0, 0), (2, 0)]
    assert torch.equal(got[0][1].tensor, torch.zeros(1, 2))
    assert pack({"l": got}).references == packed.references  # and stay one


def test_slices_of_other_integers_than_int_are_plain_in_the_header():
    sizes = torch.tensor([2, 3]).numpy()
    mine = TensorShard(torch.ones(2, 3), TensorSlice([0, 0], tuple(sizes), [4, sizes[1]]))
    (reference,) = again(pack({"w": mine})).references["w"]
    assert reference.tensor_slice == TensorSlice((0, 0), (2, 3), (4, 3))


# ---- filling in place ---------------------------------------------------------------------


def test_filling_in_place_fills_tensors_of_any_strides_and_replaces_other_values():
    stored = {"a": {"w": torch.randn(40, 30)}, "l": [torch.randn(3), (torch.ones(2), 5)], "n": 7}
    packed = pack(stored)
    big = torch.zeros(80, 60)
    parameter = torch.nn.Parameter(torch.zeros(3))
    mine = {"a": {"w": big[::2, ::2]}, "l": [parameter, (torch.zeros(2), None)], "n": 0}
    weight, version = mine["a"]["w"], parameter._version
    assert packed.to_state_dict(mine) is mine
    assert_same(mine, {**stored, "l": [parameter, stored["l"][1]]})
    assert mine["a"]["w"] is weight
    assert mine["l"][0] is parameter
    assert torch.equal(parameter, stored["l"][0])
    assert parameter._version > version  # autograd knows
    assert not big[1::2].any()


def test_filling_tensors_of_inference_mode():
    packed = pack({"w": torch.randn(300, 200)})
    with torch.inference_mode():
        mine = {"w": torch.zeros(200, 300).t()}
        packed.to_state_dict(mine)
    assert_same(mine, packed.to_state_dict())


def test_filling_none_gives_a_view():
    packed = pack({"w": torch.ones(3)})
    got = packed.to_state_dict({"w": None})
    got["w"][0] = 5
    assert packed.to_state_dict()["w"][0] == 5


def test_filling_reshards_as_far_as_the_blob_reaches():
    whole = torch.randn(8, 6)
    packed = pack({"w": whole, "s": shard(whole[2:6], (2, 0), 8, 6)})
    column = shard(torch.zeros(8, 2), (0, 4), 8, 6)
    inner = shard(torch.zeros(3, 3), (3, 1), 8, 6)
    packed.to_state_dict({"w": column, "s": inner})
    assert torch.equal(column.tensor, whole[:, 4:])
    assert torch.equal(inner.tensor, whole[3:6, 1:4])

    outside = shard(torch.zeros(3, 3), (4, 1), 8, 6)
    mine = {"w": torch.zeros(8, 6), "s": outside}
    with pytest.raises(ts.LayoutMismatchError, match=r"\[1, 3\] at \[6, 1\] is not here"):
        packed.to_state_dict(mine)
    assert not mine["w"].any()  # nothing was written
    assert not outside.tensor.any()


def test_filling_from_several_pieces():
    whole = torch.randn(6, 2)
    packed = pack(
        {"w": ShardList([shard(whole[:2], (0, 0), 6, 2), shard(whole[2:6], (2, 0), 6, 2)])}
    )
    mine = torch.zeros(6, 2)
    packed.to_state_dict({"w": mine})
    assert torch.equal(mine, whole)


def test_filling_says_everything_that_does_not_match_and_writes_nothing():
    packed = pack({"ok": torch.ones(2), "shape": torch.ones(3), "dtype": torch.ones(4), "only": 1,
                   "object": 3, "tensor": torch.ones(1)})  # fmt: skip
    mine = {
        "ok": torch.zeros(2),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(4, dtype=torch.float64),
        "object": torch.zeros(1),
        "tensor": "text",
        "absent": torch.zeros(1),
    }
    with pytest.raises(ts.LayoutMismatchError, match="nothing was written") as caught:
        packed.to_state_dict(mine)
    details = caught.value.details
    assert details["missing"] == ["absent"]
    assert details["unexpected"] == ["only"]
    assert set(details["mismatched"]) == {"shape", "dtype", "object", "tensor"}
    for name in ("absent", "only", "shape", "dtype", "object", "tensor"):
        assert repr(name) in str(caught.value)
    assert not mine["ok"].any()
    assert mine["tensor"] == "text"
    with pytest.raises(ts.LayoutMismatchError, match=r"1 missing: 'absent'$"):
        pack({}).to_state_dict({"absent": None})
    with pytest.raises(ts.LayoutMismatchError, match=r"1 unexpected: 'only'$"):
        pack({"only": 1}).to_state_dict({})


def test_filling_destinations_that_share_memory_once():
    w = torch.randn(4)
    mine = torch.zeros(4)
    pack({"a": w, "b": w}).to_state_dict({"a": mine, "b": mine})
    assert torch.equal(mine, w)
