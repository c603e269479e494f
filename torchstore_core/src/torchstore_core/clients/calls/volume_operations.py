"""Operations on volumes: empty one before it is taken away."""

from __future__ import annotations

import asyncio

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.calls.reference_operations import ReferenceOperations
from torchstore_core.errors import StoreTimeoutError, UnsupportedValueError, in_seconds
from torchstore_core.reports.repairs import DrainReport, check_drain
from torchstore_core.wire import messages as m

# How long until the server is asked again how far it is, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class VolumeOperations(ReferenceOperations):
    """The operations of a client on volumes."""

    async def drain(
        self,
        volume: str | int,
        *,
        undo: bool = False,
        wait: bool = True,
        timeout: float | None = None,
    ) -> DrainReport:
        """Empty a volume, so that it can be taken away without losing anything.

        From now on no put goes to it. What only it has is copied to other volumes, in the
        background and at most at the store's ``repair_bandwidth``. What it has is dropped as soon
        as there are as many copies elsewhere as the strategy wants, or as other volumes are left.
        Readers, also those with zero-copy tensors, keep what they have; its memory counts as used
        until they let go, and that of a tensor that ``empty`` has made there until it is put, or
        dies. If it spills to a place of its own, what is there goes, too; where the
        other volumes lack room, they spill as for puts.

        Draining goes on when this call has ended, by its timeout for example. To call it again is
        to wait again.

        Args:
            volume: the id of the volume (``status`` lists them), or its index.
            undo: put the volume back in service instead. What has left it does not come back.
            wait: until it is empty. False: return at once; ``status`` shows how far it is.
            timeout: seconds.

        Returns:
            How far it is; ``done`` says whether the volume is empty.

        Raises:
            DrainError: something cannot be moved, because the other volumes have no room, or there
                is no other one; ``details`` say how much. What can be moved has been moved; make
                room and call it again, or undo it.
            StoreTimeoutError: it takes longer, for example because somebody still reads what is
                there.
            ConfigurationError: there is no such volume, or it is lost.

        >>> async def main():  # ``lossy-1`` moves to another host
        ...     report = await ts.drain("lossy-1", timeout=600)
        ...     assert report.done
        """
        check_bools(undo=undo, wait=wait)
        if type(volume) not in (str, int):
            raise UnsupportedValueError(f"a volume is its id or its index, not {volume!r}")
        with self._watch("drain", timeout) as clock:
            what = "undo" if undo else "begin"
            pause = _FIRST_PAUSE_S
            while True:
                reply = await self._call(clock, m.DrainReply, m.Drain, str(volume), what)
                report = reply.report
                if undo or not wait or report.done:
                    return report
                check_drain(report, "undo=True")
                try:
                    left = clock.left()
                    await asyncio.sleep(pause if left is None else min(pause, left))
                    clock.left()
                except StoreTimeoutError as error:
                    raise StoreTimeoutError(
                        f"{report} after {in_seconds(clock.timeout)}; it goes on",
                        details=error.details,
                    ) from error
                what, pause = "look", min(2 * pause, _LONGEST_PAUSE_S)
