"""A server comes back although its strategy was removed meanwhile, or answers otherwise."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.reliability.harness import kill
from tests.support import running_store, until

import torchstore_core as ts

SOURCE = """
from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import Strategy

class Vanishing(Strategy, frozen=True, tag="vanishing"):
    copies: int = 1
    first: int = 0

    def place(self, client, volumes, nbytes, keys=()):
        return [self.first, *(v.index for v in volumes if v.index != self.first)]

    def choose(self, client, copies):
        return len(copies) - 1

@hookimpl
def torchstore_strategy():
    return Vanishing
"""
NAME = "torchstore_vanishing"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed strategy, also for servers."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    metadata = tmp_path / f"{NAME}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vanishing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torchstore.strategies]\nvanishing = {NAME}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("TORCHSTORE_LOG_LEVEL", "CRITICAL")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return tmp_path / f"{NAME}.py"


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        (None, "cannot be imported: ModuleNotFoundError"),
        ("raise RuntimeError('half installed')", "half installed"),
        (SOURCE.replace("first: int = 0", "primary: int = 0"), "bad fields: it has no 'first'"),
    ],
    ids=["removed", "broken", "another version"],
)
async def test_values_outlive_their_strategy(module: Path, instead: str | None, says: str) -> None:
    """It was started again and again, and then given up, with all that it had."""
    strategy = importlib.import_module(NAME).Vanishing(copies=2, first=2)
    value = torch.arange(100_000.0)
    async with running_store(num_storage_volumes=3, strategy=strategy):
        await ts.put("w", value)
        assert (await ts.stat("w")).volume == "torchstore-2+torchstore-0"
        if instead is None:
            module.unlink()
        else:
            module.write_text(instead)
        kill((await ts.status()).controller_pid)

        assert torch.equal(await ts.get("w"), value)
        with pytest.raises(ts.PluginError, match=f"what is there can be read.*{says}"):
            await ts.put("more", value)
        assert says in str((await ts.status()).plugin_errors) or "fields" in says
        await ts.drain("torchstore-2")  # copies are made as before, as many as there were
        assert (await ts.stat("w")).copies == 2
        assert torch.equal(await ts.get("w"), value)
        assert (await ts.drain("torchstore-2", undo=True)).draining is False

        async def can_be_put() -> bool:
            try:
                await ts.put("more", value)
            except ts.PluginError:
                return False
            return True

        module.write_text(SOURCE)
        if instead is not None and "primary" in instead:  # which this life has imported
            kill((await ts.status()).controller_pid)
        await until(can_be_put)
        assert (await ts.stat("more")).volume == "torchstore-2+torchstore-0"


@pytest.mark.parametrize("by_key", [False, True])
async def test_values_stay_where_they_are_if_the_strategy_answers_otherwise(
    module: Path, by_key: bool
) -> None:
    """The put was repeated by asking the strategy again: a get returned memory of another volume,
    with other bytes.
    """
    module.write_text(SOURCE.replace("    copies", f"    by_key: bool = {by_key}\n    copies"))
    strategy = importlib.import_module(NAME).Vanishing()
    values = {f"w/{at}": torch.full((100_000,), float(at)) for at in range(4)}
    async with running_store(num_storage_volumes=3, strategy=strategy, capacity=12 << 20) as store:
        await ts.put_batch(values)
        await ts.put("x", torch.arange(100_000.0))
        with pytest.raises(ts.StoreFullError):
            await ts.put("too large", torch.zeros(2 << 20))
        kept = await ts.put("gone", torch.ones(100_000))
        await ts.delete("gone")
        module.write_text(
            module.read_text()
            .replace("return [self.first", "volumes = volumes[::-1]; return [2")
            .replace("!= self.first", "!= 2")
            .replace(f"by_key: bool = {by_key}", f"by_key: bool = {not by_key}")
        )
        kill((await ts.status()).controller_pid)

        assert all([torch.equal(await ts.get(key), value) for key, value in values.items()])
        assert torch.equal(await ts.get("x"), torch.arange(100_000.0))
        used = [v.used_bytes > 0 for v in (await store.status()).volumes]
        assert used == [True, False, False]
        assert (await ts.put("y", torch.ones(100_000))).version == kept.version
        assert (await ts.stat("y")).volume == "torchstore-2"


async def test_a_store_does_not_start_without_its_strategy(module: Path) -> None:
    strategy = importlib.import_module(NAME).Vanishing()
    module.unlink()
    with pytest.raises(ts.PluginError, match="cannot be imported"):
        async with running_store(num_storage_volumes=2, strategy=strategy):
            pass
