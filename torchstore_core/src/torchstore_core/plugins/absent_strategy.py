"""What a later life of a server has if it cannot load the store's strategy any more.

Its package was uninstalled while the store was running, or replaced by a version that does not fit.
All that the store has would be lost if the server did not start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import PluginError

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Loading:
    """Attempts to load a strategy, at most one in a second.

    Args:
        load: loads it, or raises ``PluginError``.
        error: why it could not be loaded the first time.
    """

    def __init__(self, load: Callable[[], Strategy], error: PluginError) -> None:
        self._load = load
        self._strategy: Strategy | None = None
        self._next = time.monotonic() + _AGAIN_S
        self._fail(error)

    def _fail(self, error: PluginError) -> None:
        self._error = PluginError(
            "nothing can be put, because this store's server was started again and its strategy "
            f"cannot be loaded any more (what is there can be read): {error.message}"
        )

    def strategy(self) -> Strategy:
        """Return the strategy, if it can be loaded by now.

        Raises:
            PluginError: it cannot.
        """
        if self._strategy is None and time.monotonic() >= self._next:
            try:
                self._strategy = self._load()
            except PluginError as error:
                self._fail(error)
            else:
                log.warning("the strategy can be loaded again")
            self._next = time.monotonic() + _AGAIN_S
        if self._strategy is None:
            raise self._error
        return self._strategy


class AbsentStrategy(Strategy, frozen=True):
    """Stands in for a strategy until it can be loaded: values can be read and copied, not put.

    Args:
        loading: what loads it.
        copies: how many copies it wanted when it was there.
    """

    loading: Loading
    copies: int = 1

    @classmethod
    def of(cls, fields: bytes, copies: int, loading: Loading) -> AbsentStrategy:
        """Return the stand-in for a strategy with these encoded fields."""
        transport = msgspec.json.decode(fields, type=dict[str, Any]).get("transport")
        known = tuple(transport) if isinstance(transport, list) else transport
        return cls(transport=known, loading=loading, copies=copies)

    @property
    def by_key(self) -> bool:
        """That of the strategy."""
        return self.loading.strategy().by_key

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Ask the strategy."""
        return self.loading.strategy().place(client, volumes, nbytes, keys)

    def place_copy(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        key: str,
        copies: Sequence[int],
    ) -> Sequence[int]:
        """Ask the strategy."""
        return self.loading.strategy().place_copy(client, volumes, nbytes, key, copies)

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """Ask the strategy; without it, choose as most do."""
        try:
            strategy = self.loading.strategy()
        except PluginError:
            return super().choose(client, copies)
        return strategy.choose(client, copies)
