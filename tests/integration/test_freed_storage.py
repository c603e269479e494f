"""Tensors whose storage was freed or shrunk are refused, wherever their memory would be touched.

FSDP does that to parameters between their uses. What lies at such an address is somebody else's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.integration.servers import ServerThread
from tests.support import call_beside, emptied, turn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchstore_core as ts
from torchstore_core.clients.moving import executor
from torchstore_core.clients.state_dicts.putting import plan_put
from torchstore_core.clients.transfer.moves import get_batches
from torchstore_core.clients.transfer.targets import Results, resolve
from torchstore_core.clients.values.codec import decode_object, encode_object
from torchstore_core.clients.values.tensors import storable
from torchstore_core.contracts.transport import Copy, LinkContext, Segment, ServerContext, Window
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_inprocess.transport import InProcessLink, InProcessServer

SIZE = 1 << 20
REFUSED = r"'{}'.*storage.*(freed or shrunk).*materialise it first"
#: How the bytes travel: by a window, in the message, by a link without a window.
WAYS = {
    "shm": ["inprocess", "inline"],
    "inline": ["inprocess", "shm"],
    "inprocess": ["shm", "inline"],
}
SIZES = {"small": (6, 8), "large": (300, 700)}
Form = Callable[[torch.Tensor], torch.Tensor]


def freed(base: torch.Tensor) -> torch.Tensor:
    base.untyped_storage().resize_(0)
    return base


def freed_columns(base: torch.Tensor) -> torch.Tensor:
    view = base.t()
    base.untyped_storage().resize_(0)
    return view


def shrunk(base: torch.Tensor) -> torch.Tensor:
    base.untyped_storage().resize_(base.nbytes - 1)
    return base


def later_rows(base: torch.Tensor) -> torch.Tensor:
    view = base[1:]
    base.untyped_storage().resize_(base.nbytes - 4)
    return view


def columns(base: torch.Tensor) -> torch.Tensor:
    view = base[:, ::2]
    base.untyped_storage().resize_(base.nbytes - 8)
    return view


def expanded(base: torch.Tensor) -> torch.Tensor:
    view = base[0].expand(base.shape)
    base.untyped_storage().resize_(base.shape[1] * 4 - 1)
    return view


FORMS: dict[str, Form] = {
    f.__name__: f for f in (freed, freed_columns, shrunk, later_rows, columns, expanded)
}


def spoilt(form: str, size: str = "small", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return FORMS[form](torch.ones(SIZES[size]).to(dtype))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread() as made:
        yield made


@pytest.fixture(params=WAYS)
async def client(server: ServerThread, request: pytest.FixtureRequest) -> AsyncIterator[ts.Client]:
    made = await ts.connect(server.address, store_name="here", block=WAYS[request.param])
    yield made
    await emptied(made)
    await ts.shutdown("here")


@contextmanager
def refused(key: str) -> Iterator[None]:
    with pytest.raises(ts.UnsupportedValueError, match=REFUSED.format(key)):
        yield


@contextmanager
def one_rank() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
async def test_no_put_reads_it(client: ts.Client, form: str, size: str) -> None:
    tensor = spoilt(form, size)
    whole = ts.TensorSlice((0, 0), tuple(tensor.shape), tuple(tensor.shape))
    tied = {"fine": torch.ones(3), "w": tensor, "head": {"w": tensor}}
    with refused("k"):
        await client.put("k", tensor)
    with refused("k"):
        await client.put("k", torch.nn.Parameter(tensor))
    with refused("k"):
        await client.put("k", tensor, whole)
    with refused("k"):
        await client.put("k", ts.TensorShard(tensor, whole))
    with refused("k"):
        await client.put_batch({"fine": torch.ones(3), "k": tensor})
    for casts in (None, torch.bfloat16):
        with refused("w"):
            await client.put_state_dict(tied, "model", transfer_dtype=casts)
    with refused("w"):
        ts.TorchStoreStateDict.from_state_dict(tied)
    assert await client.keys() == []


@pytest.mark.parametrize("form", [form for form in FORMS if form != "expanded"])
@pytest.mark.parametrize("size", SIZES)
async def test_no_get_writes_to_it(client: ts.Client, form: str, size: str) -> None:
    shape = tuple(spoilt(form, size).shape)
    value = torch.ones(shape)
    await client.put("k", value)
    await client.put_state_dict({"fine": torch.ones(3), "w": value}, "model")
    whole = ts.TensorSlice((0, 0), shape, shape)
    mine = torch.zeros(3)
    with refused("k"):
        await client.get("k", spoilt(form, size))
    with refused("k"):
        await client.get("k", ts.TensorShard(spoilt(form, size), whole))
    with refused("k"):
        await client.get_batch({"model/fine": mine, "k": spoilt(form, size)})
    for dtype in (torch.float32, torch.bfloat16):  # read as it is stored, and cast
        wanted = {"fine": mine, "w": spoilt(form, size, dtype)}
        with pytest.raises(ts.LayoutMismatchError, match=REFUSED.format("w")):
            await client.get_state_dict("model", wanted, cast=True)
    packed = ts.TorchStoreStateDict.from_state_dict({"fine": torch.ones(3), "w": value})
    with pytest.raises(ts.LayoutMismatchError, match=REFUSED.format("w")):
        packed.to_state_dict({"fine": mine, "w": spoilt(form, size)})
    assert not mine.any()


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: (1, t),
        lambda t: {"w": [t]},
        lambda t: torch.nn.ParameterList([torch.nn.Parameter(t)]),
        Holder,
        lambda t: lambda: t,
        lambda t: (bytes(1 << 20), Holder(t)),
    ],
    ids=["tuple", "dict", "module", "attribute", "closure", "beside a large one"],
)
@pytest.mark.parametrize("form", ["freed", "shrunk", "columns"])
def test_no_object_has_it_inside(wrap: Callable[[torch.Tensor], Any], form: str) -> None:
    with refused("k"):
        encode_object("k", wrap(spoilt(form)), allow_pickle=True)
    meta, data = encode_object("k", wrap(torch.ones(3)), allow_pickle=True)
    assert decode_object("k", meta, data, allow_pickle=True)


async def test_shards_of_dtensors(client: ts.Client) -> None:
    with one_rank() as mesh:
        for tensor in (spoilt("freed"), spoilt("columns", "large")):
            sharded = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            with refused("k"):
                await client.put("k", sharded)
            with refused("w"):
                await client.put_state_dict({"w": sharded}, "k")
            await client.put("k", torch.ones(tensor.shape))
            with refused("k"):
                await client.get("k", sharded)


async def test_a_packed_state_dict_whose_blob_was_freed(client: ts.Client, tmp_path: Path) -> None:
    packed = ts.TorchStoreStateDict.from_state_dict({"w": torch.ones(SIZES["large"])})
    blob, header = packed.blob, packed.header
    blob.untyped_storage().resize_(64)
    with refused("state dict"):
        await client.put("k", packed)
    for use in (
        packed.to_bytes,
        lambda: packed.save(tmp_path / "file"),
        packed.to_state_dict,
        lambda: ts.TorchStoreStateDict(header, blob),
    ):
        with refused("state dict"):
            use()
    with pytest.raises(ts.LayoutMismatchError, match=REFUSED.format("state dict")):
        packed.to_state_dict({"w": torch.zeros(SIZES["large"])})
    assert not list(tmp_path.iterdir())


async def test_storage_that_reaches_just_far_enough_is_used(client: ts.Client) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    base.untyped_storage().resize_(44 * 4)
    row = torch.arange(8.0)
    empty = torch.ones(0, 5)
    empty.untyped_storage().resize_(0)
    fine = {
        "first rows": base[:5],
        "columns": base[:, :4],
        "a column": base[:5, 7],
        "expanded": row.expand(100, 8),
        "empty": empty,
        "nothing of it": base[6:],
        "strided, nothing of it": base[:, 8:],
    }
    for key, tensor in fine.items():
        await client.put(key, tensor)
        into = tensor.clone().zero_() if key == "expanded" else torch.zeros_like(tensor)
        assert torch.equal(await client.get(key, into), tensor), key
        assert torch.equal(await client.get(key), tensor), key
    into = base[:, :4]
    await client.get("columns", into)
    await client.get("empty", empty)


async def test_tensors_that_are_said_to_be_zeros_have_no_memory_either(client: ts.Client) -> None:
    zeros = torch._efficientzerotensor((300, 700))
    for tensor in (zeros, zeros[1:], torch._efficientzerotensor((3,))):
        assert tensor._is_zerotensor()
        with refused("k"):
            await client.put("k", tensor)
    await client.put("k", torch.ones(3))
    with refused("k"):
        await client.get("k", torch._efficientzerotensor((3,)))


def test_tensors_inside_of_transforms_are_called_that() -> None:
    """They were called freed ones, of FSDP; in a state dict, they raised a RuntimeError."""

    def put(x: torch.Tensor) -> torch.Tensor:
        for look in (
            lambda: storable("k", x),
            lambda: encode_object("k", [x], allow_pickle=True),
            lambda: plan_put({"k": x}, "all", anonymous="a process", allow_pickle=True),
        ):
            with pytest.raises(ts.UnsupportedValueError, match=r"'k'.*a transform of torch\.func"):
                look()
        return x

    torch.func.vmap(put)(torch.ones(2, 3))
    torch.func.grad(lambda x: put(x).sum())(torch.ones(3))


# ---- while the operation is under way -------------------------------------------------------

by_link = pytest.mark.parametrize("client", ["shm", "inprocess"], indirect=True)


@by_link
@pytest.mark.parametrize("form", ["contiguous", "strided", "cast"])
async def test_freed_between_the_grant_and_the_copy(client: ts.Client, form: str) -> None:
    base = torch.ones(700, 600)
    tensor = base.t() if form == "strided" else base
    casts = torch.bfloat16 if form == "cast" else None
    async with call_beside(client):
        put = asyncio.create_task(client.put_state_dict({"w": tensor}, "k", transfer_dtype=casts))
        await turn()  # it waits for its grant
        base.untyped_storage().resize_(0)
        with refused("w"):
            await put
    assert await client.keys() == []


@by_link
@pytest.mark.parametrize("shape", [(900, 900), (9, 9)])
async def test_resized_between_the_grant_and_the_copy(
    client: ts.Client, shape: tuple[int, int]
) -> None:
    """A larger one would be written over what lies beside its place."""
    tensor = torch.ones(700, 600).t()
    async with call_beside(client):
        put = asyncio.create_task(client.put("k", tensor))
        await turn()
        tensor.resize_(shape)
        with pytest.raises(ts.UnsupportedValueError, match=r"'k'.*resized while it was put"):
            await put
    assert await client.keys() == []


@by_link
@pytest.mark.parametrize("wrap", [lambda t: [t], Holder], ids=["list", "class"])
async def test_an_object_whose_tensor_changes_between_the_grant_and_the_copy(
    client: ts.Client, wrap: Callable[[torch.Tensor], Any]
) -> None:
    """Its elements are copied from where they are: the process was ended by SIGSEGV."""
    moved, freed, replaced = (torch.ones(700, 600) for _ in range(3))
    async with call_beside(client):
        puts = [
            asyncio.create_task(client.put(key, wrap(tensor)))
            for key, tensor in {"moved": moved, "freed": freed, "replaced": replaced}.items()
        ]
        await turn()
        moved.resize_(3000, 3000)
        freed.untyped_storage().resize_(0)
        replaced.data = torch.zeros(3)
        with pytest.raises(ts.UnsupportedValueError, match=r"'moved'.*resized while it was put"):
            await puts[0]
        with refused("freed"):
            await puts[1]
        await puts[2]
    assert await client.keys() == ["replaced"]
    value = await client.get("replaced")
    assert (value[0] if isinstance(value, list) else value.tensor).sum() == 700 * 600


class WindowLink(InProcessLink):
    """The same with a window."""

    def window(self, segment: int) -> Window:
        return Window(self._at(Copy(0, segment, 0, 0)), SIZE)

    def prepare(self, segment: int, offset: int, nbytes: int, *, fresh: bool) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("link", [InProcessLink, WindowLink])
@pytest.mark.parametrize("form", ["contiguous", "strided", "cast"])
async def test_destinations_that_change_between_the_check_and_the_copy(
    link: type[InProcessLink], form: str
) -> None:
    here = probe()
    server = InProcessServer()
    segment = Segment(0, open_memory("try", SIZE), SIZE)
    offer = await server.start(ServerContext("store", "volume", "/tmp", here), [segment])
    made = await link.connect(offer, LinkContext(here, here, same_host=True, offered=True))

    async def read(change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        base = torch.ones(60, 70, dtype=torch.bfloat16 if form == "cast" else torch.float32)
        into = base.t() if form == "strided" else base
        entry = m.Entry(1, TensorMeta("float32", tuple(into.shape)), into.numel() * 4)
        entry = msgspec.structs.replace(entry, grant=m.Grant(0, 0, SIZE - entry.nbytes))
        target = resolve(0, 0, "k", entry, into, cast=True)
        change(into)
        (batch,) = get_batches([target], Results(allow_pickle=True))
        await executor.by_link(made, batch)
        return into

    assert not (await read(lambda into: into)).any()
    with refused("k"):
        await read(lambda into: into.untyped_storage().resize_(8))
    for shape in ((90, 90), (3, 3), (3, 4, 5)):
        with pytest.raises(ts.UnsupportedValueError, match=r"'k'.*was resized while"):
            await read(lambda into, shape=shape: into.resize_(shape))
    made.close()
    await server.close()
    os.close(segment.fd)
