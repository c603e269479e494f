"""How a state dict differs from the one that it is to fill."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torchstore_core.errors import LayoutMismatchError
from torchstore_core.values import ObjectRef

#: Most names of each kind of difference that a message or a warning lists.
MOST_NAMED = 20

#: What wrappers of modules add to the names of their entries.
_WRAPPERS = re.compile(
    r"(?<![^./])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


@dataclass
class StateDictReport:
    """The differences between a stored state dict and the one to fill.

    Args:
        missing: entries to fill that are not stored.
        unexpected: stored entries that have no destination.
        mismatched: for each entry that does not fit, by name, the reason.
        version: the version that was read.
        ref: the same as a ref, for ``after=`` of the next call; None before there is one.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    version: int = 0
    ref: ObjectRef | None = None

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        return in_words(self)


def in_words(report: StateDictReport, most: int | None = None) -> str:
    """Return the differences, with at most so many names of each kind; None: with all."""
    names = (("missing", report.missing), ("unexpected", report.unexpected))
    parts = [(what, ", ", [*map(repr, found[:most])], len(found)) for what, found in names]
    why = [*report.mismatched.values()]
    parts.append(("mismatched", "; ", why[:most], len(why)))
    said = [
        f"{count} {what}: {between.join(shown)}"
        + (f" and {count - len(shown)} more" if count > len(shown) else "")
        for what, between, shown, count in parts
        if count
    ]
    return "; ".join(said) or "everything matched"


def mismatch_error(
    what: str, report: StateDictReport, key: str | None = None, *, hint: str = ""
) -> LayoutMismatchError:
    """Return an error that says what is wrong with a destination of ``what``, and before that what
    to do, if there is a ``hint`` or names differ only by those of wrappers. Its text has at most
    :data:`MOST_NAMED` names of each kind, its details have all.
    """
    hint = hint or _wrapped(report)
    some, every = in_words(report, MOST_NAMED), in_words(report)
    return LayoutMismatchError(
        f"{what} does not match; nothing was written. "
        + (hint and f"{hint}. ")
        + some
        + (" (all of them are in the `details` of this error)" if some != every else ""),
        key=key,
        details={
            "missing": report.missing,
            "unexpected": report.unexpected,
            "mismatched": report.mismatched,
        },
    )


def _wrapped(report: StateDictReport) -> str:
    """What to do if the names that are missing are there with, or without, those of wrappers; empty
    if they are not.
    """
    missing = {_WRAPPERS.sub("", name) for name in report.missing}
    if not missing or not missing.issubset([_WRAPPERS.sub("", n) for n in report.unexpected]):
        return ""
    added = {part for n in report.missing + report.unexpected for part in _WRAPPERS.findall(n)}
    return (
        f"The names differ only by {' and '.join(map(repr, sorted(added)))}, which a wrapper adds "
        "(torch.compile, DistributedDataParallel, FSDP1, checkpoint_wrapper): take the state dict "
        "of the module in it, on both sides"
    )
