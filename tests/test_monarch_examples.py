"""The Monarch examples, the program of docs/monarch.md and the benchmarks inside jobs, run as a
user runs them: in jobs of their own, whose processes are forked with torch imported.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from tests.monarch.forked import forking
from tests.processes import run_program
from tests.support import until
from tests.test_examples import EXAMPLES, left_over

RING = EXAMPLES / "monarch_ring.py"
DTENSOR = EXAMPLES / "monarch_dtensor.py"
RL = EXAMPLES / "monarch_rl.py"
ROOT = EXAMPLES.parent
PATIENCE_S = 300.0
_MARK = "EXAMPLE_OF_A_TEST"  # in the environment of an example, and so of all its processes


async def run(program: Path, *arguments: str, patience: float = PATIENCE_S) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a program that ends by itself.

    The engine ends its processes with the one that started them, within moments.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark}
    folder = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
    try:
        with forking(folder, environment) as command:
            executable = folder / "python"
            executable.write_text(
                '#!/bin/sh\n[ "$2" = monarch._src.actor.bootstrap_main ] && '
                f'exec {shlex.join(command)}\nexec {shlex.quote(sys.executable)} "$@"\n'
            )
            executable.chmod(0o700)
            ended = await run_program(
                program,
                *arguments,
                environment=environment,
                timeout=patience,
                executable=executable,
            )
            await until(lambda: not left_over(mark))
    finally:
        for one in left_over(mark):
            one.kill()
        shutil.rmtree(folder)
    return ended


async def test_a_ring_of_actors_gets_each_others_tensors() -> None:
    status, out, err = await run(RING)
    assert status == 0, err
    pairs = re.findall(r"^actor (\d) put (\w{12}), got (\w{12}) of actor (\d)$", out, re.M)
    puts = {rank: put for rank, put, _, _ in pairs}
    assert len(set(puts.values())) == 3
    assert {rank: got for _, _, got, rank in pairs} == puts
    assert all(rank != of for rank, _, _, of in pairs)
    assert "in the store: ring/0, ring/1, ring/2\n" in out


async def test_a_dtensor_goes_from_rows_to_columns_between_two_meshes() -> None:
    status, out, err = await run(DTENSOR)
    assert status == 0, err
    assert re.findall(r"^(\w+) \w+ (?:put|got) \[(\d+), (\d+)\]$", out, re.M) == [
        *[("writer", "32", "48")] * 2,
        *[("reader", "64", "24")] * 2,
        ("this", "64", "48"),
    ]
    assert out.endswith("every element is right\n")


async def test_generator_actors_follow_a_sharded_learner_with_whole_weights() -> None:
    status, out, err = await run(RL)
    assert status == 0, err
    before, after = map(float, re.findall(r"^reward: (\S+) -> (\S+)$", out, re.M)[0])
    assert before < 0.3
    assert after > 0.7
    seen = re.findall(r"^generator \d used versions (.*)$", out, re.M)
    for versions in ([int(n) for n in each.split(", ")] for each in seen):
        assert len(versions) == 30
        assert versions == sorted(versions)
        assert all(n - 1 <= version <= n for n, version in enumerate(versions, start=1))
    assert len(seen) == 2
    assert "rollouts from torn weights: 0\n" in out


@pytest.mark.soak
async def test_weights_that_are_not_those_of_their_checksum_are_noticed() -> None:
    status, out, err = await run(RL, "--steps", "3", "--lag", "0", "--corrupt")
    assert status == 1
    assert "weights were torn" in err
    assert "rollouts from torn weights: 4\n" in out


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(RING, ("--actors", "0"), id="ring"),
        pytest.param(RL, ("--steps", "0"), id="rl"),
    ],
)
async def test_senseless_arguments_are_refused(program: Path, arguments: tuple[str, str]) -> None:
    status, _, err = await run_program(program, *arguments)
    assert status == 2
    assert "at least" in err


async def test_the_program_of_the_guide_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/monarch.md").read_text()
    found = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", text, re.M | re.S)
    assert found is not None
    program = tmp_path / "program.py"
    program.write_text(found[1])
    status, out, err = await run(program)
    assert status == 0, err
    assert out == found[2]


@pytest.mark.soak
async def test_the_benchmarks_inside_jobs_verify_what_they_measure(tmp_path: Path) -> None:
    scenarios = ["actors", "hosts", "job-start"]
    sizes = ["--quick", "--gb", "0.004", "--repeat", "1", "--out", str(tmp_path)]
    bench = ROOT / "benchmarks/bench.py"
    status, out, err = await run(bench, *sizes, "--only", *scenarios, patience=600)
    assert status == 0, out + err
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {state["error"] for state in report["scenarios"].values()} == {""}
    assert report["mismatches"] == []
    metrics = {metric["name"]: metric for metric in report["metrics"]}
    assert metrics["put 1 KB in an actor, two CPUs, p50"]["comparisons"][0]["target"] == 2.5
    # What is counted is no question of the machine.
    for size, calls in (("16 KB", 1), ("4 MB", 2)):
        assert metrics[f"calls, put_batch, {size}"]["values"] == [calls]
        assert metrics[f"calls, put_state_dict, {size}"]["values"] == [calls]
