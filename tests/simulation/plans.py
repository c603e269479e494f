"""What a seed makes clients do, and what it makes go wrong."""

from __future__ import annotations

import random

import msgspec
from msgspec.structs import replace

__all__ = ["CHOKED", "DRAINED", "KEPT", "ROOMY", "SEALED", "STATE_DICT"]
__all__ += ["Fault", "Operation", "Plan", "plan_of"]

#: From this seed on, the log of a server cannot grow for a while.
CHOKED = 1_000_000_000
#: From this seed on, the volumes of stores that spill are drained.
DRAINED = 2_000_000_000
#: From this seed on, values are made in the store and sealed there, and state dicts are held, in
#: plans of each kind in turn.
SEALED = 3_000_000_000

KEYS = ("a", "b", "c")
#: The key of all state dicts.
STATE_DICT = "dicts"
_MORE_KEYS = (*KEYS, "d", "e", "f")
#: So many cache lines that no plan fills them.
ROOMY = 2000
#: What is got stays until the process ends.
KEPT = -1


class Operation(msgspec.Struct, frozen=True, eq=False):
    """One call of one client.

    Args:
        number: of the operation, in its plan. What it puts is marked with it.
        kind: put, get, delete, wait, versions, exists; of state dicts publish and fetch; shard
            puts one of the boxes of a tensor; of references object, hold, read, send, drop, fork
            and free; rewind goes back to a version.
        keys: what it is about.
        lines: how many cache lines each value has; 0: it is small and travels inside messages.
        version: to get, to put, or to wait for; 0: the newest, or the next.
        inline: whether a get wants small values inside the answer.
        hold: how many times a reader looks at what it has got again, before it gives it back; or
            ``KEPT``, if it never does while its process lives. The same of what is sealed.
        spare: gives back over the liveness connection.
        strict: of a delete.
        fades: what it puts may be evicted.
        sealed: what it puts is made in the store, see ``messages.Seal``.
        kills: who receives the reference that is sent is killed at that moment.
        names: the entries that a participant puts of a state dict; "all" is one that all put.
        participants: how many of them make a version together.
        partial, keep: see ``messages.Publication``.
        which: of the references that its process has then.
        to: the client that a reference is sent to.
    """

    number: int
    kind: str
    keys: tuple[str, ...]
    lines: tuple[int, ...] = ()
    version: int = 0
    inline: bool = False
    hold: int = 0
    spare: bool = False
    strict: bool = False
    names: tuple[str, ...] = ()
    participants: int = 0
    partial: bool = False
    keep: int = 0
    which: int = 0
    to: int = 0
    kills: bool = False
    fades: bool = False
    sealed: bool = False

    def __str__(self) -> str:
        more = f" version {self.version}" if self.version else ""
        more += " partial" if self.partial else ""
        more += f" names={','.join(self.names)} of {self.participants}" if self.names else ""
        more += " evictable" if self.fades else ""
        more += " made in the store" if self.sealed else ""
        more += f" to client {self.to}" if self.kind == "send" else ""
        sizes = f" lines={list(self.lines)}" if self.lines else ""
        return f"#{self.number} {self.kind} {','.join(self.keys)}{more}{sizes}"


class Fault(msgspec.Struct, frozen=True, eq=False):
    """Something that goes wrong once.

    Args:
        number: of the fault, in its plan.
        kind: crash, cut, cancel, sever; lose is of a volume, kill of the server,
            compact writes its log anew, choke keeps it from growing, and fill and fail are of the
            disk. A volume is drained, until that is undone.
        client: to whom; or to which volume.
        after: at which step, unless a recorded schedule says when.
        keep: how many messages under way still arrive. A server is killed when it has recorded so
            many requests more; 0: at once. A disk is full for so many writes. A log cannot grow for
            so many turns. A volume is drained for so many steps.
        broken: whether those count as last words, see ``Conversation.hear_last``. A server is
            killed when it has handled a message of a connection that is kept, but not yet taken it
            out of the kernel's buffer; and connections that it has accepted and not yet read are
            lost. A log that cannot grow has little left of what it keeps.
    """

    number: int
    kind: str
    client: int
    after: int
    keep: int = 99
    broken: bool = False


class Plan(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        capacities: of the volumes, in cache lines.
        scripts: the operations of each client, in order.
        channels: how many each client has besides its liveness connection.
        travels: whether bytes that are put travel for themselves, see :mod:`.halves`.
        relayed: the clients that come over a relay, as long as it works.
        copies: how many of each value there are, on volumes of their own.
        slots: how many operations of one client run at the same time.
        refers: whether there are references, so that time counts, see :mod:`.references`.
        kept: whether the server has a keeper, so that it comes back when it is killed.
        pages: of the disk that values are spilled to; 0: there is none.
        at_a_url: whether it is not a disk, but has objects.
    """

    capacities: tuple[int, ...]
    scripts: tuple[tuple[Operation, ...], ...]
    faults: tuple[Fault, ...] = ()
    channels: int = 1
    slots: int = 1
    travels: bool = False
    relayed: tuple[int, ...] = ()
    copies: int = 1
    keys: tuple[str, ...] = KEYS
    refers: bool = False
    kept: bool = False
    pages: int = 0
    at_a_url: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether time passes."""
        return self.refers or self.pages > 0

    @property
    def size(self) -> int:
        """How many operations and faults there are."""
        return sum(map(len, self.scripts)) + len(self.faults)


def plan_of(source: random.Random, seed: int = 0) -> Plan:
    """What a seed makes happen; the numbers are taken from ``source``."""
    number = _peek(source)
    seals = seed >= SEALED
    kind = (0, CHOKED, DRAINED)[seed % 3] if seals else seed
    plan = _plan_of(source, number, drains=kind >= DRAINED, seals=seals)
    loses = any(fault.kind == "lose" for fault in plan.faults)
    if CHOKED <= kind < DRAINED and not (plan.relayed or loses):
        plan = _with_chokes(plan, random.Random(number + 2))
    return _with_seals(plan, random.Random(number + 5)) if seals else plan


def _with_seals(plan: Plan, source: random.Random) -> Plan:
    """Some values are made in the store, by clients that share its memory."""
    share = source.choice((0.3, 0.7, 1.0))
    holds = (0, 0, 1, 3) if plan.pages else (0, 0, 1, 3, KEPT)  # which is never spilled

    def may_seal(one: Operation) -> Operation:
        if one.kind not in ("put", "object") or source.random() > share:
            return one
        lines, hold = (one.lines[0] or 1,), source.choice(holds)
        return replace(one, keys=one.keys[:1], lines=lines, hold=hold, sealed=True)

    scripts = [
        script if at in plan.relayed else tuple([may_seal(one) for one in script])
        for at, script in enumerate(plan.scripts)
    ]
    return replace(plan, scripts=tuple(scripts), copies=1)


def _with_chokes(plan: Plan, source: random.Random) -> Plan:
    """The log cannot grow for a while, and the server may be killed meanwhile."""
    pick = source.choice
    steps = 8 * sum(map(len, plan.scripts))
    faults = list(plan.faults)
    for number in range(len(faults) + 1, len(faults) + 1 + pick((1, 2, 3))):
        at, turns = source.randint(5, steps), pick((1, 2, 3, 5, 9, 10, 11))
        faults.append(Fault(number, "choke", 0, at, turns, source.random() < 0.8))
        if not plan.kept and source.random() < 0.3:
            after = at + source.randint(1, 40)
            faults.append(Fault(number + 100, "kill", 0, after, 0, source.random() < 0.3))
    return replace(plan, faults=tuple(sorted(faults, key=_after)), kept=True)


def _plan_of(
    source: random.Random, number: int, *, drains: bool = False, seals: bool = False
) -> Plan:
    # From numbers of their own: so the other plans are what they would be without these.
    own = random.Random(~number)
    pages = own.choice((1, 2, 3, 6, 50)) if own.random() < 0.12 or drains else 0
    if pages:
        source = own
    pick, chance = source.choice, source.random
    clients = pick((2, 2, 3, 4))
    total = pick((12, 20, 30, 45))
    scripts: list[list[Operation]] = [[] for _ in range(clients)]
    flavours = (
        ("keys", "refs", STATE_DICT) if seals else ("keys", "keys", STATE_DICT, "shards", "refs")
    )
    flavour = pick(flavours)
    plain = flavour in ("keys", "refs")
    refers = flavour == "refs" or (seals and not plain)
    keys = KEYS[: pick((1, 1, 2, 3))] if plain else (flavour,)
    if pages and flavour == "keys":
        keys = _MORE_KEYS
    make = _keys if flavour == "keys" else _references if plain else _held if refers else _joint
    inline = pick((0.0, 0.3, 0.9))
    relayed = tuple([at for at in range(clients) if chance() < 0.6]) if chance() < 0.2 else ()
    if refers or pages:  # what is under way is lost with a relay, also what it says of references
        relayed = ()
    holds = (0, KEPT) if relayed else (0, 0, 1, 3)
    make(source, keys, scripts, total, inline, holds)
    faults: list[Fault] = []
    travels = chance() < 0.3
    for number in range(1, 1 + pick((0, 2, 6, 12) if travels else (0, 0, 1, 3, 6))):
        kind = pick(("crash", "cut", "cancel", "cancel", "cancel", "cancel"))
        if refers and chance() < 0.4:
            kind = "crash"
        if pages and chance() < 0.3:
            kind = "fill"
        at = source.randint(5, total * 6)
        faults.append(
            Fault(number, kind, int(chance() * clients), at, pick((0, 1, 99, 99)), chance() < 0.3)
        )
    if relayed and chance() < 0.6:
        faults.append(Fault(len(faults) + 1, "sever", relayed[0], source.randint(total, total * 7)))
    capacity = pick((6, 10, 16, 40)) if plain else pick((8, 30, ROOMY, ROOMY))
    if pages:
        capacity = pick((5, 6, 8, 10))
    capacities = (capacity,) if chance() < 0.6 and not drains else (capacity, capacity)
    copies = pick((1, 2)) if len(capacities) > 1 else 1
    is_timed = refers or pages > 0
    if len(capacities) > 1 and chance() < 0.5 and not is_timed:  # copies are made by the clock
        faults.append(Fault(len(faults) + 1, "lose", pick((0, 1)), source.randint(5, total * 6)))
    plan = Plan(
        capacities,
        tuple([tuple(script) for script in scripts]),
        tuple(sorted(faults, key=_after)),
        pick((1, 1, 2)),
        pick((1, 2, 3)),
        travels,
        relayed,
        copies,
        keys,
        refers,
        pages=pages,
        at_a_url=pages > 0 and random.Random(number + 3).random() < 0.4,
    )
    if drains:  # without copies: one that finds no room is tried again for ever
        plan = replace(plan, copies=1)
        plan = _with_drains(plan, random.Random(number + 4), total)
    if relayed or any(fault.kind == "lose" for fault in faults):  # such a store has no keeper
        return plan
    # From numbers of their own: so the rest of a plan is what it would be without them.
    number = _peek(source)
    plan = _with_deaths(plan, random.Random(number), total)
    return _with_failures(plan, random.Random(number + 1), total) if pages else plan


def _peek(source: random.Random) -> int:
    """The number that comes next, which is still to come."""
    state = source.getstate()
    number = source.getrandbits(64)
    source.setstate(state)
    return number


def _with_deaths(plan: Plan, source: random.Random, total: int) -> Plan:
    """The server may be killed, too."""
    pick = source.choice
    if source.random() > 0.3:
        return plan
    faults = list(plan.faults)
    # What concerns references comes over connections that last.
    many, between = ((3, 6, 10), 0.6) if plan.refers else ((1, 2, 3, 6), 0.3)
    for number in range(len(faults) + 1, len(faults) + 1 + pick(many)):
        at, keep = source.randint(5, total * 6), pick((0, 0, 0, 1, 1, 2, 3))
        kind = "compact" if source.random() < 0.25 else "kill"
        faults.append(Fault(number, kind, 0, at, keep, source.random() < between))
    return replace(plan, faults=tuple(sorted(faults, key=_after)), kept=True)


def _with_failures(plan: Plan, source: random.Random, total: int) -> Plan:
    """The disk may fail, too."""
    if source.random() > 0.3:
        return plan
    faults = list(plan.faults)
    for number in range(len(faults) + 1, len(faults) + 1 + source.choice((1, 2, 4))):
        at = source.randint(total, total * 7)
        faults.append(Fault(number, "fail", 0, at, source.choice((1, 1, 2, 3))))
    return replace(plan, faults=tuple(sorted(faults, key=_after)))


def _with_drains(plan: Plan, source: random.Random, total: int) -> Plan:
    """Volumes are drained, and put back in service."""
    pick, faults = source.choice, list(plan.faults)
    for number in range(len(faults) + 1, len(faults) + 1 + pick((1, 2, 4))):
        at, steps = source.randint(5, total * 6), pick((40, 100, 300, 600))
        faults.append(Fault(number + 1000, "drain", pick((0, 1)), at, steps))
    return replace(plan, faults=tuple(sorted(faults, key=_after)))


def _after(fault: Fault) -> int:
    return fault.after


def _keys(
    source: random.Random,
    keys: tuple[str, ...],
    scripts: list[list[Operation]],
    total: int,
    inline: float,
    holds: tuple[int, ...],
) -> None:
    """Puts and gets of some keys, alone or together."""
    pick, chance = source.choice, source.random
    kinds = ["put"] * 5 + ["get"] * 6 + pick(([], ["delete"], ["delete"] * 3))
    kinds += pick(([], ["wait", "versions", "exists"]))
    fades = pick((0.0, 0.0, 0.0, 0.5, 0.9))
    for number in range(1, total + 1):
        kind = pick(kinds)
        count = 1 if len(keys) == 1 or chance() < 0.4 else source.randint(2, len(keys))
        some = tuple(source.sample(keys, count))
        version = hold = 0
        sizes: tuple[int, ...] = ()
        if kind == "put":
            sizes = tuple([0 if chance() < inline else pick((1, 1, 2, 3)) for _ in some])
        elif kind == "get":
            if chance() < 0.2:
                some, version = some[:1], source.randint(1, 6)
            hold = pick(holds)
        elif kind == "wait":
            version = source.randint(1, 5)
        elif kind == "versions":
            some = some[:1]
        operation = Operation(
            number,
            kind,
            some,
            sizes,
            version,
            hold != KEPT and chance() < inline,
            hold,
            chance() < 0.3,
            chance() < 0.2,
            fades=kind == "put" and chance() < fades,
        )
        scripts[int(chance() * len(scripts))].append(operation)


def _references(
    source: random.Random,
    keys: tuple[str, ...],
    scripts: list[list[Operation]],
    total: int,
    inline: float,
    holds: tuple[int, ...],
) -> None:
    """References to objects and to versions of keys, which are sent, inherited and dropped."""
    pick, chance = source.choice, source.random
    kinds = ["object"] * 4 + ["put"] * 3 + ["hold"] * 4 + ["read"] * 3 + ["send"] * 6
    kinds += ["drop"] * 4 + pick(([], ["fork"] * 3)) + pick(([], [], ["free"])) + ["delete"]
    rewinds = pick(([], ["rewind"] * 3))
    fades = 0.0 if rewinds else pick((0.0, 0.5, 0.9))
    if rewinds:
        keys = keys[:1]
        kinds += rewinds + ["put"] * len(rewinds)
    for number in range(1, total + 1):
        kind = pick(kinds)
        operation = Operation(
            number,
            kind,
            () if kind in ("read", "send", "drop", "fork", "free") else (pick(keys),),
            (0 if chance() < inline else pick((1, 1, 2)),)
            if kind in ("object", "put", "rewind")
            else (),
            source.randint(1, 3) if kind == "rewind" else 0,
            chance() < inline,
            pick((0, 0, 1)),
            chance() < 0.3,
            which=int(chance() * 8),
            to=int(chance() * len(scripts)),
            kills=chance() < 0.05,
            fades=kind == "put" and chance() < fades,
        )
        scripts[int(chance() * len(scripts))].append(operation)


def _joint(
    source: random.Random,
    keys: tuple[str, ...],
    scripts: list[list[Operation]],
    total: int,
    inline: float,
    holds: tuple[int, ...],
    referring: tuple[str, ...] = (),
) -> None:
    """Rounds in which several participants put versions of one key together, and readers of it.

    ``referring``: further kinds of operations, about references to these versions.
    """
    pick, chance = source.choice, source.random
    dicts = keys[0] == STATE_DICT
    participants = source.randint(1, len(scripts))
    explicit, keep = chance() < 0.3, pick((0, 0, 1, 2))
    partial = pick((0.0, 0.3, 0.6)) if dicts else 0.0
    others = ["fetch" if dicts else "get"] * 4 + pick(([], ["wait", "versions", "exists"]))
    others += [*pick(([], [], ["delete"])), *referring]
    number = version = 0
    while number < total:
        version += 1
        is_partial = version > 1 and chance() < partial
        for who in range(participants):
            number += 1
            names = [f"own{who}"] + (["all"] if chance() < 0.5 else [])
            if is_partial and chance() < 0.5:
                names = names[:1]
            if not dicts:
                names = [str(who)]
            sizes = tuple([0 if dicts and chance() < inline else pick((1, 1, 2)) for _ in names])
            if not dicts:
                sizes = (1,)
            operation = Operation(
                number,
                "publish" if dicts else "shard",
                keys,
                sizes,
                version if explicit else 0,
                names=tuple(names),
                participants=participants,
                partial=is_partial,
                keep=keep if dicts else 0,
                spare=chance() < 0.3,
            )
            scripts[who].append(operation)
        for _ in range(source.randint(0, 3)):
            number += 1
            kind = pick(others)
            # Which versions can be read by their numbers depends on what is held.
            names_one = kind == "wait" or (chance() < 0.1 and not referring)
            wanted = source.randint(1, 5) if names_one else 0
            hold, spare = pick(holds), chance() < 0.3
            small = hold != KEPT and chance() < inline
            operation = Operation(number, kind, keys, (), wanted, small, hold, spare)
            if kind in referring:
                about = keys if kind == "hold" else ()
                which, to = int(chance() * 8), int(chance() * len(scripts))
                operation = replace(operation, keys=about, version=0, which=which, to=to)
            scripts[int(chance() * len(scripts))].append(operation)


def _held(
    source: random.Random,
    keys: tuple[str, ...],
    scripts: list[list[Operation]],
    total: int,
    inline: float,
    holds: tuple[int, ...],
) -> None:
    """As :func:`_joint`, with references to versions, so that some stay while others go."""
    kinds = ("hold", "hold", "hold", "read", "read", "read", "drop", "send", "fork", "free")
    _joint(source, keys, scripts, total, inline, holds, kinds)
