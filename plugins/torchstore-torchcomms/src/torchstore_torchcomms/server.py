"""The server half. It imports torch with the first client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from torchstore_core.contracts.transport import Segment, ServerContext
from torchstore_transports.pairs.half import PairServer


class TorchCommsServer(PairServer):
    """See :class:`~torchstore_transports.pairs.half.PairServer`."""

    factory: ClassVar[str] = "torchstore_torchcomms.pair:make"

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        """See ``contracts.transport``."""
        # torchcomms logs every communicator. The level is read when torch is imported.
        os.environ.setdefault("GLOG_minloglevel", "2")
        return await super().start(context, segments)
