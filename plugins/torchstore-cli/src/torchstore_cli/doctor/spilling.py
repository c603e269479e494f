"""What ``torchstore doctor`` has to say about the place that a store spills to. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from torchstore_core.machine.directories import MEMORY_FILE_SYSTEMS
from torchstore_core.reports.units import human_bytes
from torchstore_core.wire import messages as m

__all__ = ["spill_notes"]


def spill_notes(status: m.StatusReport) -> Iterator[str]:
    """Why a store's spilling will not do what its user expects."""
    spill = status.spill
    if not spill.directory:
        return
    name = f"store {status.store_name!r} spills to {spill.directory}"
    if spill.file_system in (*MEMORY_FILE_SYSTEMS, "memory"):
        yield f"{name}, which is in memory ({spill.file_system}): spilling frees none of it"
    memory = sum(v.capacity_bytes for v in status.volumes if not v.lost)
    if spill.capacity_bytes < memory:
        yield (
            f"{name}, which has room for {human_bytes(spill.capacity_bytes)}, less than its memory "
            f"({human_bytes(memory)}): puts will soon be refused; use a larger disk, or a larger "
            "spill_capacity"
        )
    elif spill.disk_bytes + spill.left_bytes < memory:
        yield (
            f"{name}, where others have filled the disk: it takes {human_bytes(spill.left_bytes)} "
            f"more, and the store's memory has {human_bytes(memory)}: puts will be refused; free "
            "space there"
        )
    if spill.trouble:
        yield f"{name}, and could not write there: {spill.trouble}"
