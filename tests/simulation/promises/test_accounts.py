"""Each way in which accounts can be wrong is seen, also just after they were right."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from tests.simulation.machine.memory import LINE, Memory, simulated_volume
from tests.simulation.machine.servers import here
from tests.simulation.promises.accounts import Accounts
from tests.simulation.promises.violations import Violation

from torchstore_core.contracts.strategy import ClientFacts, Strategy
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import SessionRecord, Value
from torchstore_core.server.memory.volume_record import Halves
from torchstore_core.server.spilling.policy import State
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

FACTS = ClientFacts(1, "host", "host")


class Store:
    """A value that is leased, one that travels inside messages, one that may be evicted, and a put
    that is under way.
    """

    def __init__(self) -> None:
        halves = cast(Halves, None)
        self.volumes = [simulated_volume(at, Memory(9 * LINE), halves, here(), ()) for at in (0, 1)]
        self.controller = Controller(self.volumes, Strategy())
        self.session = self.controller.open_session(FACTS, here())
        self.put(1, "leased", LINE)
        self.put(2, "inline", 8, bytes(8))
        self.controller.commit(self.session, 1)
        self.controller.locate(self.session, m.Locate(3, 1, [m.Want("leased")], 0))
        self.put(4, "unfinished", 2 * LINE)
        self.put(5, "evictable", LINE, when_full=m.EVICTABLE)
        self.controller.commit(self.session, 5)

    def put(
        self, txn: int, key: str, nbytes: int, data: bytes | None = None, when_full: int = m.PINNED
    ) -> None:
        item = m.PutItem(key, TensorMeta("uint8", (nbytes,)), nbytes, data)
        self.controller.put(self.session, m.Put(txn, txn, [item], when_full=when_full))

    def value(self, key: str) -> Value:
        found = self.controller.catalog.newest[key]
        assert type(found) is Value
        return found

    @property
    def other(self) -> SessionRecord:
        return self.controller.open_session(FACTS, here())


def _moves(store: Store) -> None:
    store.value("leased").offset += LINE


def _is_elsewhere(store: Store) -> None:
    store.value("leased").volume = 1


def _has_a_copy(store: Store) -> None:
    store.value("leased").more = ((1, 0),)


def _grows(store: Store) -> None:
    store.value("inline").nbytes += 8


def _is_pinned(store: Store) -> None:
    store.value("inline").pins += 1


def _is_leased_twice(store: Store) -> None:
    store.other.leases[7] = [store.value("leased")]


def _is_leased_no_more(store: Store) -> None:
    store.session.leases.clear()


def _is_lost_to_the_catalog(store: Store) -> None:
    del store.controller.catalog.newest["inline"]


def _is_freed(store: Store) -> None:
    store.volumes[0].allocator.free([(store.value("leased").offset, LINE)])


def _is_taken_by_nobody(store: Store) -> None:
    store.volumes[1].allocator.allocate(LINE)


def _is_used(store: Store) -> None:
    store.volumes[1].allocator.used += LINE


def _is_free_no_more(store: Store) -> None:
    store.volumes[1].allocator.allocate(LINE)
    store.volumes[1].allocator.used -= LINE


def _counts_inline(store: Store) -> None:
    store.volumes[0].inline += 1


def _counts_leased(store: Store) -> None:
    store.volumes[0].leased = 0


def _counts_unfinished(store: Store) -> None:
    store.volumes[0].unfinished = 0


def _was_granted_less(store: Store) -> None:
    store.session.txns[4].granted[0] -= LINE


def _ends_a_put(store: Store) -> None:
    store.session.txns.clear()


def _tracks_what_is_gone(store: Store) -> None:
    residency = store.controller.spilling.values
    residency._tracked[0] = residency.all()[0]


def _counts_cached(store: Store) -> None:
    store.controller.spilling.values.bytes_of[State.CACHED] -= LINE


def _is_said_to_be_away(store: Store) -> None:
    (cached,) = store.controller.spilling.values.all()
    cached.state = State.ON_DISK


@pytest.mark.parametrize(
    "breaks",
    [
        *(_moves, _is_elsewhere, _has_a_copy, _grows, _is_pinned, _is_leased_twice),
        *(_is_leased_no_more, _is_lost_to_the_catalog, _is_freed, _is_taken_by_nobody, _is_used),
        *(_is_free_no_more, _counts_inline, _counts_leased, _counts_unfinished),
        *(_was_granted_less, _ends_a_put),
        *(_tracks_what_is_gone, _counts_cached, _is_said_to_be_away),
    ],
)
def test_what_is_wrong_is_seen(breaks: Callable[[Store], None]) -> None:
    store, accounts = Store(), Accounts()
    for _ in range(2):
        accounts.check(store.controller)
    breaks(store)
    for _ in range(2):  # it stays wrong
        with pytest.raises(Violation, match="accounts"):
            accounts.check(store.controller)
