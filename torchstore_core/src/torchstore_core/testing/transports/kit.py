"""One class, to be subclassed, with the tests of all modules of this package."""

from __future__ import annotations

from torchstore_core.testing.transports.abilities import AbilityTests
from torchstore_core.testing.transports.closing import ClosingTests
from torchstore_core.testing.transports.descriptor import DescriptorTests
from torchstore_core.testing.transports.in_store import StoreTests
from torchstore_core.testing.transports.lasting import LastingTests
from torchstore_core.testing.transports.listening import ListeningTests
from torchstore_core.testing.transports.moving import MovingTests
from torchstore_core.testing.transports.refusing import RefusingTests
from torchstore_core.testing.transports.stopping import StoppingTests

__all__ = ["TransportTests"]


class TransportTests(
    DescriptorTests,
    MovingTests,
    AbilityTests,
    RefusingTests,
    StoppingTests,
    ClosingTests,
    LastingTests,
    ListeningTests,
    StoreTests,
):
    """Subclass this in a test module of your package, under a name that pytest collects::

        from torchstore_core.testing import TransportTests

        class TestMine(TransportTests):
            name = "mine"

    The attributes are those of :class:`~torchstore_core.testing.transports.base.TransportKit`.
    Override :meth:`endpoints` for a server half that cannot be started in a plain process.
    """
