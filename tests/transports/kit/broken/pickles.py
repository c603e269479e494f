"""A transport that unpickles what it is offered."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from tests.transports.kit.broken.simple import OFFER, Plugin, Simple, SimpleLink

from torchstore_core.contracts.transport import Link, LinkContext, Segment, ServerContext


class Pickled(Simple):
    """Its offer is a pickle."""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        await super().start(context, segments)
        return pickle.dumps(OFFER)


class PickledLink(SimpleLink):
    """Loads it."""

    @classmethod
    async def connect(cls, offer: bytes, context: LinkContext) -> Link:
        return await super().connect(pickle.loads(offer), context)


plugin = Plugin(PickledLink, Pickled)
