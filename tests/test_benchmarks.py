"""The benchmarks run, verify what they measure, say it as JSON, and leave nothing behind.

Never the numbers: those are for `make bench`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support import until

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TARGETED = {"put, warm", "get in place", "get zero-copy, all tensors"}


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_workload", BENCHMARKS / "workload.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shapes_are_those_of_qwen3_4b_at_every_size(workload: ModuleType) -> None:
    full = workload.shapes(workload.FULL_GB)
    assert len(full) == 327
    assert round(workload.nbytes(full) / 2**30, 2) == 7.82
    shares = [size / workload.nbytes(full) for size in workload.sizes(full)]
    for gb in (0.1, 0.76):
        scaled = workload.shapes(gb)
        assert list(scaled) == list(full)
        assert workload.nbytes(scaled) == pytest.approx(gb * 1e9, rel=0.01)
        for share, size in zip(shares, workload.sizes(scaled), strict=True):
            assert size / workload.nbytes(scaled) == pytest.approx(share, rel=0.05, abs=1e-5)


def test_verification_finds_a_single_wrong_bit(workload: ModuleType) -> None:
    gb, seed = 0.002, 5
    made = workload.make(gb, seed)
    workload.stamp(made, 7)
    again = workload.make(gb, seed)
    workload.stamp(again, 7)
    assert workload.wrong(made, gb, seed, 7, full=True) == []
    assert all(
        torch.equal(a.view(torch.int16), again[k].view(torch.int16)) for k, a in made.items()
    )

    name = "model.layers.17.mlp.down_proj.weight"
    bits = made[name].view(torch.int16)
    bits[1, 1] ^= 1
    assert workload.wrong(made, gb, seed, 7, full=True) == [name]
    bits[1, 1] ^= 1
    assert len(workload.wrong(made, gb, seed, 8, full=False)) == 327
    assert len(workload.wrong(made, gb, seed + 1000, 7, full=True)) == 327
    made["more"] = made.pop(name)
    assert sorted(workload.wrong(made, gb, seed, 7, full=False)) == [name, "more"]


def _running(pid: int) -> bool:
    """Whether that pid is one of ours, and not a zombie."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torchstore_core.server" in command or b"peers.py" in command


async def test_a_tiny_run_verifies_reports_and_cleans_up(tmp_path: Path) -> None:
    arguments = ["--quick", "--gb", "0.004", "--repeat", "2", "--only", "batch", "warm"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), *arguments, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    assert list(report["scenarios"]) == ["warm", "batch"]
    assert all(state["error"] == "" for state in report["scenarios"].values())
    assert report["mismatches"] == []
    assert report["workload"]["tensors"] == 327

    metrics = {metric["name"]: metric for metric in report["metrics"]}
    assert metrics.keys() >= TARGETED | {"put 1000 × 4 KB", "get 1000 × 4 KB"}
    for metric in metrics.values():
        assert min(metric["values"]) > 0
        assert metric["median"] == statistics.median(metric["values"])
        for one in metric["comparisons"]:
            expected = [a / b for a, b in zip(metric["values"], one["values"], strict=True)]
            assert one["ratios"] == pytest.approx(expected)
            reached = one["target"] is None or one["ratio"]["median"] >= one["target"]
            assert one["ok"] is (None if one["target"] is None else reached)
        assert metric["name"] in done.stdout
    assert metrics["put, warm"]["comparisons"][0]["target"] == 0.9
    floors = {floor["name"] for floor in report["floors"]}
    assert floors >= {"copy_ of tensors", "memmove of tensors", "memmove of one share a thread"}
    # The strictest floor comes first, and it is the fastest.
    for metric in (metrics["put, warm"], metrics["get in place"]):
        medians = [one["median"] for one in metric["comparisons"]]
        assert medians[0] == max(medians)

    started = [process["pid"] for process in report["processes"]] + report["servers"]
    assert len(started) >= 4
    assert report["left_behind"] == []
    await until(lambda: not any(_running(pid) for pid in started))


def test_a_set_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), "--gb", "1e6", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "needs" in done.stdout
    assert list(tmp_path.iterdir()) == []
