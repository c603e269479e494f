"""The runtime ``local``: the server is a child process that ends with its owner."""

from __future__ import annotations

import os

from torchstore_core.clients.calls.user_warnings import warn
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.machine.topology import capacity_warning, memory_limit_bytes
from torchstore_core.plugins.installed import Inventory
from torchstore_core.plugins.ranking import Policy
from torchstore_core.plugins.strategy_data import plain_options
from torchstore_core.runtimes.server_process import ServerProcess


class LocalRuntime(ServerProcess, Runtime):
    """A server of this host.

    Args:
        members: whether the server belongs to all its members, see ``server.serving.members``.
            This process then only starts the server, and hands it over with :meth:`release`.
    """

    keeps = True

    def __init__(self, *, members: bool = False) -> None:
        super().__init__()
        self._members = members

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        limit = memory_limit_bytes()
        if text := capacity_warning(options.capacity or 0, limit, "this host"):
            warn(text)
        config = {
            **plain_options(options),
            "block": Policy.unchecked(block=options.block).block,
            "owner": os.getpid(),
            "members": self._members,
            "keeper": options.keeper is not False,
            "installed": Inventory.taken(),
        }
        return await self.launch(config, options.timeout)
