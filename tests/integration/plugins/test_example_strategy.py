"""The page on writing a strategy: its package is installed, tested by its own tests, and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import run_script

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/example-strategy"
PAGE = (ROOT / "docs/writing-a-strategy.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed; a copy is built, so that nothing is left beside it."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True, timeout=100)
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def test_its_own_tests_pass(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=site.parent / "source",
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^1\d passed", done.stdout, re.M), done.stdout


async def test_a_store_uses_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment(site)["PYTHONPATH"])
    used = re.search(r"await ts\.initialize\(\n(.*?)^\)$", PAGE, re.M | re.S)
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


def test_without_it_the_error_says_what_to_do() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import asyncio, torchstore_core as ts\n"
            "try:\n    asyncio.run(ts.initialize(strategy='pinned'))\n"
            "except ts.PluginError as error:\n    print(error)\n",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "no strategy is called 'pinned'" in done.stdout
    assert "installed" in done.stdout


def test_the_page_shows_what_the_package_has() -> None:
    files = [path.read_text() for path in EXAMPLE.rglob("*.*") if path.is_file()]
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE, re.M | re.S)
    shown = [block for block in blocks if "await ts.initialize" not in block]
    assert len(shown) == 4
    for block in shown:
        assert any(block in text for text in files), block


def test_its_links_lead_somewhere() -> None:
    for page in (ROOT / "docs/writing-a-strategy.md", EXAMPLE / "README.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
