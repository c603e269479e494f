"""Puts that contribute to generations: shards, state dicts, and puts that name a version."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from math import prod

from torchstore_core.boxes import Box
from torchstore_core.errors import ProtocolError
from torchstore_core.server.index.collective.generations import Generation
from torchstore_core.server.index.collective.participants import Contribution
from torchstore_core.server.index.collective.unfinished import UnfinishedVersions
from torchstore_core.server.index.items import (
    PutItems,
    check_item,
    check_key,
    checked_box,
    grants_of,
    packed_grant,
    unusual,
)
from torchstore_core.server.index.key_history import PutTarget
from torchstore_core.server.index.records import SessionRecord, Txn, Value
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

# Versions that follow this one still fit the integers of the wire format.
_MAX_VERSION = 1 << 63


class CollectivePut:
    """A put that contributes to generations. It takes four steps; the catalog is changed only by
    the second and the fourth:

    1. The constructor determines which generations the put belongs to.
    2. :meth:`clear` drops whatever must make way for it.
    3. :meth:`compare` finds the :attr:`items` that must be stored.
    4. Once memory is allocated for them, :meth:`enter` makes the put part of its generations.

    Args:
        given: the items of the request.

    Attributes:
        items: the items that must be stored; other participants store the rest.
        boxes: the box of each of these items; None for an item that is a whole value.

    Raises:
        ProtocolError: the request is invalid or inconsistent.
        VersionGoneError, ConfigurationError, KeyNotFoundError, ObjectLostError: see
            ``UnfinishedVersions.target``.
    """

    def __init__(
        self,
        unfinished: UnfinishedVersions,
        session: SessionRecord,
        request: m.Put,
        given: Sequence[m.PutItem],
    ) -> None:
        self._unfinished = unfinished
        self._session = session
        self._request = request
        self._given = given
        self._targets: dict[str, PutTarget] = {}
        self._found: Sequence[tuple[PutTarget | None, Box | None]] = []
        self._stored: list[int] = []
        self._fresh: Generation | None = None
        self.items: Sequence[m.PutItem] = []
        self.boxes: list[Box | None] = []
        self._decide()

    def _checked(self) -> list[Box | None]:
        """Validate the request, and return the box of each item (see ``checked_box``)."""
        request = self._request
        publication = request.group
        lowest = 1 if type(request) is m.Rewind else 0
        if not lowest <= request.version < _MAX_VERSION:
            raise ProtocolError(f"{request.version} is no version")
        if publication is not None and not (
            0 < len(publication.key) <= m.MAX_KEY
            and len(publication.participant) <= m.MAX_KEY
            and publication.participants > 0
            and publication.keep >= 0
        ):
            raise ProtocolError("a state dict has a key, and participants and keep above 0")
        seen: dict[str, tuple[m.PutItem, set[Box] | None]] = {}
        found: list[Box | None] = []
        given = self._given
        in_columns = type(given) is PutItems
        once = len(set(self._names())) == len(given)
        if once and (in_columns or not unusual(given)):
            return [None] * len(given)
        for at, item in enumerate(given):
            box = None if item.part is None else checked_box(item)
            if item.same_as >= 0 or (box is not None and box.is_empty):
                check_key(item)
            else:
                check_item(item)
            if not once:
                _check_once(seen, item, box)
            if item.same_as != -1:
                self._check_alias(at, item)
            found.append(box)
        return found

    def _decide(self) -> None:
        request = self._request
        publication = request.group
        checked = self._checked()
        target: PutTarget | None
        if publication is not None:
            target = self._target(
                publication.key, publication.participant, ("state dict", publication.participants)
            )
            if type(self._given) is PutItems:
                self._found = [(target, None)] * len(checked)
            else:
                self._found = [(target, box) for box in checked]
            return
        found: list[tuple[PutTarget | None, Box | None]] = []
        for item, box in zip(self._given, checked, strict=True):
            target = self._targets.get(item.key)
            if target is None and (request.version or item.part is not None):
                layout, participant = _layout_of(item)
                # Without a mesh, a participant is identified by its box. A new box is then not a
                # late replica but the first shard of a different partition of the tensor.
                mesh = item.part.mesh_shape if item.part is not None else ()
                replica = bool(mesh) or (box is not None and box.is_empty)
                target = self._target(item.key, participant, layout, replica=replica)
            found.append((target, box))
        self._found = found

    def _names(self) -> list[str]:
        """The keys of all items."""
        given = self._given
        return given.keys if type(given) is PutItems else [item.key for item in given]

    def clear(self) -> list[Value]:
        """Drop whatever must make way for this put. Returns the values that nothing holds any
        more.
        """
        return [
            value for target in self._targets.values() for value in self._unfinished.clear(target)
        ]

    def compare(self) -> None:
        """Find the items that must be stored because no other participant stores them.

        Raises:
            LayoutMismatchError: another participant puts an entry with a different shape or dtype.
        """
        request, given = self._request, self._given
        publication = request.group
        made = None if publication is None else self._targets[publication.key].generation
        if made is not None and not (made.entries or made.relied or self._has_pieces()):
            # No part of this state dict exists yet: the usual case, often with many entries.
            self._fresh = made
            self.items, self.boxes = given, [None] * len(given)
            return
        stored: list[m.PutItem] = []
        self.items = stored
        for at, item in enumerate(given):
            target, box = self._found[at]
            if item.same_as >= 0:
                continue
            if target is not None:
                name = "" if publication is None else item.key
                made = target.generation
                if made is None or made.holds(name, item.meta, box, item.nbytes):
                    continue
            if box is not None and box.is_empty:
                continue
            self._stored.append(at)
            stored.append(item)
            self.boxes.append(box)

    def _has_pieces(self) -> bool:
        """Whether any item is a shard, or shares the bytes of another one."""
        return bool([item for item in self._request.items if item.same_as >= 0 or item.part])

    @property
    def in_boxes(self) -> bool:
        """Whether any of the items to be stored is a part of a value."""
        return self._fresh is None

    @property
    def keys(self) -> Collection[str]:
        """The keys that the put contributes to."""
        return self._targets.keys()

    @property
    def keeps_older(self) -> bool:
        """Whether older versions of what it puts stay readable."""
        publication = self._request.group
        if publication is None:
            return False
        return (publication.keep or self._unfinished.keep_of(publication.key)) > 1

    @property
    def generations(self) -> list[Generation]:
        """The generations that the put contributes to."""
        found = (target.generation for target in self._targets.values())
        return [generation for generation in found if generation is not None]

    def _target(
        self, key: str, participant: str, layout: Hashable, *, replica: bool = False
    ) -> PutTarget:
        request = self._request
        participants = 0 if request.group is None else request.group.participants
        what = layout, request.version, participants, request.group
        rewind = type(request) is m.Rewind
        target = self._unfinished.target(
            self._session, key, participant, *what, replica=replica, rewind=rewind
        )
        self._targets[key] = target
        return target

    def _check_alias(self, at: int, item: m.PutItem) -> None:
        items, of = self._given, item.same_as
        if of == -1:
            return
        if not 0 <= of < at or self._request.group is None or items[of].same_as >= 0:
            raise ProtocolError(f"{item.key!r} cannot be the same as item {of}", key=item.key)

    @property
    def prefix(self) -> str:
        """The prefix of the entries' names in the store; empty if the items are keys themselves."""
        publication = self._request.group
        return "" if publication is None else f"{publication.key}/"

    def enter(self, values: Sequence[Value], granted: dict[int, int]) -> Txn:
        """Make ``values``, those of :attr:`items`, part of their generations; return the put."""
        request = self._request
        contributions: dict[str, tuple[PutTarget, Contribution]] = {}
        for key, target in self._targets.items():
            contributions[key] = target, self._unfinished.join(target, self._session)
        publication = request.group
        if publication is not None:
            only = contributions[publication.key][1]
            only.partial = publication.partial
            firsts = {self._given[item.same_as].key for item in request.items if item.same_as >= 0}
            if firsts:
                only.order = dict.fromkeys(self._names())
                for item, (_, box) in zip(self._given, self._found, strict=True):
                    if box is not None and item.key in firsts:
                        only.tied_boxes.setdefault(item.key, []).append(box)
        if publication is not None and self._fresh is not None:
            target, contribution = contributions[publication.key]
            contribution.paths = {item.key: item.path for item in request.items if item.path}
            contribution.names, contribution.values = list(self._names()), list(values)
            contribution.whole = True
            self._fresh.entries.update(zip(contribution.names, values, strict=True))
            return Txn(list(values), granted, [], [(target, contribution)], [target])
        by_item = dict(zip(self._stored, values, strict=True))
        plain: list[Value] = []
        results: list[Value | PutTarget] = []
        for at, (item, (where, box)) in enumerate(zip(self._given, self._found, strict=True)):
            value = by_item.get(at)
            if where is None:
                if value is not None:
                    plain.append(value)
                    results.append(value)
                continue
            results.append(where)
            generation = where.generation
            if generation is None:
                continue
            name = "" if publication is None else item.key
            contribution = contributions[where.key][1]
            if item.path:
                contribution.paths[name] = item.path
            if item.same_as >= 0:
                contribution.aliases[name] = self._given[item.same_as].key
            elif value is not None:
                generation.add(contribution, name, item.key, value)
            else:
                contribution.others[name] = item.meta
                if box is not None and box.is_empty and name not in generation.entries:
                    generation.shards(name, item.key, item.meta, self._session.facts)
        if publication is not None:
            results = [self._targets[publication.key]]
        return Txn(list(values), granted, plain, list(contributions.values()), results)

    def grants(self, values: Sequence[Value], placed: int) -> list[m.Grant | None] | None:
        """Return the grants for the reply; None if all data was inline and the put is complete.

        ``placed``: the bytes granted for the values, if all are on one volume; otherwise -1.
        """
        if self._fresh is not None:
            if type(self._given) is PutItems and (packed := packed_grant(values, placed)):
                return packed
            return grants_of([value for value in values if value.data is None]) or None
        by_item = dict(zip(self._stored, values, strict=True))
        asked = [at for at, i in enumerate(self._given) if i.data is None and i.same_as < 0]
        if not asked:
            return None
        return grants_of([by_item.get(at) for at in asked])


def _check_once(
    seen: dict[str, tuple[m.PutItem, set[Box] | None]], item: m.PutItem, box: Box | None
) -> None:
    """Raise ProtocolError unless all items of one key are different shards of one tensor."""
    if item.key not in seen:
        seen[item.key] = item, None if box is None else {box}
        return
    first, boxes = seen[item.key]
    if boxes is None or box is None or first.part is None or box in boxes:
        raise ProtocolError(f"{item.key!r} comes twice in one put", key=item.key)
    if item.meta != first.meta or first.nbytes * box.numel != item.nbytes * prod(
        first.part.local_shape
    ):
        raise ProtocolError(f"{item.key!r} comes in shards of different tensors", key=item.key)
    boxes.add(box)
    if first.nbytes == 0:  # an empty shard does not determine the element size
        seen[item.key] = item, boxes


def _layout_of(item: m.PutItem) -> tuple[Hashable, str]:
    """Return the layout of a put to a single key, and the name of its participant."""
    part = item.part
    if part is None or not isinstance(item.meta, TensorMeta):
        return "value", ""
    layout = (item.meta.dtype, item.meta.shape, part.mesh_shape)
    if part.mesh_shape:
        return layout, ",".join(map(str, part.coordinates))
    return layout, f"{list(part.offsets)}+{list(part.local_shape)}"
