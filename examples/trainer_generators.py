"""A trainer publishes real weights after every step; generators take as many versions as they can.

    python examples/trainer_generators.py [--steps 12] [--generators 2] [--json]

This process owns the store. A trainer process fine-tunes MiniLM and puts all its tensors with one
atomic ``put_batch`` after every step. Each generator process starts from random weights, takes the
newest version straight into its own model with ``get_batch({key: destination})`` and embeds
sentences with it.

The trainer puts a checksum of every tensor into the same batch, and a generator recomputes them
from what its model then holds, which would reveal a mixture of two versions. The exit status is 0
only if there was none and no process died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from minilm import PAIRS, MiniLM
from rich import box
from rich.console import Console
from rich.table import Table
from workers import TIMEOUT_S, Report, Worker, checksum, copy_floor, follow, start, stop, times

import torchstore_core as ts

MANIFEST = "policy.manifest"  # {"step": int, "checksums": {tensor name: str}}


# ---- the two roles ------------------------------------------------------------------------


async def train(report: Report, options: argparse.Namespace) -> None:
    """Fine-tune; after every step publish tensors, step number and checksums as one version."""
    await ts.client()  # connect now, so that the first publish is not slower
    policy = MiniLM(pretrained=True)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-5)
    tensors = policy.tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    floor = copy_floor(nbytes)
    for step in range(1, options.steps + 1):
        loss = policy.train_step(optimizer)
        checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        if options.corrupt and step == options.steps:
            checksums[next(iter(checksums))] = "wrong"
        if step == 2:  # wait until every generator has the first version; later, no more waiting
            ready = [f"generator/{rank}" for rank in range(options.generators)]
            await ts.wait(ready, timeout=TIMEOUT_S)
        batch: dict[str, Any] = {f"policy/{name}": tensor for name, tensor in tensors.items()}
        batch[MANIFEST] = {"step": step, "checksums": checksums}
        floor_s = floor()
        started = time.perf_counter()
        await ts.put_batch(batch)
        seconds = time.perf_counter() - started
        numbers = {"seconds": seconds, "floor_s": floor_s, "nbytes": nbytes, "loss": loss}
        report({"step": step, **numbers})


async def generate(report: Report, options: argparse.Namespace, rank: int) -> None:
    """Take the newest version into this model, check it, and embed with it, up to the last one."""
    policy = MiniLM(pretrained=False)
    tensors = policy.tensors()
    destinations = {f"policy/{name}": tensor for name, tensor in tensors.items()}
    keys = [*destinations, MANIFEST]
    step = 0
    while step < options.steps:
        refs = await ts.wait(keys, min_version=step + 1, timeout=TIMEOUT_S)
        started = time.perf_counter()
        got = await ts.get_batch({**destinations, MANIFEST: None})
        seconds = time.perf_counter() - started

        published, sums = got[MANIFEST]["step"], got[MANIFEST]["checksums"]
        wrong = [name for name, tensor in tensors.items() if checksum(tensor) != sums.get(name)]
        if len({ref.version for ref in refs.values()}) != 1:
            wrong.append("the keys of one batch have different versions")
        if published <= step or published < refs[MANIFEST].version:
            wrong.append(f"step {published} came after step {max(step, refs[MANIFEST].version)}")

        step = max(step + 1, published)
        right = policy.right_answers()
        report({"step": step, "seconds": seconds, "right": right, "mismatches": wrong})
        await ts.put(f"generator/{rank}", step)


def worker_main(connection: Connection, rank: int | None, options: argparse.Namespace) -> None:
    """Entry point of the worker processes, which find the store through TORCHSTORE_ADDRESS."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (1 + options.generators)))
    if rank is None:
        asyncio.run(train(connection.send, options))
    else:
        asyncio.run(generate(connection.send, options, rank))


# ---- the process that owns the store ------------------------------------------------------


def summarise(trainer: Worker, generators: list[Worker]) -> dict[str, Any]:
    """Return the numbers as plain data."""
    nbytes = trainer.reports[0]["nbytes"]
    return {
        "bytes_per_version": nbytes,
        "versions_published": len(trainer.reports),
        "losses": [report["loss"] for report in trainer.reports],
        "copy_floor": times(trainer, nbytes, "floor_s"),
        "publish": times(trainer, nbytes),
        "generators": [
            {
                "fetch": times(worker, nbytes),
                "versions_seen": [report["step"] for report in worker.reports],
                "mismatches": [bad for report in worker.reports for bad in report["mismatches"]],
            }
            for worker in generators
        ],
        "mismatches": sum(len(r["mismatches"]) for w in generators for r in w.reports),
    }


def print_table(summary: dict[str, Any], console: Console) -> None:
    """Print the numbers as a table."""
    floor = summary["copy_floor"]["gb_per_s"]
    title = f"{summary['bytes_per_version'] / 1e6:.1f} MB a version; all compete for the same cores"
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for column in ("", "versions", "median", "max", "GB/s", "of floor", "mismatches"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, took: dict[str, float], versions: object = "", bad: object = "") -> None:
        median, worst = (f"{took[key] * 1e3:.1f} ms" for key in ("median_s", "max_s"))
        rate = took["gb_per_s"]
        share = f"{rate / floor:.0%}"
        table.add_row(name, str(versions), median, worst, f"{rate:.1f}", share, str(bad))

    row("copy floor", summary["copy_floor"])
    row("trainer puts", summary["publish"], summary["versions_published"])
    for rank, one in enumerate(summary["generators"]):
        seen, bad = len(one["versions_seen"]), len(one["mismatches"])
        row(f"generator {rank} gets", one["fetch"], seen, bad)
    console.print(table)
    for name in [bad for one in summary["generators"] for bad in one["mismatches"]]:
        console.print(f"mismatch: {name}", style="red")


def main() -> int:
    """Run the job; return 0 if every generator always held exactly one complete version."""
    parser = argparse.ArgumentParser(description="real weights, from a trainer to generators")
    parser.add_argument("--steps", type=int, default=12, help="training steps, a version each")
    parser.add_argument("--generators", type=int, default=2, help="generator processes")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, no more")
    parser.add_argument("--corrupt", action="store_true", help=argparse.SUPPRESS)  # has to fail
    options = parser.parse_args()
    if options.steps < 1 or options.generators < 1:
        parser.error("--steps and --generators are at least 1")
    console = Console(quiet=options.json)

    def note(worker: Worker, report: dict[str, Any]) -> str:
        took = f"{report['seconds'] * 1e3:5.1f} ms"
        if "right" in report:
            return f"{report['right']} of {len(PAIRS)} right, fetched in {took}"
        text = f"loss {report['loss']:.4f}, published in {took}"
        console.print(f"step {report['step']:3}: {text}", highlight=False)
        return text

    try:
        asyncio.run(ts.initialize(capacity=1 << 30))
        workers = [start("trainer", worker_main, None, options)]
        workers += [
            start(f"generator {rank}", worker_main, rank, options)
            for rank in range(options.generators)
        ]
        follow(workers, options.steps, console, note)
    except KeyboardInterrupt:
        return 130
    finally:
        stop()
        asyncio.run(ts.shutdown())
    summary = summarise(workers[0], workers[1:])
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary, console)
    return 1 if summary["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
