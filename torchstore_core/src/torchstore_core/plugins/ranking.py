"""Chooses a transport for a link: bids from topology, a cost model, and the user's word."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_core.errors import ConfigurationError, TransportUnavailableError
from torchstore_core.plugins.registry import Registry

__all__ = ["Candidate", "Policy", "Ranking", "rank"]


def _names(variable: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())


class Policy(msgspec.Struct, frozen=True):
    """The user's word on transports, and that of the store's strategy.

    Args:
        prefer: what the user wants first; among these the cheapest.
        block: what the user never wants, whoever else does.
        order: what the strategy wants next, in this order.
        force: the only one that the strategy allows.

    >>> Policy(prefer=("tcp",)).prefer
    ('tcp',)
    """

    prefer: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    force: str | None = None

    @classmethod
    def make(cls, prefer: Sequence[str] = (), block: Sequence[str] = ()) -> Policy:
        """Arguments joined with TORCHSTORE_PREFER and TORCHSTORE_BLOCK (comma-separated).

        Raises:
            ConfigurationError: not a list of names, or a name that nobody has installed here.
        """
        made = cls.said(prefer, block)
        if made.prefer or made.block:
            made.check_installed(Registry())
        return made

    @classmethod
    def said(cls, prefer: Sequence[str] = (), block: Sequence[str] = ()) -> Policy:
        """The same, whether or not there are such plug-ins.

        Raises:
            ConfigurationError: not a list of names.
        """
        both: dict[str, object] = {"prefer": prefer, "block": block}
        for what, given in both.items():
            names = given if isinstance(given, Sequence | Set) else [None]
            if isinstance(given, str | bytes) or not all(isinstance(name, str) for name in names):
                raise ConfigurationError(f"{what} is a list of names, not {given!r}")
        return cls(
            (*prefer, *(n for n in _names("TORCHSTORE_PREFER") if n not in prefer)),
            (*block, *(n for n in _names("TORCHSTORE_BLOCK") if n not in block)),
        )

    def check_installed(self, registry: Registry) -> None:
        """Every name is one of a plug-in that is installed in this environment, working or not. A
        server takes the names as they come: what it has not installed, it does not load.

        Raises:
            ConfigurationError: names those that nobody has installed, and what there is.
        """
        transports = ["torchstore.transports"]
        registry.check_installed("prefer= or TORCHSTORE_PREFER", self.prefer, transports)
        registry.check_installed("block= or TORCHSTORE_BLOCK", self.block)

    def of_store(self, transport: str | tuple[str, ...] | None) -> Policy:
        """With what the store's strategy says: a name forces, a tuple prefers.

        >>> Policy(prefer=("a",)).of_store("b").force
        'b'
        """
        if isinstance(transport, str):
            return msgspec.structs.replace(self, force=transport)
        return msgspec.structs.replace(self, order=tuple(transport or ()))


class Candidate(msgspec.Struct, frozen=True):
    """A transport that can serve the link, and what it bid.

    ``turn``: those of a lower one come first, whatever they bid.
    """

    spec: TransportSpec
    bid: Bid
    preferred: bool
    turn: int = 0

    def cost_s(self, nbytes: int) -> float:
        """Expected seconds for ``nbytes`` bytes."""
        return self.bid.cost_s(nbytes)


class Ranking:
    """All bids and refusals for one link; picks the cheapest for a size.

    Preferred transports win over all others, whatever they bid, for the sizes they take.

    Args:
        forced: the one that the store's strategy allows, if it does.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        refusals: Mapping[str, str],
        forced: str | None = None,
    ) -> None:
        self.candidates = list(candidates)
        self.refusals = dict(refusals)
        self.forced = forced
        self._inline_max: int | None = None

    def order(self, nbytes: int, *, in_band: bool | None = None) -> list[Candidate]:
        """Candidates that take ``nbytes`` bytes, best first; ``in_band``: only (or no) such."""
        fit = [
            c
            for c in self.candidates
            if (c.spec.max_bytes is None or nbytes <= c.spec.max_bytes)
            and (in_band is None or c.spec.in_band == in_band)
        ]
        return sorted(fit, key=lambda c: (c.turn, c.cost_s(nbytes), c.spec.name))

    def best(self, nbytes: int, *, in_band: bool | None = None) -> Candidate:
        """The best candidate.

        Raises:
            TransportUnavailableError: none; says who refused and why.
        """
        order = self.order(nbytes, in_band=in_band)
        if not order:
            raise self.unavailable(nbytes)
        return order[0]

    def drop(self, name: str, reason: str) -> None:
        """A link failed: do not choose it any more."""
        self.candidates = [c for c in self.candidates if c.spec.name != name]
        self.refusals[name] = reason
        self._inline_max = None

    def restore(self, candidate: Candidate) -> None:
        """One that was dropped can be chosen again."""
        others = [c for c in self.candidates if c.spec.name != candidate.spec.name]
        self.candidates = [*others, candidate]
        self.refusals.pop(candidate.spec.name, None)
        self._inline_max = None

    def inline_max(self) -> int:
        """Largest batch, in bytes, for which an in-band transport is the best choice; -1: none."""
        if self._inline_max is None:
            low, high = -1, 1 << 62
            while high - low > 1:  # costs are linear: the set of such sizes is [0, max]
                middle = (low + high) // 2
                order = self.order(middle)
                if order and order[0].spec.in_band:
                    low = middle
                else:
                    high = middle
            self._inline_max = low
        return self._inline_max

    def unavailable(self, nbytes: int) -> TransportUnavailableError:
        """The error that says why nothing reaches the volume."""
        reasons = "; ".join(f"{n}: {r}" for n, r in sorted(self.refusals.items()))
        limits = "; ".join(
            f"{c.spec.name}: takes at most {c.spec.max_bytes} bytes"
            for c in self.candidates
            if c.spec.max_bytes is not None and nbytes > c.spec.max_bytes
        )
        why = "; ".join(x for x in (reasons, limits) if x) or "none is installed"
        details: dict[str, object] = {"refusals": dict(self.refusals), "nbytes": nbytes}
        text = f"no transport can move {nbytes} bytes to or from this volume"
        advice = "Install torchstore-transports, or unblock one"
        if self.forced is not None:
            text = (
                f"transport {self.forced!r}, which the store's strategy forces, cannot move "
                f"{nbytes} bytes to or from this volume"
            )
            details["forced"] = self.forced
            advice = "Unblock it, install what offers it, or initialize with another transport="
        return TransportUnavailableError(
            f"{text} ({why}). {advice}; `torchstore doctor` shows every bid",
            details=details,
        )


def _answer(spec: TransportSpec, context: LinkContext) -> Bid | Refusal:
    """What a transport says to a link; nonsense is a refusal, for the others are there."""
    try:
        reason = spec.probe() if spec.probe is not None else None
        answer = spec.bid(context) if reason is None else Refusal(reason)
        sane = isinstance(answer, Refusal) or (answer.latency_s >= 0 and answer.bytes_per_s > 0)
    except Exception as error:  # noqa: BLE001 - said to whoever asks why it was not chosen
        return Refusal(f"its bid failed: {error!r}")
    return answer if sane else Refusal(f"its bid makes no sense: {answer}")


def rank(
    specs: Iterable[TransportSpec], context: LinkContext, offers: Iterable[str], policy: Policy
) -> Ranking:
    """Ask every transport for a bid on one link."""
    offered = set(offers)
    candidates: list[Candidate] = []
    refusals: dict[str, str] = {}
    for spec in specs:
        if spec.name in policy.block:
            refusals[spec.name] = "blocked by configuration"
            continue
        if policy.force is not None and spec.name != policy.force:
            refusals[spec.name] = f"the store's strategy forces transport {policy.force!r}"
            continue
        if spec.client is not None and spec.name not in offered:
            refusals[spec.name] = "the volume does not offer it (not installed there, or refused)"
            continue
        answer = _answer(spec, msgspec.structs.replace(context, offered=spec.name in offered))
        if isinstance(answer, Refusal):
            refusals[spec.name] = answer.reason
        else:
            turn = _turn(spec.name, policy)
            candidates.append(Candidate(spec, answer, turn <= len(policy.order), turn))
    if policy.force is not None and not candidates:
        why = "blocked by configuration" if policy.force in policy.block else "not installed here"
        refusals.setdefault(policy.force, why)
    return Ranking(candidates, refusals, policy.force)


def _turn(name: str, policy: Policy) -> int:
    """The user's preferred ones, then the strategy's one after the other, then all others."""
    if name in policy.prefer:
        return 0
    return 1 + (policy.order.index(name) if name in policy.order else len(policy.order))
