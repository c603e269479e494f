"""The client half."""

from __future__ import annotations

from typing import ClassVar

from torchstore_transports.pairs.link import PairLink


class TorchCommsLink(PairLink):
    """See :class:`~torchstore_transports.pairs.link.PairLink`."""

    factory: ClassVar[str] = "torchstore_torchcomms.pair:make"
