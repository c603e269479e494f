"""What a tensor is when it is put, and what cannot be put."""

from __future__ import annotations

import pytest
import torch
from tests.support import bits
from torch.utils._python_dispatch import TorchDispatchMode

import torchstore_core as ts

SIZES = pytest.mark.parametrize("numel", [12, 600_000], ids=["small", "large"])


@SIZES
async def test_the_source_may_change_right_after_the_put(shared, numel):
    tensor = torch.arange(numel)
    await ts.put("t", tensor)
    tensor.zero_()
    assert torch.equal(await ts.get("t"), torch.arange(numel))


@SIZES
async def test_a_get_is_the_readers_own(shared, numel):
    await ts.put("t", torch.arange(numel))
    mine = await ts.get("t")
    mine.zero_()
    assert torch.equal(await ts.get("t"), torch.arange(numel))


@SIZES
async def test_tied_weights_are_each_stored_whole(shared, numel):
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.randn(numel))
    module.second = module.first
    sources = {
        "first": module.first,
        "second": module.second,
        "row": module.first.view(2, -1)[1],
        "overlapping": module.first[: numel // 2 + 3],
        "reversed order": module.first.view(2, -1).t(),
    }
    await ts.put_batch(sources)
    got = await ts.get_batch(list(sources))
    for key, source in sources.items():
        assert torch.equal(bits(got[key]), bits(source)), key
    got["first"].zero_()  # what came back is tied to nothing
    assert torch.equal(got["second"], module.second)


@SIZES
async def test_gradients_stay_behind(shared, numel):
    leaf = torch.randn(numel, requires_grad=True)
    product = leaf * 2
    await ts.put_batch({"leaf": leaf, "product": product})
    for key, source in (("leaf", leaf), ("product", product)):
        got = await ts.get(key)
        assert not got.requires_grad
        assert got.grad_fn is None
        assert torch.equal(got, source.detach())
    product.sum().backward()  # the put did not disturb the graph
    assert torch.equal(leaf.grad, torch.full((numel,), 2.0))


@SIZES
async def test_inference_tensors_go_both_ways(shared, numel):
    with torch.inference_mode():
        source = torch.randn(numel)
        destination = torch.zeros(numel)
    await ts.put("t", source)
    await ts.get("t", destination)
    assert torch.equal(destination, source)
    with torch.inference_mode():
        assert torch.equal(await ts.get("t"), source)


@SIZES
async def test_inference_tensors_are_filled_and_cast(shared, numel):
    source = torch.randn(numel)
    with torch.inference_mode():
        destination = torch.zeros(numel, dtype=torch.bfloat16)
    await ts.put_state_dict({"w": source}, "k")
    await ts.get_state_dict("k", {"w": destination}, cast=True)
    assert torch.equal(destination, source.bfloat16())


@SIZES
async def test_views_with_an_offset_store_only_what_they_show(shared, numel):
    base = torch.arange(numel * 4)
    await ts.put("t", base[numel : 2 * numel])
    got = await ts.get("t")
    assert torch.equal(got, torch.arange(numel, 2 * numel))
    assert (await ts.stat("t")).nbytes == numel * 8


@pytest.mark.parametrize(
    "shape",
    [(1,) * 20, (3, 1, 2, 1, 4), (2,) * 16, (1, 90_000, 1), (2,) * 12 + (1,) * 60],
    ids=lambda shape: f"{len(shape)}",
)
async def test_many_dimensions(shared, shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    await ts.put_batch({"t": tensor, "permuted": tensor.permute(*range(1, len(shape)), 0)})
    assert torch.equal(await ts.get("t"), tensor)
    assert torch.equal(await ts.get("permuted"), tensor.permute(*range(1, len(shape)), 0))


async def test_channels_last_comes_back_row_major_with_equal_values(shared):
    image = torch.randn(2, 64, 96, 96).to(memory_format=torch.channels_last)
    await ts.put("image", image)
    got = await ts.get("image")
    assert torch.equal(got, image)
    assert got.is_contiguous()


async def test_a_plain_subclass_is_stored_as_a_tensor(shared):
    class Tagged(torch.Tensor):
        pass

    await ts.put("t", torch.arange(5).as_subclass(Tagged))
    got = await ts.get("t")
    assert type(got) is torch.Tensor
    assert got.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["context", "default"])
async def test_a_default_device_does_not_leak_into_the_store(shared, how):
    """Models are built under ``torch.device("meta")``, then filled from a store."""
    small, large = torch.arange(12), torch.arange(600_000).view(600, 1000)
    column = ts.TensorSlice((0, 1), (600, 2), (600, 1000))
    values = {"small": small, "large": large, "empty": torch.empty(0), "object": {"a": (1,)}}

    async def check() -> None:
        await ts.put_batch(values)
        await ts.put("transposed", large.t())
        got = await ts.get_batch(list(values))
        assert got["small"].device.type == got["large"].device.type == "cpu"
        assert got["empty"].device.type == "cpu"
        assert torch.equal(got["small"], small)
        assert torch.equal(got["large"], large)
        assert got["object"] == {"a": (1,)}
        assert torch.equal(await ts.get("transposed"), large.t())
        assert torch.equal(await ts.get("large", None, column), large[:, 1:3])
        inner = ts.TensorSlice((2,), (3,), (12,))
        assert torch.equal(await ts.get("small", None, inner), small[2:5])

    if how == "context":
        with torch.device("meta"):
            await check()
    else:
        torch.set_default_device("meta")
        try:
            await check()
        finally:
            torch.set_default_device(None)


# ---- refused ------------------------------------------------------------------------------


class _Wrapper(torch.Tensor):
    """Someone's tensor that only intercepts operations."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError("has no bytes")


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(3))


REFUSED = {
    "meta": lambda: torch.empty(3, device="meta"),
    "meta parameter": lambda: torch.nn.Linear(2, 2, device="meta").weight,
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "NestedTensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "FakeTensor": _fake,
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "_Wrapper": lambda: torch.Tensor._make_wrapper_subclass(_Wrapper, (3,)),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
async def test_refused_by_name(shared, name):
    tensor = REFUSED[name]()
    said = name.split()[0]
    with pytest.raises(
        ts.UnsupportedValueError, match=rf"^'r': .*{said}.* cannot be stored; "
    ) as e:
        await ts.put("r", tensor)
    assert e.value.key == "r"
    assert isinstance(e.value, TypeError)
    with pytest.raises(ts.UnsupportedValueError, match=said):
        await ts.put_batch({"fine": 1, "r": tensor})
    assert await ts.keys() == []


async def test_a_fake_tensor_inside_of_an_object_is_refused_as_that(shared):
    for value in ({"a": _fake()}, [1, torch.nn.Parameter(_fake())]):
        with pytest.raises(ts.UnsupportedValueError, match=r"^'r': a FakeTensor .*no data"):
            await ts.put("r", value)
    with pytest.raises(ts.UnsupportedValueError, match=r"'a': a FakeTensor .*no data"):
        await ts.put_state_dict({"a": _fake()}, "r")
    assert await ts.keys() == []


async def test_nothing_is_moved_inside_of_a_fake_tensor_mode(shared):
    """What torch does to the tensors there does not happen, and new ones have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real, large = torch.ones(3), torch.ones(300, 300)
    await ts.put_batch({"real": real, "large": large})
    await ts.put_state_dict({"w": large}, "state")
    for mode in (FakeTensorMode(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            for call in [
                lambda: ts.put("r", real),
                lambda: ts.put("r", torch.nn.Parameter(torch.empty(3))),
                lambda: ts.put_batch({"r": large}),
                lambda: ts.put_object(large),
                lambda: ts.put_state_dict({"w": real}, "r", transfer_dtype=torch.bfloat16),
                lambda: ts.get("large"),
                lambda: ts.get("real", torch.empty(3)),
                lambda: ts.get_batch(["real", "large"]),
                lambda: ts.get_state_dict("state"),
            ]:
                with pytest.raises(ts.UnsupportedValueError, match="inside of a FakeTensorMode"):
                    await call()
            assert await ts.exists("large")
    assert torch.equal(await ts.get("large"), large)
    assert not await ts.exists("r")


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(
    "expanded",
    [
        lambda: torch.zeros(1, 1).expand(1 << 31, 1 << 31),
        lambda: torch.zeros(1, dtype=torch.float64).expand((1 << 61) + 1),
        lambda: torch.zeros(1, dtype=torch.uint8).expand(1 << 62),
    ],
    ids=["2**64 bytes", "more", "less"],
)
async def test_more_bytes_than_there_are_addresses(shared, expanded, count):
    """Where torch's arithmetic overflows, a value of no bytes was stored that nobody could read."""
    with pytest.raises(ts.UnsupportedValueError, match="expanded to more bytes than any memory"):
        await ts.put_batch({f"r{at}": expanded() for at in range(count)})
    with pytest.raises(ts.UnsupportedValueError, match="expanded to more bytes than any memory"):
        await ts.put_state_dict({"r": expanded()}, "s")
    assert await ts.keys() == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
async def test_nested_tensors_are_refused_and_told_what_to_do(shared, layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(ts.UnsupportedValueError, match=r"put its .values\(\) and .offsets\(\)"):
        await ts.put("r", nested)


async def test_only_sparse_tensors_are_called_sparse(shared):
    with pytest.raises(ts.UnsupportedValueError) as e:
        await ts.put("r", torch.ones(3).to_mkldnn())
    assert "sparse" not in str(e.value)


@pytest.fixture
def mesh():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        destroy_process_group()


async def test_a_dtensor_of_one_rank_is_a_tensor_like_others(shared, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for placement in (Replicate(), Shard(0)):
        tensor = distribute_tensor(torch.arange(4.0), mesh, [placement])
        ref = await ts.put("d", tensor)
        assert torch.equal(await ts.get(ref), torch.arange(4.0))
        destination = distribute_tensor(torch.zeros(4), mesh, [placement])
        assert await ts.get("d", destination) is destination
        assert torch.equal(destination.to_local(), torch.arange(4.0))


async def test_dtensors_of_summands_are_refused_and_told_what_to_do(shared, mesh):
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ts.UnsupportedValueError, match=r"Partial\(sum\).*redistribute") as e:
        await ts.put("d", tensor)
    assert e.value.key == "d"
    assert not await ts.exists("d")
    await ts.put("d", tensor.full_tensor())
    with pytest.raises(ts.UnsupportedValueError, match="Partial"):
        await ts.get("d", tensor)
    assert torch.equal(await ts.get("d"), torch.ones(4))
    with pytest.raises(ts.UnsupportedValueError, match="says itself which slice"):
        await ts.put("d", tensor, ts.TensorSlice((0,), (4,), (4,)))


class _Running(torch.Tensor):
    """As `AsyncCollectiveTensor`: the result of a collective, there once it was waited for."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def wait(self):
        return self.inner.fill_(7)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError("still running")


@pytest.mark.parametrize("numel", [3, 300_000])
async def test_the_results_of_running_collectives_are_waited_for(shared, numel):
    there = torch.full((numel,), 7.0)

    def running():
        return _Running(torch.zeros(numel))

    await ts.put("alone", running())
    await ts.put_batch({"of two": running(), "one": 1})
    await ts.put_state_dict({"w": running(), "l": [running()]}, "s")
    await ts.put("packed", ts.TorchStoreStateDict.from_state_dict({"w": running()}))
    await ts.put("shard", ts.TensorShard(running(), ts.TensorSlice((0,), (numel,), (numel,))))
    for key in ("alone", "of two", "s/w", "s/l.0", "packed/w", "shard"):
        assert torch.equal(await ts.get(key), there), key
    await ts.put("object", {"in": [running()]})
    assert torch.equal((await ts.get("object"))["in"][0].inner, there)


async def test_results_of_collectives_of_torch(shared, mesh):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    result = all_reduce(torch.arange(4.0), "sum", mesh)
    assert type(result) is AsyncCollectiveTensor
    await ts.put("r", result)
    assert torch.equal(await ts.get("r"), torch.arange(4.0))


async def test_a_dispatch_mode_of_the_user_does_not_break_a_put(shared):
    """Profilers and flop counters watch operations; they must not change what is stored."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tensor = torch.arange(300_000).view(300, 1000)
    with Watching():
        await ts.put_batch({"large": tensor.t(), "small": tensor[:3, :5]})
        assert torch.equal(await ts.get("large"), tensor.t())
        assert torch.equal(await ts.get("small"), tensor[:3, :5])
