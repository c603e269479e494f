"""Whether a history can be explained by a store that does one thing after the other."""

from __future__ import annotations

from collections.abc import Collection

from tests.simulation.plans import ROOMY, Plan
from tests.simulation.promises.histories import Call, History
from tests.simulation.promises.model import Model
from tests.simulation.promises.violations import Violation

__all__ = ["check"]

_GIVEN_UP = {"Closed", "Cancelled", "store-closed", "protocol"}

# With these the store may drop versions on their way.
_FORGETS = {"crash", "lose", "sever"}


def check(
    history: History, plan: Plan, freed: Collection[tuple[str, int, int]] = frozenset()
) -> None:
    """Explain a history by doing its calls one by one, in the order in which the server did.

    ``freed``: versions that references to may have been ended of.

    Raises:
        Violation: some call cannot be explained.
    """
    puts: dict[str, list[Call]] = {}
    for call in history.calls:
        if call.operation.participants:
            puts.setdefault(call.operation.keys[0], []).append(call)
    exact = {key for key in plan.keys if key not in puts}
    if min(plan.capacities) >= ROOMY and not any(f.kind in _FORGETS for f in plan.faults):
        for key, contributions in puts.items():
            if not any(_is_given_up(call) for call in contributions):
                exact.add(key)
    lost = history.lost if plan.copies == 1 else 0
    rewound = {call.operation.keys[0] for call in history.calls if call.operation.kind == "rewind"}
    model = Model(puts, exact, lost, freed, rewound, history.unread)
    waits = sorted((c for c in history.calls if c.unanswered and not c.known), key=_quiet)
    for call in history.in_order():
        while waits and waits[0].unanswered < call.at:
            _check_wait(model, waits.pop(0))
        if wrong := model.apply(call):
            raise Violation("history", f"{call}: {wrong}")
    for wait in waits:
        _check_wait(model, wait)


def _is_given_up(call: Call) -> bool:
    """Whether what others count on may be missing. Of what all contribute alike the store takes the
    first, and from nobody else when that is given up.
    """
    shared = "all" in call.operation.names
    return not call.known or call.code in _GIVEN_UP or (call.is_refused_late and shared)


def _check_wait(model: Model, wait: Call) -> None:
    if model.satisfies(wait):
        raise Violation("stuck", f"{wait} was never answered")


def _quiet(call: Call) -> int:
    return call.unanswered
