"""Isolated halves that are killed at random moments, whatever is under way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from tests.support import bits, commands, running_store, until
from tests.transports.asking import nothing_unfinished
from tests.transports.listening import descendants

import torchstore_core as ts
from torchstore_core.plugins.registry import Registry

MB = 1 << 20
_CAPACITY = 256 * MB
_SIDE = 1000


def _state(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    layers = [{"w": torch.rand(200, 700, generator=generator), "b": torch.rand(70)} for _ in "12"]
    return {"layers": layers, "step": torch.tensor(seed)}


def _same(got: dict, wanted: dict) -> bool:
    pairs = zip(got["layers"], wanted["layers"], strict=True)
    return int(got["step"]) == int(wanted["step"]) and all(
        torch.equal(bits(one[name]), bits(other[name])) for one, other in pairs for name in one
    )


async def _put(client: ts.Client, seed: int) -> None:
    value = torch.full((3 * MB,), seed % 251, dtype=torch.uint8)
    await client.put("put", value)
    assert torch.equal(await client.get("put"), value)


async def _get(client: ts.Client, seed: int) -> None:
    """The value is there already; strided as well."""
    into = torch.zeros(_SIDE, 2 * _SIDE)
    await client.get("grid", into[:, ::2])
    assert torch.equal(into[:, ::2], torch.arange(_SIDE * _SIDE).view(_SIDE, _SIDE).float())
    assert not into[:, 1::2].any()


async def _batch(client: ts.Client, seed: int) -> None:
    values = {f"b{i}": torch.full((MB // 4 + i,), seed + i) for i in range(6)}
    await client.put_batch(values)
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    await client.get_batch(into)
    for name, value in values.items():
        assert torch.equal(into[name], value), name


async def _state_dict(client: ts.Client, seed: int) -> None:
    wanted = _state(seed)
    await client.put_state_dict(wanted, "model")
    assert _same(await client.get_state_dict("model"), wanted)


WORK: dict[str, Callable[[ts.Client, int], Awaitable[None]]] = {
    "put": _put,
    "get": _get,
    "batch": _batch,
    "state dict": _state_dict,
}


def halves(server: int) -> set[int]:
    """The processes of isolated halves that run."""
    return commands(b"memory.isolated", descendants(server) - {server})


async def _kill_now_and_then(server: int, dice: random.Random, killed: list[int]) -> None:
    while True:
        await asyncio.sleep(dice.uniform(0.0, 0.1))  # the moment is what varies
        for pid in halves(server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)


async def _others_carry_on(address: str, done: asyncio.Event, rounds: list[int]) -> None:
    """A client of another transport sees none of it; ``rounds`` in which it has put and got."""
    client = await ts.connect(address, store_name="others", prefer=["tcp"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*'tcp'")
        while not done.is_set():
            value = torch.full((MB,), len(rounds) % 200, dtype=torch.uint8)
            await client.put("others", value)
            assert torch.equal(await client.get("others", torch.zeros_like(value)), value)
            rounds.append(len(rounds))
    assert {entry["chosen"] for entry in await client.explain()} == {"tcp"}
    await ts.shutdown("others")


async def _killed_again_and_again(name: str, work: str, kills: int) -> None:
    dice = random.Random(f"{name} {work}")
    killed: list[int] = []
    rounds: list[int] = []
    async with running_store(prefer=[name], capacity=_CAPACITY, prefault=0) as client:
        server = (await client.status()).controller_pid
        await client.put("grid", torch.arange(_SIDE * _SIDE).view(_SIDE, _SIDE).float())
        done = asyncio.Event()
        others = asyncio.ensure_future(_others_carry_on(await ts.address(), done, rounds))
        killing = asyncio.ensure_future(_kill_now_and_then(server, dice, killed))
        try:
            seed = 0
            while len(set(killed)) < kills or not rounds:
                seed += 1
                await asyncio.wait_for(WORK[work](client, seed), 30)
                if others.done():
                    await others
        finally:
            killing.cancel()
            done.set()
        await others

        async def used_again() -> bool:
            await WORK[work](client, 1)
            return {entry["chosen"] for entry in await client.explain()} == {name}

        await until(used_again, 60)
        await until(lambda: len(halves(server)) == 1, 10)  # one that was killed may be ending
        await until(lambda: nothing_unfinished(client), 10)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed))  # no zombies


@pytest.fixture
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports that have failed are tried again at once, so that they fail more often."""
    monkeypatch.setattr("torchstore_core.clients.session.volume_links._LONGEST_BACKOFF_S", 0.0)


@pytest.mark.filterwarnings("ignore:transport 'mailbox-apart':RuntimeWarning")
@pytest.mark.usefixtures("_soon_again")
@pytest.mark.parametrize("work", WORK)
async def test_a_half_that_is_killed_at_any_moment(work: str) -> None:
    await _killed_again_and_again("mailbox-apart", work, 4)


@pytest.mark.soak
@pytest.mark.usefixtures("_soon_again")
@pytest.mark.filterwarnings("ignore:transport:RuntimeWarning")
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    ("name", "kills"), [("mailbox-apart", 100), ("gloo", 12), ("torchcomms", 12), ("rdma", 20)]
)
async def test_halves_of_every_library_that_are_killed_at_any_moment(
    name: str, kills: int, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHSTORE_BLOCK", raising=False)
    (spec,) = [one for one in Registry().transports() if one.name == name]
    if spec.probe is not None and (why := spec.probe()):
        pytest.skip(why)
    if not spec.isolated:
        pytest.skip(f"the half of {name} is in the server's process")
    await _killed_again_and_again(name, work, kills)
