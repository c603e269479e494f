"""Which values leave memory first, against a model that is a plain list."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.server.index.records import Value
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.server.spilling.policy import Residency, State, Ticket, Tracked
from torchstore_core.values import TensorMeta

_FACTS = ClientFacts("host", "host", 1)
RANKED = (State.CACHED, State.DIRTY, State.CLEAN)
states = st.sampled_from(State)


class Policy(RuleBasedStateMachine):
    """Values enter, are used, change their state, are leased and forgotten."""

    values = Bundle("values")

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency()
        self.order: list[Tracked] = []  # the least recently used first
        self.tickets: list[tuple[Ticket, list[Tracked]]] = []

    @rule(target=values, nbytes=st.integers(1, 1000), state=states)
    def enter(self, nbytes: int, state: State) -> Tracked:
        value = Value("k", TensorMeta("uint8", (nbytes,)), nbytes, 0, None, 0, _FACTS, uses=1)
        tracked = self.residency.add(value, "k", state)
        self.order.append(tracked)
        return tracked

    @rule(tracked=values)
    def use(self, tracked: Tracked) -> None:
        self.residency.touch(tracked)
        if tracked.state in RANKED:
            self.order.remove(tracked)
            self.order.append(tracked)

    @rule(tracked=values, state=states, first=st.booleans())
    def move(self, tracked: Tracked, state: State, first: bool) -> None:
        self.residency.move(tracked, state, first=first)
        self.order.remove(tracked)
        self.order.insert(0 if first else len(self.order), tracked)

    @rule(tracked=values)
    def lease(self, tracked: Tracked) -> None:
        tracked.value.pins += 1

    @rule(tracked=values)
    def release(self, tracked: Tracked) -> None:
        tracked.value.pins = max(0, tracked.value.pins - 1)

    @rule(wanted=st.lists(values, max_size=4))
    def want(self, wanted: list[Tracked]) -> None:
        self.tickets.append((Ticket(wanted), wanted))

    @rule()
    def give_up(self) -> None:
        if self.tickets:
            ticket, _ = self.tickets.pop()
            ticket.give_up()
            ticket.give_up()  # it is given up once

    @rule(tracked=consumes(values))
    def forget(self, tracked: Tracked) -> None:
        assert self.residency.remove(tracked.value) is tracked
        assert self.residency.remove(tracked.value) is None
        assert tracked.gone
        self.order.remove(tracked)
        self.residency.move(tracked, State.DIRTY)  # what was under way ends: no longer of interest

    @rule(state=st.sampled_from(RANKED), nbytes=st.integers(0, 5000))
    def oldest(self, state: State, nbytes: int) -> None:
        expected: list[Tracked] = []
        for tracked in self.order:
            wanted = sum(wants.count(tracked) for _, wants in self.tickets)
            if nbytes > 0 and tracked.state is state and not (tracked.value.pins or wanted):
                expected.append(tracked)
                nbytes -= rounded(tracked.value.nbytes)
        found = self.residency.oldest(state, nbytes + sum(t.nbytes for t in expected))
        assert found == expected

    @invariant()
    def accounts(self) -> None:
        residency = self.residency
        assert len(residency) == len(self.order)
        for state in State:
            there = [t for t in self.order if t.state is state]
            assert residency.count_of[state] == len(there)
            assert residency.bytes_of[state] == sum(rounded(t.value.nbytes) for t in there)
        assert all(residency.find(t.value) is t for t in self.order)
        copied = [t.nbytes for t in self.order if t.state >= State.CLEAN]
        assert residency.largest_on_disk() == max(copied, default=0)


TestPolicy = Policy.TestCase
