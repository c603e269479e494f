"""The controller under puts that make versions together, in any order, against a small model.

Every stored element says which put it comes from, of which entry it is and where in the tensor it
lies. The model remembers who has put what for which version, and takes from the controller only
which version a put belongs to (`test_generations.py` is about that): whatever becomes visible must
be made of exactly those puts, at the moment when it is whole and never earlier, and stay as it is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs
from tests.unit.put_model import (
    ELEMENT,
    EVERYTHING,
    KEEP,
    KEYS,
    Client,
    Put,
    Snapshot,
    an_object,
    check_made_of,
    content,
    shards,
    state_dict,
    uncovered,
)
from tests.unit.test_controller import HERE, facts, volumes

from torchstore_core.boxes import Box
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import (
    ConfigurationError,
    KeyNotFoundError,
    LayoutMismatchError,
    PartialPutError,
    StoreFullError,
    VersionGoneError,
)
from torchstore_core.server.allocator import rounded
from torchstore_core.server.controller import Controller
from torchstore_core.server.generations import all_values
from torchstore_core.server.records import Value, Waiter
from torchstore_core.values import StateDictMeta
from torchstore_core.wire import messages as m

#: Most of what is put to one of them are state dicts.
MIXED = st.sampled_from(["l", "l", "l", "k"])


class JointPuts(RuleBasedStateMachine):
    """Requests of several clients in any order."""

    @initialize()
    def start(self) -> None:
        self.opened = volumes(16384, 16384)
        self.controller = Controller(self.opened.__enter__(), Strategy(), prefault=False)
        self.catalog = self.controller.catalog
        self.numbers = itertools.count(1)
        self.clients = [self.new_client() for _ in range(3)]
        #: Of each key: the puts for versions on their way, by participant.
        self.pending: dict[str, dict[int, dict[str, Put]]] = {key: {} for key in KEYS}
        self.session_of: dict[Put, Client] = {}
        self.visible: dict[str, dict[int, Snapshot]] = {key: {} for key in KEYS}
        self.keep = dict.fromkeys(KEYS, 1)
        self.highest = dict.fromkeys(KEYS, 0)
        self.waits: list[tuple[Waiter, str, int, list[list[int]]]] = []

    def teardown(self) -> None:
        """When everybody is gone and everything deleted, nothing is left."""
        if not hasattr(self, "controller"):
            return
        try:
            for client in self.clients:
                self.controller.close_session(client.record)
            self.controller.delete(KEYS, strict=False)
            assert not self.catalog.newest
            assert not any(group.pending for group in self.catalog.groups.values())
            for volume in self.controller.volumes:
                assert (volume.allocator.used, volume.inline) == (0, 0)
                assert (volume.leased, volume.unfinished) == (0, 0)
        finally:
            self.opened.__exit__(None, None, None)

    def new_client(self) -> Client:
        return Client(self.controller.open_session(facts(next(self.numbers)), HERE))

    def client(self, data: st.DataObject, *, having: str = "") -> Client:
        fit = [c for c in self.clients if having and getattr(c, having)]
        return data.draw(st.sampled_from(fit or self.clients), "client")

    # ---- processes ------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 4)
    @rule()
    def connect(self) -> None:
        self.clients.append(self.new_client())

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        client = self.client(data)
        self.clients.remove(client)
        self.controller.close_session(client.record)
        client.dead = True
        for puts in client.txns.values():
            self.taken_back(puts)
        self.reconcile()

    # ---- puts -----------------------------------------------------------------------------

    @rule(
        data=st.data(),
        key=st.sampled_from(["k", "k", "l"]),
        count=st.sampled_from([1, 2, 2, 2, 3]),
        layout=st.sampled_from(["rows", "rows", "columns", "whole"]),
        partial=st.sampled_from([False, False, True]),
    )
    def put_state_dict(
        self, data: st.DataObject, key: str, count: int, layout: str, partial: bool
    ) -> None:
        index = data.draw(st.integers(0, count - 1), "participant")
        if not self.is_manifest(key):  # then it is refused, mostly
            partial = partial and data.draw(st.integers(0, 3), "no base") == 0
        self.publish(data, key, index, count, layout, partial)

    @precondition(lambda self: self.mates("k", grouped=True) + self.mates("l", grouped=True))
    @rule(data=st.data())
    def put_more_of_a_state_dict(self, data: st.DataObject) -> None:
        """Somebody puts what another one waits for."""
        mates = self.mates("k", grouped=True) + self.mates("l", grouped=True)
        mate = data.draw(st.sampled_from(mates), "mate")
        count, layout, partial = mate.like
        there = self.pending[mate.key][mate.version]
        index = data.draw(st.sampled_from([i for i in range(count) if str(i) not in there] or [0]))
        version = data.draw(st.sampled_from([0, 0, mate.version]), "version")
        self.publish(data, mate.key, index, count, layout, partial, version)

    def mates(self, key: str, *, grouped: bool) -> list[Put]:
        """Puts for versions on their way, of state dicts or of tensors."""
        puts = [put for puts in self.pending[key].values() for put in puts.values()]
        return [put for put in puts if put.like and (put.group is not None) is grouped]

    def publish(
        self,
        data: st.DataObject,
        key: str,
        index: int,
        count: int,
        layout: str,
        partial: bool,
        version: int | None = None,
    ) -> None:
        group = m.Publication(key, str(index), count, partial, KEEP[key])
        put = Put(next(self.numbers), key, str(index), count, group)
        put.like = count, layout, partial
        names = ["w", "v", "all", "some", f"own{index}", "tied"]
        few = st.sets(st.sampled_from(names), max_size=4 if partial else 1)
        left_out = data.draw(few) if data.draw(st.booleans(), "leaves out") else set()
        other = data.draw(st.integers(0, 19), "shape") == 19
        items = state_dict(
            put, [n for n in names if n not in left_out], layout, index, count, other
        )
        version = self.version(data, key) if version is None else version
        self.send(data, m.Put(1, 0, items, version, group), [put])

    @rule(
        data=st.data(),
        keys=st.sampled_from([("l",), ("l",), ("l",), ("k", "l")]),
        mesh=st.sampled_from([(), (2,), (2, 2), (2, 2)]),
        layout=st.sampled_from(["rows", "rows", "line", "columns", "whole"]),
    )
    def put_tensors(
        self, data: st.DataObject, keys: tuple[str, ...], mesh: tuple[int, ...], layout: str
    ) -> None:
        """Shards of tensors that have keys of their own, from a mesh of replicas or from none."""
        self.put_shards(data, keys, mesh, layout, self.version(data, keys[0]))

    @precondition(lambda self: self.mates("k", grouped=False) + self.mates("l", grouped=False))
    @rule(data=st.data())
    def put_more_of_a_tensor(self, data: st.DataObject) -> None:
        """Somebody puts what another one waits for, or the same."""
        mates = self.mates("k", grouped=False) + self.mates("l", grouped=False)
        mate = data.draw(st.sampled_from(mates), "mate")
        version = data.draw(st.sampled_from([0, 0, mate.version]), "version")
        self.put_shards(data, (mate.key,), *mate.like, version)

    def put_shards(
        self,
        data: st.DataObject,
        keys: tuple[str, ...],
        mesh: tuple[int, ...],
        layout: str,
        version: int,
    ) -> None:
        index, copy = data.draw(st.integers(0, 1), "shard"), data.draw(st.integers(0, 1), "copy")
        coordinates = {(): (), (2,): (index,), (2, 2): (copy, index)}[mesh]
        puts: list[Put] = []
        items: list[m.PutItem] = []
        for key in keys:
            put = Put(next(self.numbers), key)
            made = shards(put, "", layout, index, 2, False, (mesh, coordinates))
            box = put.claims[""][1][0]
            put.who = ",".join(map(str, coordinates)) or f"{[*box.offset]}+{[*box.shape]}"
            put.layout = put.claims[""][0], mesh
            put.like = mesh, layout
            put.at = len(items)
            puts.append(put)
            items += made
        self.send(data, m.Put(1, 0, items, version), puts)

    @rule(data=st.data(), key=MIXED, explicit=st.booleans())
    def put_plain(self, data: st.DataObject, key: str, explicit: bool) -> None:
        """A value that needs nobody else; also one that says which version it is to be."""
        put = Put(next(self.numbers), key)
        item = an_object(put, "")
        version = self.version(data, key) if explicit else 0
        put.plain = not version
        self.send(data, m.Put(1, 0, [item], version), [put])

    def version(self, data: st.DataObject, key: str) -> int:
        ahead = data.draw(st.sampled_from([None] * 8 + [0, 1, 2, 4]), "version")
        return 0 if ahead is None else max(0, self.highest[key] + ahead)

    def send(self, data: st.DataObject, request: m.Put, puts: list[Put]) -> None:
        """Send a put, write what it grants, and maybe commit it."""
        client = self.client(data)
        txn = next(self.numbers)
        how = data.draw(st.sampled_from(["inline", "placed", "placed", "open"]), "how")
        placed = [how != "inline" and bool(i.data) and i.same_as < 0 for i in request.items]
        items = [
            structs.replace(item, data=None) if there else item
            for item, there in zip(request.items, placed, strict=True)
        ]
        asked = [item for item, there in zip(request.items, placed, strict=True) if there]
        request = m.Put(1, txn, items, request.version, request.group)
        try:
            versions, grants = self.controller.put(client.record, request)
        except (VersionGoneError, ConfigurationError, KeyNotFoundError) as error:
            self.refused(error, request, puts)
            return
        except (LayoutMismatchError, StoreFullError):
            self.reconcile(putting=puts, explicit=bool(request.version))
            return
        if grants is None:
            for put in puts:
                self.enters(client, put, versions[put.at], request)
            self.commits(puts, versions)
            self.reconcile(putting=puts, explicit=bool(request.version))
            return
        for item, grant in zip(asked, grants, strict=True):
            if grant is None:
                assert item.part is not None or request.group is not None
                continue
            memory = self.controller.volumes[grant.volume].memory
            assert item.data is not None
            assert os.pwrite(memory.fd, item.data, grant.offset) == item.nbytes
        client.txns[txn] = puts
        results = client.record.txns[txn].results
        for put in puts:
            self.enters(client, put, results[put.at].version, request)
        self.reconcile(putting=puts, explicit=bool(request.version))
        if how == "placed":
            self.commit_txn(client, txn)

    def refused(self, error: Exception, request: m.Put, puts: list[Put]) -> None:
        """It has a reason, and it changes nothing but what is left over."""
        keys = [put.key for put in puts]
        if isinstance(error, VersionGoneError):
            lines = [gen for key in keys for gen in [self.pending[key].get(request.version)] if gen]
            assert lines or any(request.version <= self.highest[key] for key in keys)
        elif isinstance(error, ConfigurationError):
            (put,) = [p for p in puts if request.version in self.pending[p.key]][:1]
            other = self.pending[put.key][request.version][put.who]
            assert not other.committed
        else:
            assert request.group is not None
            assert request.group.partial
            assert not self.is_manifest(keys[0])
        self.reconcile(putting=puts, explicit=bool(request.version))

    def enters(self, client: Client, put: Put, version: int, request: m.Put) -> None:
        """The model's account of a put: which version it is for, and what of it is stored."""
        self.session_of[put] = client
        if put.plain:
            return
        put.version = version
        assert request.version in (0, version)
        group = self.catalog.groups.get(put.key)
        generation = None if group is None else group.pending.get(version)
        others = self.pending[put.key].setdefault(version, {})
        if generation is None and version <= self.highest[put.key]:  # late: it stores nothing
            del self.pending[put.key][version]
            return
        if any(other.layout != put.layout for other in others.values()):
            assert all(self.session_of[other].dead for other in others.values())
            others.clear()
        assert request.version or put.who not in others
        if generation is not None:
            items = generation.contributions[put.who].items
            put.stored = [(name, value.box) for name, value in items]
        alive = [o for o in others.values() if o.who != put.who and not self.session_of[o].dead]
        elsewhere = {stored for other in alive for stored in other.stored}
        assert not elsewhere.intersection(put.stored), "stored twice"
        others[put.who] = put

    @precondition(lambda self: any(client.txns for client in self.clients))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        client = self.client(data, having="txns")
        self.commit_txn(client, data.draw(st.sampled_from(sorted(client.txns))))

    def commit_txn(self, client: Client, txn: int) -> None:
        puts = client.txns.pop(txn)
        self.commits(puts, self.controller.commit(client.record, txn))
        self.reconcile()

    def commits(self, puts: list[Put], versions: Sequence[int]) -> None:
        for put in puts:
            put.committed = True
            if put.plain:
                put.version = versions[put.at]
                self.pending[put.key][put.version] = {"": put}
            assert put.version == versions[put.at]

    @precondition(lambda self: any(client.txns for client in self.clients))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = self.client(data, having="txns")
        txns = data.draw(st.lists(st.sampled_from(sorted(client.txns)), min_size=1, max_size=2))
        self.controller.abort(client.record, txns)
        for txn in dict.fromkeys(txns):
            self.taken_back(client.txns.pop(txn))
        self.reconcile()

    def taken_back(self, puts: list[Put]) -> None:
        for put in puts:
            generation = self.pending[put.key].get(put.version, {})
            if generation.get(put.who) is put:
                del generation[put.who]
                if not generation:
                    del self.pending[put.key][put.version]

    @rule(key=MIXED, strict=st.booleans())
    def delete(self, key: str, strict: bool) -> None:
        there = bool(self.visible[key] or self.pending[key])
        if strict and not there:
            with pytest.raises(KeyNotFoundError):
                self.controller.delete([key], strict)
            return
        assert self.controller.delete([key], strict) == there
        self.highest[key] = max([self.highest[key], *self.pending[key]])
        self.visible[key], self.pending[key], self.keep[key] = {}, {}, 1
        self.reconcile()

    # ---- what becomes of it -----------------------------------------------------------------

    def reconcile(self, *, putting: Sequence[Put] = (), explicit: bool = False) -> None:
        """What the controller has now is what the model expects."""
        for key in KEYS:
            there = self.catalog.versions(key)
            assert there == sorted(set(there))
            for version in there:
                if version not in self.visible[key]:
                    self.appears(key, version)
            kept = list(self.visible[key])[-self.keep[key] :]
            self.visible[key] = {version: self.visible[key][version] for version in kept}
            assert there == kept
            self.compare_pending(key, [p.who for p in putting if p.key == key], explicit)

    def appears(self, key: str, version: int) -> None:
        """A version is new, newer than all before, and made of what was put for it."""
        assert version > self.highest[key]
        puts = self.pending[key].pop(version)
        assert all(put.version == version for put in puts.values())
        done = [put for put in puts.values() if put.committed]
        base: Snapshot = {}
        seen = self.read(key, version)
        if done[0].group is not None:
            assert len(done) >= done[0].group.participants
            if any(put.group is not None and put.group.partial for put in puts.values()):
                base = self.base_of(key, version, seen)
            self.keep[key] = KEEP[key]
        check_made_of(seen, done, base)
        for put in done:  # whoever put some of it says so
            stored = {(name, box) for name, box in put.stored if box is not None}
            for name, (shape, found) in put.claims.items():
                assert shape is None or all((name, b) in stored or b not in stored for b in found)
        self.highest[key] = version
        self.visible[key][version] = seen
        for older in [v for v in self.pending[key] if v < version]:
            del self.pending[key][older]

    def base_of(self, key: str, version: int, seen: Snapshot) -> Snapshot:
        """The version before a partial one. One that became whole in the same moment, and is not
        kept, was never to be seen: then that it is made of puts for one such version is enough.
        """
        if self.is_manifest(key):
            return self.visible[key][self.highest[key]]
        for puts in reversed([self.pending[key][v] for v in self.pending[key] if v < version]):
            made = [put for put in puts.values() if put.group is not None and put.committed]
            names = {name for put in made for name in (*put.claims, *put.aliases)}
            if not made or len(made) < made[0].like[0] or not names <= set(seen):
                continue
            numbers = {put.number for put in made}
            return {
                name: one
                for name, one in seen.items()
                if name in ("paths", "same")
                or {ELEMENT.unpack(data[: ELEMENT.size])[0] for data in one[1].values()} <= numbers
            }
        raise AssertionError(f"version {version} of {key} has no base")

    def compare_pending(self, key: str, putting: list[str], explicit: bool) -> None:
        """The same versions are on their way, by the same participants; none of them is whole."""
        seen = {p.version: p for p in self.catalog.pending(key)}
        for version, puts in list(self.pending[key].items()):
            state = seen.pop(version, None)
            for who, put in list(puts.items()):
                if state is not None and who in (*state.committed, *state.writing):
                    assert (who in state.committed) is put.committed
                    continue
                # Only what is left over of those that died, or put again, is thrown out, and only
                # by one that puts to the same key.
                left_over = any(self.session_of[p].dead for p in puts.values())
                assert putting
                assert left_over or (explicit and who in putting)
                del puts[who]
            if not puts:
                assert state is None
                del self.pending[key][version]
                continue
            assert state is not None
            assert {*state.committed, *state.writing} == set(puts)
            missing = uncovered(list(puts.values()))
            assert {name for name, _, _ in state.missing} == {name for name, _ in missing}
            for name, offset, shape in state.missing:
                assert any(n == name and b.contains(Box(offset, shape)) for n, b in missing)
            group = next(iter(puts.values())).group
            done = sum(put.committed for put in puts.values())
            waits = group is not None and (
                done < group.participants
                or (
                    any(p.group is not None and p.group.partial for p in puts.values())
                    and not self.is_manifest(key)
                )
            )
            assert waits or missing, "it is whole, but not visible"
        assert not seen

    def is_manifest(self, key: str) -> bool:
        return bool(self.visible[key]) and "paths" in self.visible[key][self.highest[key]]

    def read(self, key: str, version: int) -> Snapshot:
        """Everything of a version, as its bytes."""
        record = self.clients[0].record
        want = m.Locate(1, 1 << 40, [m.Want(key, version)], EVERYTHING)
        ((entry,), leased) = self.controller.locate(record, want)
        assert not leased
        assert entry.version == version
        if not isinstance(entry.meta, StateDictMeta):
            return {"": content(entry)}
        fetch = m.Fetch(1, 1 << 40, key, version, None, EVERYTHING)
        fetched = self.controller.fetch(record, fetch)
        assert fetched.version == version
        assert len(fetched.names) == len(fetched.entries) == entry.meta.entries
        seen: Snapshot = {}
        for name, one in zip(fetched.names, fetched.entries, strict=True):
            assert one is not None
            seen[name] = content(one)
        seen["paths"] = {fetched.names[at]: path for at, path in fetched.paths.items()}
        seen["same"] = {fetched.names[i]: fetched.names[j] for i, j in fetched.same_as}
        return seen

    # ---- readers --------------------------------------------------------------------------

    @rule(data=st.data(), key=st.sampled_from(KEYS), entry=st.sampled_from(["", "w", "all"]))
    def look(self, data: st.DataObject, key: str, entry: str) -> None:
        """Some version of a key, or of an entry of it, is there or not; and is leased."""
        client = self.client(data)
        version = data.draw(st.sampled_from([0, 0, *self.visible[key], self.highest[key] + 1]))
        name = f"{key}/{entry}" if entry else key
        lease = next(self.numbers)
        want = m.Locate(1, lease, [m.Want(name, version)], -1)
        snapshot = self.visible[key].get(version or self.highest[key], {})
        if not snapshot or entry not in (*snapshot, "") or (entry and "paths" not in snapshot):
            with pytest.raises((KeyNotFoundError, VersionGoneError)) as caught:
                self.controller.locate(client.record, want)
            gone = caught.type is VersionGoneError
            assert gone is bool(version)
            on_its_way = bool(self.pending[key]) and not self.visible[key]
            assert gone or (caught.type is PartialPutError) is on_its_way
            return
        if "paths" in snapshot and not entry:
            fetch = m.Fetch(1, lease, key, version, None, -1)
            reply = self.controller.fetch(client.record, fetch)
            entries, leased = [one for one in reply.entries if one is not None], reply.leased
        else:
            entries, leased = self.controller.locate(client.record, want)
            assert entries[0].version == (version or self.highest[key])
        held = [(one.grant, one.nbytes) for one in entries if one.grant is not None]
        held += [(p.grant, p.nbytes) for e in entries for p in e.parts or () if p.grant is not None]
        assert leased is bool(held)
        if held:
            client.leases[lease] = [(grant, self.peek(grant, nbytes)) for grant, nbytes in held]

    def peek(self, grant: m.Grant, nbytes: int) -> bytes:
        return os.pread(self.controller.volumes[grant.volume].memory.fd, nbytes, grant.offset)

    @precondition(lambda self: any(client.leases for client in self.clients))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        client = self.client(data, having="leases")
        lease = data.draw(st.sampled_from(sorted(client.leases)))
        self.controller.release(client.record, [lease], [])
        del client.leases[lease]

    @rule(name=st.sampled_from([*KEYS, "k/w", "l/v"]), ahead=st.integers(0, 3))
    def wait(self, name: str, ahead: int) -> None:
        fired: list[list[int]] = []
        least = self.highest[name[0]] + ahead
        waiter = self.controller.waiting.add([name], least, fired.append)
        if waiter is None:
            assert fired == [[self.newest_of(name)]]
        else:
            self.waits.append((waiter, name, least, fired))

    def newest_of(self, name: str) -> int:
        """The newest version of a key, or of an entry; 0 if it has none."""
        key, _, entry = name.partition("/")
        newest = max(self.visible[key], default=0)
        if not newest or (entry and ("paths" not in (there := self.visible[key][newest]))):
            return 0
        return newest if not entry or entry in there else 0

    # ---- at any time ----------------------------------------------------------------------

    @invariant()
    def who_waits_is_told_once_and_at_once(self) -> None:
        for wait in list(getattr(self, "waits", ())):
            _, name, least, fired = wait
            newest = self.newest_of(name)
            assert fired == ([[newest]] if newest and newest >= least else [])
            if fired:
                self.waits.remove(wait)

    @invariant()
    def what_can_be_read_stays_as_it_is(self) -> None:
        if not hasattr(self, "controller"):
            return
        for key in KEYS:
            for version, snapshot in self.visible[key].items():
                assert self.read(key, version) == snapshot
        for client in self.clients:
            for held in client.leases.values():
                assert all(self.peek(grant, len(seen)) == seen for grant, seen in held)

    @invariant()
    def all_memory_that_is_used_belongs_to_somebody(self) -> None:
        if not hasattr(self, "controller"):
            return
        held = {id(value): value for value in self.values()}.values()
        leased = {id(v): v for v in self.leased()}.values()
        for at, volume in enumerate(self.controller.volumes):
            here = [value for value in held if value.volume == at]
            placed = sum(rounded(v.nbytes) for v in here if v.data is None)
            assert volume.allocator.used == placed
            assert volume.inline == sum(len(v.data) for v in here if v.data is not None)
            assert volume.leased == sum(rounded(v.nbytes) for v in leased if v.volume == at)
            txns = [t for c in self.clients for t in c.record.txns.values() if t.values]
            assert volume.unfinished == sum(t.nbytes for t in txns if t.values[0].volume == at)

    def leased(self) -> Iterator[Value]:
        for client in self.clients:
            for held in client.record.leases.values():
                yield from (value for value in held if value is not None)

    def values(self) -> Iterator[Value]:
        """All that is reachable."""
        yield from self.leased()
        for stored in self.catalog.newest.values():
            yield from all_values(stored)
        for group in self.catalog.groups.values():
            for stored in group.history.values():
                yield from all_values(stored)
            for generation in group.pending.values():
                for contribution in generation.contributions.values():
                    yield from (value for _, value in contribution.items)
        for client in self.clients:
            for txn in client.record.txns.values():
                yield from txn.values


JointPuts.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
# When it fails, hypothesis takes its time to find a short example.
TestJointPuts = pytest.mark.timeout(600)(JointPuts.TestCase)
