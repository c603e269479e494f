"""Chooses a transport for a link: by bids from topology, a cost model, and the user's settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from torchstore_core.contracts.transport import Bid, LinkContext, Refusal, TransportSpec
from torchstore_core.errors import ConfigurationError, TransportUnavailableError
from torchstore_core.plugins import calibration
from torchstore_core.plugins.registry import Registry

_CHOICE = "TORCHSTORE_TRANSPORT"


def _names(variable: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())


class Policy(msgspec.Struct, frozen=True):
    """Which transports the user and the store's strategy prefer, block or force.

    Args:
        prefer: transports that the user wants first; the cheapest of them wins.
        block: transports that are never used, even if the strategy names them.
        order: transports that the strategy wants next, in this order.
        force: the only transport that the strategy allows.
        choice: the only transport that the user allows, apart from in-band ones; it overrides the
            strategy.

    >>> Policy(prefer=("tcp",)).prefer
    ('tcp',)
    """

    prefer: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    force: str | None = None
    choice: str | None = None

    @classmethod
    def make(cls, prefer: Sequence[str] = (), block: Sequence[str] = ()) -> Policy:
        """Combine the arguments with TORCHSTORE_PREFER and TORCHSTORE_BLOCK (comma-separated), and
        TORCHSTORE_TRANSPORT (one name).

        Raises:
            ConfigurationError: an argument is not a list of names, or no installed package
                provides a plug-in of that name.
            PluginError: several distributions claim a transport that is asked for.
        """
        made = cls.unchecked(prefer, block)
        if made.prefer or made.block or made.choice:
            made.check_installed(Registry())
        return made

    @classmethod
    def unchecked(cls, prefer: Sequence[str] = (), block: Sequence[str] = ()) -> Policy:
        """Do the same as :meth:`make`, but accept plug-ins that are not installed.

        Raises:
            ConfigurationError: an argument is not a list of names.
        """
        both: dict[str, object] = {"prefer": prefer, "block": block}
        for what, given in both.items():
            names = given if isinstance(given, Sequence | Set) else [None]
            if isinstance(given, str | bytes) or not all(isinstance(name, str) for name in names):
                raise ConfigurationError(f"{what} is a list of names, not {given!r}")
        return cls(
            (*prefer, *(n for n in _names("TORCHSTORE_PREFER") if n not in prefer)),
            (*block, *(n for n in _names("TORCHSTORE_BLOCK") if n not in block)),
            choice=os.environ.get(_CHOICE, "").strip() or None,
        )

    def check_installed(self, registry: Registry) -> None:
        """Check that every name belongs to a plug-in that is installed in this environment,
        whether it works or not. Servers skip this check: they ignore plug-ins that they lack.

        Raises:
            ConfigurationError: lists the names that are not installed, and those that are.
            PluginError: several distributions claim a transport that is asked for.
        """
        registry.check_transports("prefer= or TORCHSTORE_PREFER", self.prefer)
        registry.check_transports(_CHOICE, [self.choice] if self.choice else [])
        registry.check_installed("block= or TORCHSTORE_BLOCK", self.block)

    def with_transport(self, transport: str | tuple[str, ...] | None) -> Policy:
        """Add the ``transport`` of the store's strategy: a name forces, a tuple prefers.

        >>> Policy(prefer=("a",)).with_transport("b").force
        'b'
        """
        if isinstance(transport, str):
            return msgspec.structs.replace(self, force=transport)
        return msgspec.structs.replace(self, order=tuple(transport or ()))


class Candidate(msgspec.Struct, frozen=True):
    """A transport that can serve the link, and its bid.

    ``turn``: candidates with a lower number come first, regardless of their bids.
    """

    spec: TransportSpec
    bid: Bid
    preferred: bool
    turn: int = 0

    def cost_s(self, nbytes: int) -> float:
        """Return the expected seconds for ``nbytes`` bytes."""
        return self.bid.cost_s(nbytes)


class Ranking:
    """All bids and refusals for one link; chooses the cheapest for a size.

    Preferred transports win over all others, regardless of bids, for the sizes that they accept.

    Args:
        forced: the only transport that the store's strategy or the user allows, if there is one.
        forced_by: what forces it, as text that fits "which ... forces".
        wanted: the names that the user or the strategy prefers.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        refusals: Mapping[str, str],
        forced: str | None = None,
        forced_by: str = "",
        wanted: Sequence[str] = (),
    ) -> None:
        self.candidates = list(candidates)
        self.refusals = dict(refusals)
        self.forced = forced
        self._forced_by = forced_by
        self._wanted = wanted
        self._inline_max: int | None = None

    def order(self, nbytes: int, *, in_band: bool | None = None) -> list[Candidate]:
        """Return the candidates that accept ``nbytes`` bytes, best first.

        ``in_band``: True for only those that are in-band, False for only those that are not.
        """
        fit = [
            c
            for c in self.candidates
            if (c.spec.max_bytes is None or nbytes <= c.spec.max_bytes)
            and (in_band is None or c.spec.in_band == in_band)
        ]
        return sorted(fit, key=lambda c: (c.turn, c.cost_s(nbytes), c.spec.name))

    def drop(self, name: str, reason: str) -> None:
        """Remove a candidate whose link has failed, so that it is no longer chosen."""
        self.candidates = [c for c in self.candidates if c.spec.name != name]
        self.refusals[name] = reason
        self._inline_max = None

    def restore(self, candidate: Candidate) -> None:
        """Make a candidate that was dropped available again."""
        others = [c for c in self.candidates if c.spec.name != candidate.spec.name]
        self.candidates = [*others, candidate]
        self.refusals.pop(candidate.spec.name, None)
        self._inline_max = None

    def inline_max(self) -> int:
        """Return the largest batch, in bytes, for which an in-band transport is best, or -1."""
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

    def summary(self, nbytes: int) -> str:
        """Return one line: which transport carries ``nbytes`` bytes, why, and how to change it."""
        order = self.order(nbytes)
        if not order:
            return "no transport reaches the volume"
        best = order[0]
        others = ", ".join(c.spec.name for c in order[1:]) or "nothing else"
        why = best.bid.reason
        if best.spec.name == self.forced:
            why = f"{self._forced_by} forces it"
        elif self.forced in self.refusals:
            refusal = self.refusals[self.forced]
            why += f"; {self.forced}, which {self._forced_by} forces, does not reach it: {refusal}"
        elif best.preferred:
            why = "it is preferred"
        for name in self._wanted if self.forced is None else ():
            if name in self.refusals:
                why += f"; {name}, which is preferred, is not used: {self.refusals[name]}"
        return f"{best.spec.name} ({why}); then {others}; {_CHOICE} chooses"

    def unavailable(self, nbytes: int) -> TransportUnavailableError:
        """Return the error that says why no transport reaches the volume: of one that is forced,
        why that one does not, and of no other.
        """
        reasons = sorted(self.refusals.items())
        for c in self.candidates:
            if c.spec.in_band:
                reasons.append((c.spec.name, "carries only what fits into a control message"))
            elif c.spec.max_bytes is not None and nbytes > c.spec.max_bytes:
                reasons.append((c.spec.name, f"takes at most {c.spec.max_bytes} bytes"))
        told = [f"{name}: {why}" for name, why in reasons if self.forced in (None, name)]
        why = "; ".join(told) or "none is installed"
        details: dict[str, object] = {"refusals": dict(self.refusals), "nbytes": nbytes}
        text = f"no transport can move {nbytes} bytes to or from this volume"
        advice = "Install torchstore-transports, or unblock one"
        if self.forced is not None:
            text = (
                f"transport {self.forced!r}, which {self._forced_by} forces, cannot move "
                f"{nbytes} bytes to or from this volume"
            )
            details["forced"] = self.forced
            advice = "Unblock it, install what offers it, or " + (
                f"choose another one with {_CHOICE}"
                if self._forced_by == _CHOICE
                else "initialize with another transport="
            )
        return TransportUnavailableError(
            f"{text} ({why}). {advice}; `torchstore doctor` shows every bid",
            details=details,
        )


def _answer(spec: TransportSpec, context: LinkContext) -> Bid | Refusal:
    """Return a transport's bid or refusal for a link.

    An exception or an invalid bid counts as a refusal: other transports can still serve the link.
    """
    try:
        reason = spec.probe() if spec.probe is not None else None
        answer = spec.bid(context) if reason is None else Refusal(reason)
        if isinstance(answer, Bid):
            link = calibration.link_of(spec.name, context.client, context.volume)
            answer = calibration.corrected(answer, link)
        sane = isinstance(answer, Refusal) or (answer.latency_s >= 0 and answer.bytes_per_s > 0)
    except Exception as error:  # noqa: BLE001 - reported as the reason of the refusal
        return Refusal(f"its bid failed: {error!r}")
    return answer if sane else Refusal(f"its bid makes no sense: {answer}")


def rank(
    specs: Iterable[TransportSpec],
    context: LinkContext,
    offers: Mapping[str, bytes],
    policy: Policy,
    refused: Mapping[str, str] | None = None,
) -> Ranking:
    """Collect a bid or a refusal for one link from every transport.

    ``refused``: why the volume does not serve transports that it has.
    """
    forced = policy.choice or policy.force
    forced_by = _CHOICE if policy.choice is not None else "the store's strategy"
    candidates: list[Candidate] = []
    refusals: dict[str, str] = {}
    for spec in specs:
        if spec.name in policy.block:
            refusals[spec.name] = "blocked by configuration"
            continue
        if (
            forced is not None
            and spec.name != forced
            and not (spec.in_band and policy.choice is not None)
        ):
            refusals[spec.name] = f"{forced_by} forces transport {forced!r}"
            continue
        if spec.client is not None and spec.name not in offers:
            why = (refused or {}).get(spec.name, "not installed there, or refused")
            refusals[spec.name] = f"the volume does not offer it ({why})"
            continue
        offer = offers.get(spec.name)
        seen = msgspec.structs.replace(context, offered=offer is not None, offer=offer or b"")
        answer = _answer(spec, seen)
        if isinstance(answer, Refusal):
            refusals[spec.name] = answer.reason
        else:
            turn = _turn(spec.name, policy)
            candidates.append(Candidate(spec, answer, turn <= len(policy.order), turn))
    if forced is not None and not candidates:
        why = "blocked by configuration" if forced in policy.block else "not installed here"
        refusals.setdefault(forced, why)
    wanted = dict.fromkeys((*policy.prefer, *policy.order))
    return Ranking(candidates, refusals, forced, forced_by, tuple(wanted))


def _turn(name: str, policy: Policy) -> int:
    """Rank a transport: first the user's preferred ones, then the strategy's in their order, then
    all others.
    """
    if name in policy.prefer:
        return 0
    return 1 + (policy.order.index(name) if name in policy.order else len(policy.order))
