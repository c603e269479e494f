"""The page on writing a transport: its package is installed, tested by its own tests, and used."""

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
EXAMPLE = ROOT / "docs/example-transport"
PAGE = ROOT / "docs/writing-a-transport.md"


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


def run_its_tests(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "error", "-p", "no:asyncio", "."],
        cwd=site.parent / "source",
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_its_own_tests_pass(site: Path) -> None:
    """With pytest alone: without this repository's configuration and plug-ins."""
    done = run_its_tests(site)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^[45]\d passed, \d+ skipped", done.stdout, re.M), done.stdout
    reasons = re.findall(r"^SKIPPED .*?: (.*)$", done.stdout, re.M)
    assert any("it has no windows" in reason for reason in reasons), done.stdout
    assert any("does not cross hosts: the volume is on ano" in reason for reason in reasons)


async def test_a_store_uses_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment(site)["PYTHONPATH"])
    used = re.search(r"await ts\.initialize\((.*?)\)$", PAGE.read_text(), re.M)
    assert used is not None
    out = await run_script(
        body=f"""
        client = await ts.initialize({used[1]}, capacity=64 << 20, prefault=0)
        large = torch.arange(1_000_000).view(1000, 1000)
        await ts.put_batch({{"rows": large, "columns": large[:, ::3]}})
        assert torch.equal(await ts.get("rows"), large)
        target = torch.zeros(334, 1000, dtype=torch.int64).t()
        await ts.get("columns", target)
        assert torch.equal(target, large[:, ::3])
        print((await client.explain())[0]["chosen"])
        await ts.shutdown()
        """,
    )
    assert out.split() == ["files"]


@pytest.mark.soak
def test_its_tests_notice_a_fault(site: Path) -> None:
    """The package is changed where it is installed: a byte less of each copy is moved."""
    link = site / "torchstore_files/link.py"
    before = link.read_text()
    changed = before.replace("min(_PIECE, copy.nbytes - at)", "min(_PIECE, copy.nbytes - at - 1)")
    assert changed != before
    link.write_text(changed)
    try:
        done = run_its_tests(site)
    finally:
        link.write_text(before)
    assert done.returncode == 1, done.stdout
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.M))
    failed |= set(re.findall(r"^_+ TestFiles\.(\w+)", done.stdout, re.M))
    assert {
        "test_every_size_arrives",
        "test_rows_arrive",
        "test_a_store_moves_tensors_of_every_kind",
    } <= failed, done.stdout
    assert "test_its_bids_make_sense" not in failed


def test_the_page_shows_what_the_package_has() -> None:
    files = [path.read_text() for path in EXAMPLE.rglob("*.*") if path.is_file()]
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    shown = [block for block in blocks if "await ts.initialize" not in block]
    assert len(shown) == 6
    for block in shown:
        assert any(block in text for text in files), block


def test_its_links_lead_somewhere() -> None:
    for page in (PAGE, EXAMPLE / "README.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
