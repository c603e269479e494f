"""Benchmarks: ``make bench``, or ``python benchmarks/bench.py --help``.

Everything is compared with floors measured in the same process, in the same rounds: a round takes
each floor and the operation once, in rotating order; ratios are made within a round, and their
median over the rounds is what counts. Nothing is left out but the warm-up rounds.

The exit status is 0 if every tensor came back right, whether targets were met or not; 1 if one came
back wrong, a process was left behind or a scenario failed; 2 if the run could not start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from inputs import models
from output.plots import plot
from output.results import Metric, floors_table, table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from scenarios import (
    full_memory,
    libraries,
    monarch_jobs,
    networks,
    overheads,
    placement,
    publishing,
    references,
    resharding,
    snapshots,
    transfers,
)
from scenarios.run import Bench

from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.floors import FLOOR_MAX
from torchstore_cli.bench.workers import Workers
from torchstore_core.errors import TorchStoreError
from torchstore_core.machine import copying, topology

SCENARIOS: dict[str, Callable[[Bench], list[Metric]]] = {
    "cold": transfers.cold,
    "prefaulted": transfers.prefaulted,
    "warm": transfers.warm,
    "warm-omp1": transfers.warm_omp1,
    "mapped": placement.mapped,
    "volumes": placement.volumes,
    "state-dict": resharding.state_dict,
    "layouts": resharding.layouts,
    "checkpoint": resharding.checkpoint,
    "snapshots": snapshots.snapshots,
    "entries": publishing.entries,
    "partial": publishing.partial,
    "cast": publishing.cast,
    "devices": transfers.devices,
    "networks": networks.networks,
    "libraries": libraries.libraries,
    "spilling": full_memory.spilling,
    "references": references.references,
    "small": overheads.small,
    "batch": overheads.batch,
    "keys": overheads.keys,
    "restart": overheads.restart,
    "import": overheads.imports,
    "start": overheads.start,
    "flat": overheads.flat,
    "actors": monarch_jobs.in_actors,
    "hosts": monarch_jobs.across_hosts,
    "job-start": monarch_jobs.start,
}
_WORKER = Path(__file__).with_name("worker.py")
#: Inside a Monarch job; left out where Monarch is not installed, unless asked for by name.
MONARCH = ("actors", "hosts", "job-start")
#: Left out by --quick, unless asked for by name.
LONG = ("checkpoint", "snapshots", *MONARCH)
QUICK = (
    "0.1 GB, 3 rounds, 1000 cycles; no more than two readers: about a minute; "
    f"without {', '.join(LONG)}"
)


@dataclass(frozen=True)
class Options:
    """The command line."""

    gb: float
    repeat: int
    cycles: int
    entries: int
    seed: int
    scenarios: list[str]
    out: str
    quick: bool
    model: str | None = None


def parse(arguments: list[str]) -> Options:
    """Options from the command line; ends the program when they are not right."""
    names = "\n".join(
        f"  {name:<11} {(function.__doc__ or '').strip().splitlines()[0]}"
        for name, function in SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        description="Benchmarks of the store beside the floors of this machine.",
        epilog=f"scenarios:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=QUICK)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gb", type=float, help="size of the set of weights (default 0.76)")
    size.add_argument(
        "--model",
        metavar="NAME",
        help="weights of the shapes of that model: a name on the Hugging Face Hub that models.py "
        "knows or this machine has, a folder, or a model type of transformers; no network",
    )
    add("--repeat", type=int, metavar="N", help="measured rounds (default 9)")
    add("--cycles", type=int, metavar="N", help="put/get/delete cycles (default 10000)")
    add("--entries", type=int, default=18_000, metavar="N", help="small entries (default 18000)")
    add("--seed", type=int, default=1, help="of the random bits (default 1)")
    add("--only", nargs="+", metavar="NAME", choices=SCENARIOS, default=[], help="see below")
    add("--skip", nargs="+", metavar="NAME", choices=SCENARIOS, default=[], help="see below")
    add("--out", metavar="DIR", default="bench-results", help="default bench-results")
    given = parser.parse_args(arguments)
    gb, repeat, cycles = (0.1, 3, 1000) if given.quick else (0.76, 9, 10_000)
    gb = gb if given.gb is None else given.gb
    repeat = repeat if given.repeat is None else given.repeat
    cycles = cycles if given.cycles is None else given.cycles
    if not gb > 0 or repeat < 1 or cycles < 10 or given.entries < 100:
        parser.error(
            "--gb is above 0, --repeat at least 1, --cycles at least 10, --entries at least 100"
        )
    left_out = {*given.skip}
    if not given.only:
        left_out |= {*(LONG if given.quick else ())}
        left_out |= {*(() if importlib.util.find_spec("torchstore_monarch") else MONARCH)}
    chosen = [n for n in SCENARIOS if n in (given.only or SCENARIOS) and n not in left_out]
    return Options(
        gb,
        repeat,
        cycles,
        given.entries,
        given.seed,
        chosen,
        given.out,
        given.quick,
        given.model,
    )


def weights(options: Options) -> tuple[workload.Shapes, str]:
    """The set of weights, and what to call it.

    Raises:
        UnknownModelError: the model is not known.
    """
    if options.model is None:
        return workload.shapes(options.gb), "like Qwen3-4B, scaled"
    shapes, origin = models.shapes(options.model)
    return shapes, f"{options.model} in bfloat16, by {origin}, random bits"


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "cpus": floors.cpus(),
        "memory_bytes": topology.memory_limit_bytes(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "copy_threads": copying.copy_threads(),
        "native_copy": copying.has_native(),
    }


def memory_short(one: int) -> str | None:
    """Why a set of that many bytes does not fit this machine; None if it does."""
    # Publisher and reader hold a set and two floor buffers each, the store up to three versions.
    needed = 5 * one + 4 * min(one, FLOOR_MAX)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    there = min(int(fields["MemAvailable"].split()[0]) * 1024, topology.memory_limit_bytes())
    if needed < 0.95 * there:
        return None
    sizes = f"needs {needed / 1e9:.1f} GB of memory; {there / 1e9:.1f} GB are available"
    return f"a set of {one / 1e9:g} GB {sizes}"


def run(
    options: Options, shapes: workload.Shapes, console: Console
) -> tuple[list[Metric], list[Metric], dict[str, Any]]:
    """Run the scenarios; their metrics, their floors, and all that belongs into the JSON."""
    metrics: list[Metric] = []
    states: dict[str, dict[str, Any]] = {}
    started = time.time()
    columns = (SpinnerColumn(), TextColumn("{task.fields[name]:<11}"), BarColumn(30))
    text = TextColumn("{task.fields[what]}")
    with (
        Workers([str(_WORKER)]) as workers,
        Progress(*columns, TimeElapsedColumn(), text, console=console) as progress,
    ):
        o = options
        bench = Bench(shapes, o.repeat, o.seed, o.cycles, o.entries, o.quick, workers)
        for role in ("publisher", "reader"):  # import torch at the same time
            workers.get(role)
        for name in options.scenarios:
            task = progress.add_task("", total=1, name=name, what="")

            def step(done: int, total: int, what: str, task: Any = task) -> None:
                progress.update(task, completed=done, total=total, what=what)

            bench.progress = step
            begin = time.perf_counter()
            error = ""
            try:
                made = SCENARIOS[name](bench)
                metrics.extend(made)
                met = [m.ok for m in made if m.ok is not None]
                step(1, 1, f"{sum(met)} of {len(met)} within target" if met else "done")
            except (TorchStoreError, subprocess.SubprocessError) as caught:
                error = str(caught)
                step(0, 1, "[bold red]failed[/]")
            states[name] = {"seconds": time.perf_counter() - begin, "error": error}
            if error:
                workers.close()  # whatever state they are in: the next scenario gets new ones
    left = workers.leftovers()
    report = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": time.time() - started,
        "options": asdict(options),
        "machine": machine(),
        "workload": {
            "tensors": len(bench.shapes),
            "nbytes": bench.nbytes,
            "model": options.model,
            "warm_up_rounds": bench.warm_ups,
            **bench.facts,
        },
        "scenarios": states,
        "left_out": bench.left_out,
        "mismatches": bench.wrong,
        "processes": [{"pid": pid, "name": name} for pid, name in workers.started.items()],
        "servers": workers.servers,
        "left_behind": left,
        "metrics": [metric.plain() for metric in metrics],
        "floors": [floor.plain() for floor in bench.floors],
    }
    return metrics, bench.floors, report


def show(
    metrics: list[Metric], floors_of_run: list[Metric], report: dict[str, Any], console: Console
) -> None:
    """The tables, and below them what they do not say."""
    size = report["workload"]["nbytes"] / 1e9
    here = report["machine"]
    title = f"{report['workload']['tensors']} tensors, {size:.2f} GB · {here['cpus']} CPUs"
    console.print(table(metrics, title))
    if floors_of_run:
        console.print(floors_table(floors_of_run))
    judged = [metric for metric in metrics if metric.ok is not None]
    met, met_plain = sum(bool(m.ok) for m in judged), sum(bool(m.ok_plain) for m in judged)
    console.print(
        "[dim]GB are 1e9 bytes. Medians over rounds, ratios within a round. The first floor named "
        "is the strictest: of all its kind the fastest, by median over the rounds.[/]"
    )
    console.print(
        f"{met} of {len(judged)} measures within target against every floor, the strictest "
        f"included; {met_plain} against one at least"
    )
    for name, state in report["scenarios"].items():
        if state["error"]:
            console.print(f"[bold red]{name} failed[/]: {escape(state['error'])}")
    for name, why in report["left_out"].items():
        console.print(f"not measured: {name}, because {why}")
    if report["left_behind"]:
        console.print(f"[bold red]servers left behind[/]: {report['left_behind']}")
    wrong = report["mismatches"]
    if wrong:
        console.print(f"[bold red]{len(wrong)} mismatches[/]: {', '.join(wrong[:5])}")
    else:
        console.print("mismatches: 0")


def main(arguments: list[str]) -> int:
    """Run, show, write; the exit code."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    try:
        shapes, described = weights(options)
        short = memory_short(workload.nbytes(shapes))
    except models.UnknownModelError as error:
        short = str(error)
    if short is not None:
        console.print(f"[bold red]{escape(short)}[/]")
        return 2
    console.print(f"weights: {len(shapes)} tensors, {described}")

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    try:
        metrics, floors_of_run, report = run(options, shapes, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    show(metrics, floors_of_run, report, console)
    if metrics:
        plot(metrics, report, out / "bench.png")
    console.print(f"written: {out / 'bench.json'}" + (f", {out / 'bench.png'}" if metrics else ""))
    failed = any(state["error"] for state in report["scenarios"].values())
    return 1 if failed or report["mismatches"] or report["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
