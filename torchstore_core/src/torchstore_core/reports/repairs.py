"""How far the store is with copies that it makes by itself. Torch-free.

The messages of the wire protocol carry these values.
"""

from __future__ import annotations

import msgspec

from torchstore_core.errors import DrainError
from torchstore_core.reports.summaries import count_text
from torchstore_core.reports.units import human_bytes


class RepairStatus(msgspec.Struct, frozen=True):
    """Values that have fewer copies than they should, and what is done about that.

    Args:
        values, nbytes: how many values lack copies, or are on a volume that is drained, and how
            many bytes are left to copy.
        stuck_values, stuck_bytes: those of them that cannot be copied at the moment, counted above,
            too.
        why: why not; empty if all can.
        scanning: whether the store is still looking for such values, so that there may be more.
        copied_values, copied_bytes: what was copied since the store began.
        bytes_per_s: how fast, over the last seconds; 0 if nothing is being copied.
        bandwidth: the most bytes to copy per second; 0: no limit.
        trouble: why copies could not be made the last time; empty if they could.
    """

    values: int = 0
    nbytes: int = 0
    stuck_values: int = 0
    stuck_bytes: int = 0
    why: str = ""
    scanning: bool = False
    copied_values: int = 0
    copied_bytes: int = 0
    bytes_per_s: float = 0.0
    bandwidth: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        """One line for people; empty if there is nothing to do and nothing was done."""
        if not (self.values or self.copied_values or self.scanning):
            return ""
        parts: list[str] = []
        if self.values:
            part = f"{count_text(self.values, 'value')} to copy, {human_bytes(self.nbytes)} left"
            if self.bytes_per_s:
                part += f", {human_bytes(int(self.bytes_per_s))}/s"
            parts.append(part)
        elif self.scanning:
            parts.append("looking for values that lack copies")
        else:
            parts.append("done")
        if self.copied_values:
            made = f"{count_text(self.copied_values, 'value')} ({human_bytes(self.copied_bytes)})"
            parts.append(f"{made} copied so far")
        if self.stuck_values:
            stuck = f"{count_text(self.stuck_values, 'value')} ({human_bytes(self.stuck_bytes)})"
            parts.append(f"{stuck} cannot be copied: {self.why}")
        if self.trouble:
            parts.append(f"the last copies failed: {self.trouble}")
        return "; ".join(parts)


class DrainReport(msgspec.Struct, frozen=True):
    """How far the draining of one volume is; the result of ``drain``.

    Args:
        volume: the id of the volume.
        draining: whether it is drained, so that no put goes to it; False once that was undone.
        nbytes: the bytes of its memory that are in use, by values, their readers, and puts that had
            begun before, and of its disk. It is empty when they are 0.
        leased_bytes: what readers lease of its bytes, zero-copy tensors for example.
        unfinished_bytes: what puts that had begun before still write to it.
        stuck_values, stuck_bytes: what cannot be moved, though there is nothing else left to do.
        why: why not; or, if nothing is stuck, what the next copies wait for; empty if for nothing.
        spilled_bytes: how many of its bytes are on its disk, if it has one of its own to spill to;
            where all volumes share one, what is there need not go.
    """

    volume: str
    draining: bool
    nbytes: int
    leased_bytes: int = 0
    unfinished_bytes: int = 0
    stuck_values: int = 0
    stuck_bytes: int = 0
    why: str = ""
    spilled_bytes: int = 0

    @property
    def done(self) -> bool:
        """Whether the volume is empty and stays so: it can be taken away."""
        return self.draining and not self.nbytes

    def __str__(self) -> str:
        """One line for people."""
        if not self.draining:
            return f"volume {self.volume} is in service, {human_bytes(self.nbytes)} used"
        if self.done:
            return f"volume {self.volume} is empty"
        text = f"volume {self.volume} is being drained: {human_bytes(self.nbytes)} left"
        parts = [
            f"{human_bytes(self.leased_bytes)} leased by readers" if self.leased_bytes else "",
            f"{human_bytes(self.unfinished_bytes)} being written" if self.unfinished_bytes else "",
            f"{human_bytes(self.spilled_bytes)} on its disk" if self.spilled_bytes else "",
            f"{count_text(self.stuck_values, 'value')} ({human_bytes(self.stuck_bytes)}) cannot be "
            f"moved: {self.why}"
            if self.stuck_values
            else f"the next copies wait: {self.why}"
            if self.why
            else "",
        ]
        return "; ".join([text, *filter(None, parts)])


def check_drain(report: DrainReport, undo: str) -> None:
    """Raise ``DrainError`` if a volume that is to be drained will not become empty as things are.

    Args:
        undo: what puts it back in service, as text that follows "with".
    """
    details = msgspec.structs.asdict(report)
    if not report.draining:
        raise DrainError(
            f"volume {report.volume} was put back in service by somebody else while it was drained",
            details=details,
        )
    if report.stuck_values:
        raise DrainError(
            f"{report}. Make room on the other volumes and drain it again, or put it back in "
            f"service with {undo}",
            details=details,
        )
