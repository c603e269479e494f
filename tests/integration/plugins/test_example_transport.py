"""The page on writing a transport: its package is installed, tested by its own tests, and used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.plugins.examples import Example
from tests.processes import run_script

EXAMPLE = Example("transport")
# Without this repository's configuration and plug-ins, and with the reasons of skips.
_STRICT = ("-rs", "-W", "error", "-p", "no:asyncio")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed."""
    return EXAMPLE.install(tmp_path_factory.mktemp("example"))


@pytest.mark.parametrize(
    ("chosen", "passed"),
    [
        ("every_size or rows or kind or bids or window or namespaces", r"\d+"),
        pytest.param("", r"[45]\d", marks=pytest.mark.soak),
    ],
)
def test_its_own_tests_pass(site: Path, chosen: str, passed: str) -> None:
    """With pytest alone: without this repository's configuration and plug-ins."""
    done = EXAMPLE.run_tests(site, *_STRICT, "-k", chosen)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"^{passed} passed, \d+ skipped", done.stdout, re.M), done.stdout
    reasons = re.findall(r"^SKIPPED .*?: (.*)$", done.stdout, re.M)
    assert any("it has no windows" in reason for reason in reasons), done.stdout
    assert any("does not cross hosts: the volume is on ano" in reason for reason in reasons)


async def test_a_store_uses_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", EXAMPLE.environment(site)["PYTHONPATH"])
    used = re.search(r"await ts\.initialize\((.*?)\)$", EXAMPLE.page, re.M)
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
        done = EXAMPLE.run_tests(site, *_STRICT)
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
    EXAMPLE.check_page(blocks=6)


def test_its_links_lead_somewhere() -> None:
    EXAMPLE.check_links()
