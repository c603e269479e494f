"""Many tensors at once: what is plain goes in columns, and nobody can tell.

What may change between the look and the copy, see also `test_freed_storage.py`.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.servers import ServerThread
from tests.integration.test_freed_storage import REFUSED, SIZE, WAYS, WindowLink
from tests.support import emptied, turn

import torchstore_core as ts
from torchstore_core.clients.moving import executor
from torchstore_core.clients.session.volume_links import MANY
from torchstore_core.clients.transfer.columns.batches import ColumnsGet
from torchstore_core.clients.transfer.moves import GetBatch, get_batches
from torchstore_core.clients.transfer.targets import Results, plain_targets
from torchstore_core.clients.values import plain
from torchstore_core.clients.values.plain import look
from torchstore_core.contracts.transport import LinkContext, Segment, ServerContext
from torchstore_core.machine import copying
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_inprocess.transport import InProcessLink, InProcessServer

by_link = pytest.mark.parametrize("client", ["shm", "inprocess"], indirect=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread() as made:
        yield made


@pytest.fixture
async def client(server: ServerThread, request: pytest.FixtureRequest) -> AsyncIterator[ts.Client]:
    made = await ts.connect(server.address, store_name="many", block=WAYS[request.param])
    yield made
    await emptied(made)
    await ts.shutdown("many")


def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


#: Values to put, each made of the same 30 x 50 floats.
VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda t: t.clone(),
    "rows": lambda t: t[7:9],
    "half": lambda t: t.half(),
    "uint3": lambda t: t.to(torch.uint8).view(torch.uint3),
    "number": lambda t: t[3, 4],
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "with grad": lambda t: t.clone().requires_grad_(),
    "inference": of_inference,
    "columns": lambda t: t[:, 3:9],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(30, 50),
    "negative": torch._neg_view,
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "empty": lambda t: t[:0],
    "large": lambda t: t.repeat(3, 5),
    "object": lambda t: {"a": [1, 2]},
}


def same(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor):
        return bool(a == b)
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    return a.dtype is b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


def comparable(value: Any) -> Any:
    """torch compares no uint3."""
    return value.view(torch.uint8) if getattr(value, "dtype", None) is torch.uint3 else value


@by_link
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(kinds=st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=20))
async def test_any_mixture(client: ts.Client, kinds: list[str]) -> None:
    """Together or one by one, as a batch or a state dict, new or in place: the same comes back."""
    source = torch.arange(1500.0).view(30, 50)
    values = {f"{at} {kind}": VALUES[kind](source) for at, kind in enumerate(kinds)}
    tensors = {key: v for key, v in values.items() if isinstance(v, torch.Tensor)}

    def into() -> dict[str, torch.Tensor]:
        made = {key: torch.empty(v.shape, dtype=v.dtype) for key, v in tensors.items()}
        return {k: torch.nn.Parameter(v) if "param" in k else v for k, v in made.items()}

    await client.delete_batch(await client.keys())
    await client.put_batch(values)
    for key, value in values.items():
        await client.put(f"alone {key}", value)
    await client.put_state_dict(values, "dict")
    got = await client.get_batch(list(values))
    place = into()
    filled = await client.get_batch(place)
    new = await client.get_state_dict("dict")
    old = into()
    before = {key: tensor._version for key, tensor in old.items()}
    report = ts.StateDictReport()
    if old:
        await client.get_state_dict("dict", old, strict=False, report=report)
        assert not report.missing
        assert not report.mismatched
    for key, value in values.items():
        value = comparable(value)
        assert same(comparable(await client.get(f"alone {key}")), value), key
        assert same(comparable(got[key]), value), key
        assert same(comparable(new[key]), value), key
        if key in tensors:
            assert filled[key] is place[key]
            assert same(comparable(place[key]), value), key
            assert same(comparable(old[key]), value), key
            assert old[key]._version > before[key] or not old[key].numel(), key


@by_link
@pytest.mark.parametrize("at", [0, 100, 199])
async def test_one_that_is_copied_in_parts_among_many(client: ts.Client, at: int) -> None:
    await client.keys()  # what joins the store with a put puts one by one
    values = {f"k{i:03}": torch.full((60,), float(i)) for i in range(200)}
    values[f"k{at:03}"] = torch.arange(2_000_000.0)
    await client.put_batch(values)
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    await client.get_batch(into)
    assert all(torch.equal(into[key], value) for key, value in values.items())


@by_link
@pytest.mark.parametrize("odd", ["plain", "half", "parameter", "inference", "transposed", "large"])
@pytest.mark.parametrize("compiled", [True, False])
async def test_one_that_is_odd_among_many(
    client: ts.Client, odd: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all of them go in columns, or one of them prevents that, the same comes back."""
    if not compiled:
        monkeypatch.setattr(plain, "_look", plain._nothing)
        monkeypatch.setattr(copying, "_copy_columns", None)
    values = {f"k{at}": torch.arange(1500.0).view(30, 50) + at for at in range(60)}
    values["k7"] = VALUES[odd](values["k7"])
    await client.put_batch(values)
    await client.put_state_dict(values, "d")
    for what in ("new", "own"):
        into = {key: torch.zeros(v.shape, dtype=v.dtype) for key, v in values.items()}
        batch = await client.get_batch(into if what == "own" else list(values))
        dict_ = await client.get_state_dict("d", into if what == "own" else None)
        assert list(batch) == list(dict_) == list(values)
        for key, value in values.items():
            assert same(batch[key], value), key
            assert same(dict_[key], value), key
        if what == "own":
            assert all(batch[key] is into[key] for key in into)
            assert [tensor._version for tensor in into.values()] == [2] * 60
    report = ts.StateDictReport()
    into["k9"] = torch.zeros(3)
    with pytest.raises(ts.LayoutMismatchError, match="'k9' is stored as"):
        await client.get_state_dict("d", into | {"k3": torch.zeros(30, 50)})
    fewer = {key: tensor for key, tensor in into.items() if key not in ("k9", "k8")}
    fewer["k77"] = torch.zeros(2)
    await client.get_state_dict("d", fewer, strict=False, report=report)
    assert (report.missing, sorted(report.unexpected)) == (["k77"], ["k8", "k9"])
    with pytest.raises(ts.KeyNotFoundError):
        await client.get_batch(fewer)


@by_link
async def test_destinations_that_share_memory(client: ts.Client) -> None:
    """They are filled from the first; that the others differ is said."""
    values = {f"k{at}": torch.full((20,), float(at)) for at in range(60)}
    await client.put_batch(values)
    await client.put_state_dict(values, "d")
    into = {key: torch.zeros(20) for key in values}
    into["k50"] = into["k2"]
    with pytest.raises(ts.LayoutMismatchError, match=r"'k50' of 'd'.*written to the same tensor"):
        await client.get_state_dict("d", into)
    report = ts.StateDictReport()
    await client.get_state_dict("d", into, strict=False, report=report)
    assert list(report.mismatched) == ["k50"]
    assert [tensor[0].item() for tensor in into.values()] == [*range(50), 2, *range(51, 60)]
    with pytest.raises(ts.LayoutMismatchError, match="to the same tensor, and differ"):
        await client.get_batch(into)
    assert (into["k3"][0], into["k2"][0]) == (3, 2)


@by_link
async def test_new_tensors_are_on_their_own(client: ts.Client) -> None:
    """Each has its own storage, on the CPU, whatever the default device is."""
    await client.put_batch({f"k{i}": torch.full((8,), float(i)) for i in range(9)})
    with torch.device("meta"):
        got = await client.get_batch([f"k{i}" for i in range(9)])
    got["k1"].add_(100)
    for i, tensor in enumerate(got.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.tolist() == [i + 100.0 * (i == 1)] * 8
    file = io.BytesIO()
    torch.save(got["k3"], file)
    assert len(file.getvalue()) < 2500


@by_link
async def test_destinations_of_inference_mode(client: ts.Client) -> None:
    await client.put_batch({f"k{i}": torch.full((8,), float(i)) for i in range(9)})
    into = {f"k{i}": of_inference(torch.zeros(8)) for i in range(8)} | {"k8": torch.zeros(8)}
    await client.get_batch(into)
    assert [tensor[0].item() for tensor in into.values()] == list(range(9))
    assert into["k8"]._version == 1


def swap(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 7)


#: What others may do to a tensor of 40 x 40 meanwhile, and what of it shows.
CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "freed": (lambda t: t.untyped_storage().resize_(0), REFUSED.format("k3")),
    "shrunk": (lambda t: t.untyped_storage().resize_(4), REFUSED.format("k3")),
    "smaller": (lambda t: t.resize_(4, 4), "'k3'.*was resized while"),
    "larger": (lambda t: t.resize_(90, 90), "'k3'.*was resized while"),
    "transposed": (lambda t: t.t_(), ""),
    "swapped": (swap, ""),
}


@by_link
@pytest.mark.parametrize("count", [50, 3000])
@pytest.mark.parametrize("change", CHANGES)
async def test_sources_that_change_before_the_copy(
    client: ts.Client, change: str, count: int
) -> None:
    do, error = CHANGES[change]
    values = {f"k{i}": torch.arange(1600.0).view(40, 40) for i in range(count)}
    await client.keys()  # there is a channel, so that the put goes as far as its grant
    put = asyncio.create_task(client.put_batch(values))
    await turn()  # it waits for its grant
    do(values["k3"])
    if error:
        with pytest.raises(ts.UnsupportedValueError, match=error):
            await put
        assert await client.keys() == []
        return
    await put
    for key in ("k2", "k3", "k4"):
        assert torch.equal(await client.get(key), values[key])


@by_link
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_destinations_that_change_before_the_copy(
    client: ts.Client, change: str, as_dict: bool
) -> None:
    do, error = CHANGES[change]
    # The reply to a small request is awaited in the same turn.
    stored = {f"k{i}": torch.arange(1600.0).view(40, 40) for i in range(99)}
    into = {key: torch.zeros(40, 40) for key in stored}
    if as_dict:
        await client.put_state_dict(stored, "d")
        get = asyncio.create_task(client.get_state_dict("d", into))
    else:
        await client.put_batch(stored)
        get = asyncio.create_task(client.get_batch(into))
    await turn()  # it waits for the reply
    do(into["k3"])
    if error:
        with pytest.raises((ts.UnsupportedValueError, ts.LayoutMismatchError)) as caught:
            await get
        if "resized" not in error:
            caught.match("storage.*(freed or shrunk)")
        assert not into["k2"].any(), "nothing is written if anything does not fit"
        return
    await get
    for key, tensor in into.items():
        assert torch.equal(tensor, stored[key]), key


@pytest.mark.parametrize("link", [InProcessLink, WindowLink])
@pytest.mark.parametrize("change", CHANGES)
async def test_destinations_that_change_between_the_check_and_the_copy(
    link: type[InProcessLink], change: str
) -> None:
    if not any(look([torch.ones(1)] * 9).sizes):
        pytest.skip("without the compiled look nothing is plain; see test_freed_storage.py")
    do, error = CHANGES[change]
    here = probe()
    server = InProcessServer()
    segment = Segment(0, open_memory("try", SIZE), SIZE)
    offer = await server.start(ServerContext("store", "volume", "/tmp", here), [segment])
    made = await link.connect(offer, LinkContext(here, here, same_host=True, offered=True))
    into: list[Any] = [torch.ones(40, 40) for _ in range(9)]
    meta = TensorMeta("float32", (40, 40))
    entries = [m.Entry(1, meta, 6400, None, m.Grant(0, 0, SIZE - 6400 * (9 - i))) for i in range(9)]
    keys = [f"k{i}" for i in range(9)]
    whole = [one for one in plain_targets(keys, entries, range(9), into, [None] * 9) if one]
    assert len(whole) == 9
    do(into[3])
    (batch,) = get_batches([], Results(allow_pickle=True), whole)
    if error:
        with pytest.raises(ts.UnsupportedValueError, match=error):
            await executor.by_link(made, batch)
    else:
        await executor.by_link(made, batch)
        assert not any(tensor.any() for tensor in into)
    made.close()
    await server.close()
    os.close(segment.fd)


@by_link
async def test_ties_among_many(client: ts.Client) -> None:
    """Tied ones are stored once, by what they are; others at the same address are not tied."""
    shared = torch.arange(600.0).view(20, 30)
    values = {f"k{i}": torch.full((20, 30), float(i)) for i in range(6)}
    values |= {"a": shared, "b": torch.nn.Parameter(shared), "c": shared.view(30, 20)}
    values |= {"d": shared.view(30, 20).detach(), "e": shared[:1], "f": shared.t()}
    await client.put_state_dict(values, "d")
    stored = await client.get_state_dict("d")
    assert all(torch.equal(stored[key], value) for key, value in values.items())
    assert stored["a"].data_ptr() == stored["b"].data_ptr() != stored["c"].data_ptr()
    assert stored["c"].data_ptr() == stored["d"].data_ptr() != stored["e"].data_ptr()
    nbytes = (await client.stat("d")).nbytes
    assert nbytes == 6 * 2400 + 2400 + 2400 + 120 + 2400
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    into["a"] = into["b"] = torch.zeros(20, 30)
    await client.get_state_dict("d", into)
    assert all(torch.equal(into[key], value) for key, value in values.items())


@pytest.mark.parametrize("as_dict", [False, True], ids=["batch", "state dict"])
async def test_tiny_ones_are_copied_together_from_the_window_if_they_are_many(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, as_dict: bool
) -> None:
    """They came inside the message, one by one: ten times as long as twice as many bytes took."""
    ways: list[str] = []
    for of, name in ((ColumnsGet, "moves"), (GetBatch, "moves"), (Results, "finish")):
        monkeypatch.setattr(of, name, noting(ways, of.__name__, getattr(of, name)))
    client = await ts.connect(server.address, store_name="tiny", block=["inprocess"])
    await client.put("large", torch.ones(1 << 18))  # connects the link
    for count, way in ((MANY - 1, "Results"), (MANY, "ColumnsGet")):
        values = {f"t{i}": torch.full((2,), float(i)) for i in range(count)}
        into = {key: torch.zeros(2) for key in values}
        if as_dict:
            await client.put_state_dict(values, "all")
            ways.clear()
            await client.get_state_dict("all", into)
        else:
            await client.put_batch(values)
            ways.clear()
            await client.get_batch(into)
        assert set(ways) == {way}
        assert all(map(torch.equal, into.values(), values.values()))
    await emptied(client)
    await ts.shutdown("tiny")


def noting(ways: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        ways.append(name)
        return method(*args)

    return noted
