"""The page on writing a strategy: its package is installed, tested by its own tests, and used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.plugins.examples import Example
from tests.processes import run_script

import torchstore_core as ts

EXAMPLE = Example("strategy")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed."""
    return EXAMPLE.install(tmp_path_factory.mktemp("example"))


def test_its_own_tests_pass(site: Path) -> None:
    done = EXAMPLE.run_tests(site, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^1\d passed", done.stdout, re.M), done.stdout


async def test_a_store_uses_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", EXAMPLE.environment(site)["PYTHONPATH"])
    used = re.search(r"await ts\.initialize\(\n(.*?)^\)$", EXAMPLE.page, re.M | re.S)
    assert used is not None
    arguments = " ".join(used[1].split())
    out = await run_script(
        body=f"""
        from torchstore_pinned import PinnedStrategy
        await ts.initialize({arguments} capacity=64 << 20, prefault=0)
        large = torch.arange(100_000)
        await ts.put_batch({{"weights/0": large, "optimizer/0": large, "other": large}})
        await ts.put_state_dict({{"a": large}}, "weights/sd")
        for key in ("weights/0", "optimizer/0", "weights/sd/a"):
            print((await ts.stat(key)).volume)
        assert torch.equal(await ts.get("optimizer/0"), large)
        await ts.shutdown()
        await ts.initialize(2, "pinned", capacity=64 << 20, prefault=0)
        await ts.put("k", 1)
        print((await ts.status()).strategy)
        await ts.shutdown()
        """,
    )
    assert out.split() == ["torchstore-2", "torchstore-1", "torchstore-2", "pinned"]


async def test_without_it_the_error_says_what_to_do() -> None:
    with pytest.raises(ts.PluginError, match=r"no strategy is called 'pinned'(.|\n)*installed"):
        await ts.initialize(strategy="pinned")


def test_the_page_shows_what_the_package_has() -> None:
    EXAMPLE.check_page(blocks=4)


def test_its_links_lead_somewhere() -> None:
    EXAMPLE.check_links()
