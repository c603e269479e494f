"""The server half. It imports torch with the first client."""

from __future__ import annotations

from typing import ClassVar

from torchstore_transports.pairs.half import PairServer


class TorchCommsServer(PairServer):
    """See :class:`~torchstore_transports.pairs.half.PairServer`."""

    factory: ClassVar[str] = "torchstore_torchcomms.pair:make"
