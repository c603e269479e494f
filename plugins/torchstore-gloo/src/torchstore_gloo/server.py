"""Server half of ``gloo``. It imports torch when its first client arrives."""

from __future__ import annotations

from typing import ClassVar

from torchstore_transports.pairs.half import PairServer


class GlooServer(PairServer):
    """See :class:`~torchstore_transports.pairs.half.PairServer`."""

    factory: ClassVar[str] = "torchstore_gloo.pair:make"
