"""Volumes that are emptied before they are taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchstore_core.errors import ConfigurationError, DrainError
from torchstore_core.reports.repairs import DrainReport
from torchstore_core.server.memory.volume_record import VolumeRecord
from torchstore_core.server.repairing.repairs import Repairs
from torchstore_core.wire import messages as m

# How often is looked again for values on a volume that should be empty by now, in seconds.
_FIRST_S, _LONGEST_S = 1.0, 30.0


class Drains:
    """Drains volumes of a store, and puts them back in service.

    Args:
        later: calls something after so many seconds.
    """

    def __init__(
        self,
        volumes: Sequence[VolumeRecord],
        repairs: Repairs,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._volumes = volumes
        self._repairs = repairs
        self._later = later
        self._is_timed = False

    def drain(self, request: m.Drain) -> DrainReport:
        """Begin to drain a volume, undo it, or only look; returns how far it is.

        Raises:
            ConfigurationError: there is no such volume, or it is lost.
            DrainError: no other volume is in service.
        """
        volume = self._named(request.volume)
        if volume.lost:
            raise ConfigurationError(
                f"volume {volume.info.id} is lost ({volume.lost}): there is nothing to drain"
            )
        if request.what == "undo" and volume.draining:
            self._repairs.drain(volume, draining=False)
        elif request.what == "begin":
            if not volume.draining:
                self._check(volume)
            self._repairs.drain(volume, draining=True)
            self.go_on()
        return self.report(volume)

    def _named(self, name: str) -> VolumeRecord:
        for volume in self._volumes:
            if name in (volume.info.id, str(volume.index)):
                return volume
        names = ", ".join(v.info.id for v in self._volumes)
        raise ConfigurationError(f"there is no volume {name!r}; there are {names}")

    def _check(self, volume: VolumeRecord) -> None:
        name = volume.info.id
        if not any(other is not volume and not other.closed for other in self._volumes):
            raise DrainError(
                f"volume {name} cannot be drained: no other volume of the store is in service, so "
                "nothing that is on it could go elsewhere, and no put would have a place",
                details={"volume": name, "stuck_values": 0, "stuck_bytes": volume.allocator.used},
            )

    def report(self, volume: VolumeRecord) -> DrainReport:
        """How far the draining of a volume is."""
        repairs = self._repairs
        index = volume.index
        stuck = []
        if volume.draining and repairs.idle:
            stuck = [e for e in repairs.parked if index in dict(e.value.places)]
            if volume.leased or volume.unfinished:  # there will be memory to read them
                stuck = [e for e in stuck if not e.waits]
        on_disk = repairs.departures.disk_bytes(index)
        return DrainReport(
            volume=volume.info.id,
            draining=volume.draining,
            nbytes=volume.allocator.used + on_disk,
            leased_bytes=volume.leased,
            unfinished_bytes=volume.unfinished,
            spilled_bytes=on_disk,
            stuck_values=len(stuck),
            stuck_bytes=sum(e.value.nbytes for e in stuck),
            why=next((e.why for e in stuck), (volume.draining and repairs.waits_for) or ""),
        )

    def go_on(self) -> None:
        """Look from time to time whether volumes that are drained are empty."""
        if any(volume.draining for volume in self._volumes):
            self._look_later(_FIRST_S)

    def _look_later(self, delay: float) -> None:
        """Look again for what may have come to a drained volume by ways that nothing reported."""
        if self._is_timed:
            return
        self._is_timed = True

        def look() -> None:
            self._is_timed = False
            drained = [v for v in self._volumes if v.draining and not v.lost]
            if drained:
                if self._repairs.idle and any(self.report(v).nbytes for v in drained):
                    self._repairs.look()
                self._look_later(min(2 * delay, _LONGEST_S))

        self._later(delay, look)
