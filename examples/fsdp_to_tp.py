"""Two FSDP2 ranks train; two tensor-parallel ranks take the versions, resharded.

    python examples/fsdp_to_tp.py [--steps 8] [--json]

This process owns the store. The trainer ranks fine-tune MiniLM with ``fully_shard`` and each put
their own shards with one ``put_state_dict``: a version exists when both have done so. The generator
ranks shard the same model in another way. Each calls ``get_state_dict`` with its own DTensors, and
gets the bytes of its own shards, whichever rank put them; no rank gathers whole tensors.

Only to verify the result, both sides do gather them: the trainer publishes a checksum over all
whole tensors with every version, and the generator recomputes it from what its ranks then hold. The
exit status is 0 only if the checksums were always equal and no process died.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from minilm import PAIRS, MiniLM
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workers import TIMEOUT_S, Report, Worker, copy_floor, follow, start, stop, times

import torchstore_core as ts

RANKS = 2  # number of ranks of each job
KEY = "policy"


# ---- the two jobs -------------------------------------------------------------------------


async def train(report: Report, options: argparse.Namespace, rank: int, mesh: DeviceMesh) -> None:
    """One FSDP2 rank: train on its half of the data, and publish its shards after every step."""
    await ts.client()  # connect now, so that the first publish is not slower
    policy = MiniLM(pretrained=True)
    for layer in policy.model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy.model, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-5)
    nbytes = local_bytes(policy.model.state_dict())
    floor = copy_floor(nbytes * RANKS)
    share = len(PAIRS) // RANKS
    pairs = PAIRS[rank * share : (rank + 1) * share]
    for step in range(1, options.steps + 1):
        loss = policy.train_step(optimizer, pairs)
        tensors = policy.model.state_dict()
        checksum = checksum_of_whole(tensors)
        if options.corrupt and step == options.steps:
            checksum = "wrong"
        if step == 2:  # wait until the generator has the first version; later, no more waiting
            await ts.wait([f"generator/{r}" for r in range(RANKS)], timeout=TIMEOUT_S)
        floor_s = floor() if rank == 0 else 0.0
        dist.barrier()
        started = time.perf_counter()
        await ts.put_state_dict(
            {"model": tensors, "step": step, "checksum": checksum}, KEY, version=step, keep=2
        )
        seconds = time.perf_counter() - started
        numbers = {"seconds": seconds, "floor_s": floor_s, "nbytes": nbytes, "loss": loss}
        report({"step": step, **numbers, "layout": layout(tensors)})


async def generate(
    report: Report, options: argparse.Namespace, rank: int, mesh: DeviceMesh
) -> None:
    """One tensor-parallel rank: get versions into its own shards, check them, and embed."""
    policy = MiniLM(pretrained=False)
    parallelize_module(policy.model, mesh, tensor_parallel_plan(policy.model))
    tensors = policy.model.state_dict()
    wanted = {"model": tensors, "step": 0, "checksum": ""}
    nbytes = local_bytes(tensors)
    step = 0
    while step < options.steps:
        step, seconds = await get_same_version(wanted, step + 1)
        equal = wanted["step"] == step and wanted["checksum"] == checksum_of_whole(tensors)
        right = policy.right_answers()
        behind = await ts.latest_version(KEY) - step
        numbers = {"seconds": seconds, "nbytes": nbytes, "right": right, "behind": behind}
        report({"step": step, **numbers, "equal": equal, "layout": layout(tensors)})
        await ts.put(f"generator/{rank}", step)


async def get_same_version(wanted: dict[str, Any], min_version: int) -> tuple[int, float]:
    """Get the same version on all ranks of the group: the newest one that all of them see."""
    while True:
        ref = (await ts.wait(KEY, min_version=min_version, timeout=TIMEOUT_S))[KEY]
        version = agree_on_minimum(ref.version)
        started = time.perf_counter()
        try:
            await ts.get_state_dict(KEY, wanted, version=version)
        except ts.VersionGoneError:  # two newer versions exist by now (keep=2)
            version = 0
        seconds = time.perf_counter() - started
        if agree_on_minimum(version):
            return version, seconds


def agree_on_minimum(number: int) -> int:
    """Return the minimum of the ranks' numbers."""
    least = torch.tensor(number)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def tensor_parallel_plan(model: torch.nn.Module) -> dict[str, Any]:
    """Return which modules are sharded by columns and which by rows; the others are replicated."""
    plan: dict[str, Any] = {
        "embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate())
    }
    for name, _ in model.encoder.layer.named_children():
        layer = f"encoder.layer.{name}."
        for cut in ("attention.self.query", "attention.self.key", "attention.self.value"):
            plan[layer + cut] = ColwiseParallel()
        plan[layer + "intermediate.dense"] = ColwiseParallel()
        for cut in ("attention.output.dense", "output.dense"):
            plan[layer + cut] = RowwiseParallel()
    return plan


def local_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of bytes that this rank holds of the tensors."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


def checksum_of_whole(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum over the bytes of all tensors, gathered from all ranks."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        made.update(whole.contiguous().numpy())
    return made.hexdigest()


def layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return how many tensors are sharded along each dimension, and how many are replicated."""
    cuts = [
        f"cut along dim {placement.dim}" if placement.is_shard() else "whole"
        for t in tensors.values()
        for placement in (t.placements if isinstance(t, DTensor) else (Replicate(),))
    ]
    return dict(Counter(cuts).most_common())


def worker_main(
    connection: Connection, role: str, rank: int, options: argparse.Namespace, folder: str
) -> None:
    """Entry point of the worker processes, which find the store through TORCHSTORE_ADDRESS."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * RANKS)))
    meet = f"file://{folder}/{role}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    work = train if role == "trainer" else generate
    asyncio.run(work(connection.send, options, rank, mesh))
    dist.destroy_process_group()


# ---- the process that owns the store ------------------------------------------------------


def combine_ranks(workers: list[Worker]) -> dict[str, float]:
    """Combine the ranks of a job: all their bytes, in the time of the slowest rank."""
    nbytes = sum(worker.reports[0]["nbytes"] for worker in workers)
    slowest = Worker("", workers[0].process, workers[0].connection)
    for reports in zip(*(worker.reports for worker in workers), strict=True):
        slowest.reports.append({"seconds": max(report["seconds"] for report in reports)})
    return {"nbytes": nbytes, **times(slowest, nbytes)}


def summarise(trainer: list[Worker], generator: list[Worker]) -> dict[str, Any]:
    """Return the numbers as plain data."""
    whole = sum(worker.reports[0]["nbytes"] for worker in trainer)
    taken = [report for worker in generator for report in worker.reports]
    return {
        "copy_floor": {"nbytes": whole, **times(trainer[0], whole, "floor_s")},
        "publish": {**combine_ranks(trainer), "layout": trainer[0].reports[0]["layout"]},
        "fetch": {**combine_ranks(generator), "layout": generator[0].reports[0]["layout"]},
        "losses": [report["loss"] for report in trainer[0].reports],
        "versions_published": len(trainer[0].reports),
        "versions_seen": [[report["step"] for report in w.reports] for w in generator],
        "behind": [report["behind"] for report in taken],
        "not_equal": sum(not report["equal"] for report in taken),
    }


def print_table(summary: dict[str, Any], console: Console) -> None:
    """Print the numbers as a table."""
    title = "bytes of all ranks of a job; all compete for the same cores"
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for column in ("", "versions", "MB each", "median", "max", "GB/s", "of floor"):
        table.add_column(column, justify="right" if column else "left")
    floor = summary["copy_floor"]["gb_per_s"]

    def row(what: str, name: str, versions: object = "") -> None:
        one = summary[what]
        median, worst = (f"{one[key] * 1e3:.1f} ms" for key in ("median_s", "max_s"))
        size, rate, share = one["nbytes"] / 1e6, one["gb_per_s"], one["gb_per_s"] / floor
        table.add_row(
            name, str(versions), f"{size:.1f}", median, worst, f"{rate:.1f}", f"{share:.0%}"
        )

    row("copy_floor", "copy floor")
    row("publish", "2 FSDP2 ranks put", summary["versions_published"])
    row("fetch", "2 TP ranks get", len(summary["versions_seen"][0]))
    console.print(table)
    for what, job in (("publish", "trainer"), ("fetch", "generator")):
        counts = summary[what]["layout"].items()
        cuts = ", ".join(f"{count} {cut}" for cut, count in counts)
        console.print(f"{job:<10} {cuts}", highlight=False)
    newer = f"at most {max(summary['behind'])} newer versions when one was used up"
    console.print(f"staleness  {newer}", highlight=False)
    if bad := summary["not_equal"]:
        console.print(f"verified   {bad} times the weights were wrong", style="red")
    else:
        taken = len(summary["versions_seen"][0])
        verdict = f"all tensors of {taken} versions, gathered: every bit as published"
        console.print(f"verified   {verdict}", highlight=False)


def main() -> int:
    """Run both jobs; return 0 if every version arrived exactly as it was published."""
    parser = argparse.ArgumentParser(description="real weights, from FSDP2 to tensor parallel")
    parser.add_argument("--steps", type=int, default=8, help="training steps, a version each")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, no more")
    parser.add_argument("--corrupt", action="store_true", help=argparse.SUPPRESS)  # has to fail
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is at least 1")
    console = Console(quiet=options.json)

    def note(worker: Worker, report: dict[str, Any]) -> str:
        took = f"{report['seconds'] * 1e3:5.1f} ms"
        if "loss" in report:
            return f"loss {report['loss']:.4f}, put in {took}"
        return f"{report['right']} of {len(PAIRS)} right, got in {took}"

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="fsdp-to-tp-") as folder:
        try:
            asyncio.run(ts.initialize(capacity=1 << 30))
            for role in ("trainer", "generator"):
                for rank in range(RANKS):
                    name = f"{role} rank {rank}"
                    workers.append(start(name, worker_main, role, rank, options, folder))
            follow(workers, options.steps, console, note)
        except KeyboardInterrupt:
            return 130
        finally:
            stop()
            asyncio.run(ts.shutdown())
    summary = summarise(workers[:RANKS], workers[RANKS:])
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print_table(summary, console)
    return 1 if summary["not_equal"] else 0


if __name__ == "__main__":
    sys.exit(main())
