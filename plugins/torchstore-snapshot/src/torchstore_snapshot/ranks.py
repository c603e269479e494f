"""The ranks that take or restore a snapshot together, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import torch

from torchstore_core.errors import ConfigurationError
from torchstore_snapshot.errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Ranks"]

T = TypeVar("T")


class _Message(msgspec.Struct, array_like=True):
    """What one rank sends to all: its data, or why it failed."""

    data: msgspec.Raw
    error: str | None = None


class Ranks:
    """This process among the ranks of a process group; alone if there is none.

    Args:
        group: the process group; None: the default one if ``torch.distributed`` is initialised.

    Raises:
        ConfigurationError: ``group`` is something else, or a group without this process.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        dist = torch.distributed
        given: object = group
        if dist.is_available() and given is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                "this rank is not in the process group pg; only the ranks in it make this call"
            )
        if given is not None and not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
            raise ConfigurationError(f"pg is a process group of torch.distributed, not {given!r}")
        self.rank, self.size = 0, 1
        self._group = group
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def alone(cls) -> Ranks:
        """Return a rank without others, whatever ``torch.distributed`` knows."""
        made = cls.__new__(cls)
        made.rank, made.size, made._group = 0, 1, None
        return made

    @contextmanager
    def telling(self) -> Iterator[None]:
        """While this rank alone looks at what it was given, and before the first exchange of a call
        that all ranks make: what is raised is told to the others, which would wait for this one.

        Raises:
            BaseException: what the body raises.
        """
        try:
            yield
        except BaseException as error:
            self.exchange(None, object, error)
            raise

    def exchange(
        self, value: T | None, kind: type[T], error: BaseException | None = None
    ) -> list[T]:
        """Send a value to all ranks; return those of all, by rank. All ranks call this, also one
        that has failed: it sends its ``error`` instead.

        Args:
            kind: the type of the value, which msgpack can encode and decode.

        Raises:
            RankFailedError: another rank sent an error, or has died, or was silent for longer than
                the group's timeout.
            BaseException: ``error``, after it was sent.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [cast(T, value)]
        data = b"\xc0" if error is not None else msgspec.msgpack.encode(value)
        text = None if error is None else f"{type(error).__name__}: {error}"
        sent = msgspec.msgpack.encode(_Message(msgspec.Raw(data), text))
        try:
            replies = self._gather(sent)
        except RankFailedError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        messages = [msgspec.msgpack.decode(reply, type=_Message) for reply in replies]
        failed = {rank: m.error for rank, m in enumerate(messages) if m.error is not None}
        if failed:
            which = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise RankFailedError(
                f"given up, because other ranks failed ({which})",
                details={"ranks": {str(rank): text for rank, text in failed.items()}},
            )
        return [msgspec.msgpack.decode(m.data, type=kind) for m in messages]

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather directly from each rank. Where ranks pass on what they have received, as in an
        all_gather, only the neighbours of one that has died hear of it; the others wait for those,
        which have given up.
        """
        dist = torch.distributed
        device = torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        try:
            dist.all_to_all_single(sizes, torch.full_like(sizes, len(data)), group=self._group)
            lengths = sizes.tolist()
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device).repeat(self.size)
            received = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
            given = [len(data)] * self.size
            dist.all_to_all_single(received, sent, lengths, given, group=self._group)
            return [bytes(part.numpy()) for part in received.cpu().split(lengths)]
        except RuntimeError as lost:  # what collectives raise
            silent = self._silent(sizes) or "the other ranks"
            raise RankFailedError(
                f"rank {self.rank} has not heard from {silent}, one of which may have died, or "
                f"been stopped: {lost}. A process group that has failed so is of no use any more: "
                "make another one and give it as pg=, or start the ranks again"
            ) from lost

    def _silent(self, sizes: torch.Tensor) -> str:
        """Return the ranks that have not sent a size: no message is empty."""
        if not sizes.is_cpu:
            return ""
        heard = sizes.tolist()
        return ", ".join(
            f"rank {rank}" for rank in range(self.size) if not heard[rank] and rank != self.rank
        )
