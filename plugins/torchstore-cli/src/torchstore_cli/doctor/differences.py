"""Where the two ends of a link differ in a way that matters."""

from __future__ import annotations

from torchstore_core.plugins.surroundings import Surroundings

__all__ = ["differences"]

_CORE = "torchstore-core"


def differences(here: Surroundings, there: Surroundings) -> list[str]:
    """Return where versions differ in a way that matters, as text for people: of the core, and of
    transports that both sides may use.

    >>> one = Surroundings({"nixl": "1.5"}, {"rdma": ("nixl",)})
    >>> differences(one, Surroundings({}, one.needs))
    ["nixl is 1.5 here and missing there: 'rdma' needs it at both ends"]
    """
    found: list[str] = []
    both = {
        name: {*here.needs[name], *there.needs[name]} for name in here.needs.keys() & there.needs
    }
    for name in sorted({*here.versions, *there.versions}):
        one, other = here.versions.get(name), there.versions.get(name)
        if one == other:
            continue
        differ = f"{name} is {one or 'missing'} here and {other or 'missing'} there"
        users = sorted(transport for transport, needed in both.items() if name in needed)
        who = ", ".join(map(repr, users))
        if name == _CORE:
            found.append(f"{differ}: install the same release on both hosts")
        elif users and one and other:
            found.append(f"{differ}: both ends of {who} use it; install the same on both hosts")
        elif users:
            found.append(f"{differ}: {who} needs it at both ends")
    return found
