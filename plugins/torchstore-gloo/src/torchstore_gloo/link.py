"""Client half of ``gloo``."""

from __future__ import annotations

from typing import ClassVar

from torchstore_transports.pairs.link import PairLink


class GlooLink(PairLink):
    """See :class:`~torchstore_transports.pairs.link.PairLink`."""

    factory: ClassVar[str] = "torchstore_gloo.pair:make"
