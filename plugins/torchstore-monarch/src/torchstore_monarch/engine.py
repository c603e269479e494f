"""What Monarch offers to stores that span hosts: ``torchstore_core.contracts.engine``.

Where the parts of that contract are: volumes and relays in ``host``, the server and its end of the
uplinks in ``controller``, stores by name in ``directory`` and ``finding``, ranks of a launcher in
``spmd``. Nothing of Monarch is imported before a method needs it: ranks of a launcher never do.
"""

from __future__ import annotations

from torchstore_core.contracts.engine import Engine, RankStore, Rendezvous
from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.contracts.runtime import StoreOptions

__all__ = ["MonarchEngine"]


class MonarchEngine(Engine):
    """The stores of a Monarch job."""

    async def find(self, store_name: str, timeout: float | None) -> str | None:
        from torchstore_monarch import finding

        return await finding.find(store_name, timeout)

    async def end(self, store_name: str, timeout: float | None) -> bool:
        from torchstore_monarch import finding

        return await finding.end(store_name, timeout)

    def local_rank(self) -> int | None:
        from torchstore_monarch import finding

        return finding.rank()

    async def start_for_ranks(
        self, options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous
    ) -> RankStore:
        from torchstore_monarch.spmd import starting

        return await starting.start(options, env, rendezvous)
