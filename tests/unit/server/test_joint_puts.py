"""The controller under puts that make versions together, in any order, against a small model.

Every stored element says which put it comes from, of which entry it is and where in the tensor it
lies. The model remembers who has put what for which version, and takes from the controller only
which version a put belongs to (`test_generations.py` is about that): whatever becomes visible must
be made of exactly those puts, at the moment when it is whole and never earlier, and stay as it is.
"""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs
from tests.profiles import half
from tests.unit.server.put_model import (
    KEEP,
    KEYS,
    Client,
    Model,
    Put,
    an_object,
    leased,
    reachable,
    read,
    shards,
    state_dict,
)
from tests.unit.server.test_controller import HERE, facts, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import (
    ConfigurationError,
    KeyNotFoundError,
    LayoutMismatchError,
    PartialPutError,
    StoreFullError,
    VersionGoneError,
)
from torchstore_core.server.controller import Controller
from torchstore_core.server.index.records import Waiter
from torchstore_core.server.memory.allocator import rounded
from torchstore_core.wire import messages as m

#: Most of what is put to one of them are state dicts.
MIXED = st.sampled_from(["l", "l", "l", "k"])


class JointPuts(RuleBasedStateMachine):
    """Requests of several clients in any order."""

    @initialize(mixed=st.booleans())
    def start(self, mixed: bool) -> None:
        """In half of the runs there are only state dicts, so that partial ones find a base."""
        self.mixed = mixed
        self.opened = volumes(1 << 18, 1 << 18)  # enough for all
        self.controller = Controller(self.opened.__enter__(), Strategy(), prefault=False)
        self.catalog = self.controller.catalog
        self.numbers = itertools.count(1)
        self.clients = [self.new_client() for _ in range(3)]
        self.forked: list[Client] = []
        self.model = Model(self.controller)
        self.waits: list[tuple[Waiter, str, int, list[list[int]]]] = []

    def teardown(self) -> None:
        """When everybody is gone and everything deleted, nothing is left."""
        if not hasattr(self, "controller"):
            return
        try:
            for client in self.clients + self.forked:
                self.controller.close_session(client.record)
            self.controller.delete(KEYS, strict=False)
            assert not self.catalog.newest
            assert not any(group.pending for group in self.catalog.histories.values())
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
        """It may have a forked child, which still reads what is leased."""
        client = self.client(data)
        self.clients.remove(client)
        if data.draw(st.booleans(), "forked"):
            self.controller.end_session(client.record)
            self.forked.append(client)
        else:
            self.controller.close_session(client.record)
        client.dead = True
        for puts in client.txns.values():
            self.model.taken_back(puts)
        self.model.reconcile()

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
        if not self.model.is_manifest(key):  # then it is refused, mostly
            partial = partial and data.draw(st.integers(0, 3), "no base") == 0
        self.publish(data, key, index, count, layout, partial)

    @precondition(lambda self: any(map(self.model.is_manifest, KEYS)))
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 1, 1, 2]),
        layout=st.sampled_from(["rows", "whole"]),
    )
    def put_some_entries(self, data: st.DataObject, count: int, layout: str) -> None:
        """Somebody changes a part of a state dict that is there."""
        key = data.draw(st.sampled_from([key for key in KEYS if self.model.is_manifest(key)]))
        index = data.draw(st.integers(0, count - 1), "participant")
        self.publish(data, key, index, count, layout, partial=True)

    @precondition(
        lambda self: self.model.mates("k", grouped=True) + self.model.mates("l", grouped=True)
    )
    @rule(data=st.data())
    def put_more_of_a_state_dict(self, data: st.DataObject) -> None:
        """Somebody puts what another one waits for."""
        mates = self.model.mates("k", grouped=True) + self.model.mates("l", grouped=True)
        mate = data.draw(st.sampled_from(mates), "mate")
        count, layout, partial = mate.like
        partial = data.draw(st.sampled_from([partial, partial, not partial]), "partial")
        there = self.model.pending[mate.key][mate.version]
        index = data.draw(st.sampled_from([i for i in range(count) if str(i) not in there] or [0]))
        version = data.draw(st.sampled_from([0, 0, mate.version]), "version")
        self.publish(data, mate.key, index, count, layout, partial, version)

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
        if partial:
            few = data.draw(st.sets(st.sampled_from(names), max_size=4))
            names = [name for name in names if name in few]
        elif data.draw(st.booleans(), "leaves one out"):
            names.remove(data.draw(st.sampled_from(names)))
        other = data.draw(st.integers(0, 19), "shape") == 19
        items = state_dict(put, names, layout, index, count, other)
        version = self.version(data, key) if version is None else version
        self.send(data, m.Put(1, 0, items, version, group), [put])

    @precondition(lambda self: self.mixed)
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

    @precondition(
        lambda self: self.model.mates("k", grouped=False) + self.model.mates("l", grouped=False)
    )
    @rule(data=st.data())
    def put_more_of_a_tensor(self, data: st.DataObject) -> None:
        """Somebody puts what another one waits for, or the same."""
        mates = self.model.mates("k", grouped=False) + self.model.mates("l", grouped=False)
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

    @precondition(lambda self: self.mixed)
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
        return 0 if ahead is None else max(0, self.model.highest[key] + ahead)

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
            self.model.reconcile(putting=puts, version=request.version)
            return
        if grants is None:
            for put in puts:
                self.model.enters(client, put, versions[put.at], request)
            self.model.commits(puts, versions)
            self.model.reconcile(putting=puts, version=request.version)
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
            self.model.enters(client, put, results[put.at].version, request)
        self.model.reconcile(putting=puts, version=request.version)
        if how == "placed":
            self.commit_txn(client, txn)

    def refused(self, error: Exception, request: m.Put, puts: list[Put]) -> None:
        """It has a reason, and it changes nothing but what is left over."""
        keys = [put.key for put in puts]
        if isinstance(error, VersionGoneError):
            lines = [
                gen for key in keys for gen in [self.model.pending[key].get(request.version)] if gen
            ]
            assert lines or any(request.version <= self.model.highest[key] for key in keys)
        elif isinstance(error, ConfigurationError):
            (put,) = [p for p in puts if request.version in self.model.pending[p.key]][:1]
            other = self.model.pending[put.key][request.version][put.who]
            assert not other.committed
        else:
            assert request.group is not None
            assert request.group.partial
            assert not self.model.is_manifest(keys[0])
        self.model.reconcile(putting=puts, version=request.version)

    @precondition(lambda self: any(client.txns for client in self.clients))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        client = self.client(data, having="txns")
        self.commit_txn(client, data.draw(st.sampled_from(sorted(client.txns))))

    def commit_txn(self, client: Client, txn: int) -> None:
        puts = client.txns.pop(txn)
        self.model.commits(puts, self.controller.commit(client.record, txn))
        self.model.reconcile()

    @precondition(lambda self: any(client.txns for client in self.clients))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = self.client(data, having="txns")
        txns = data.draw(st.lists(st.sampled_from(sorted(client.txns)), min_size=1, max_size=2))
        self.controller.abort(client.record, txns)
        for txn in dict.fromkeys(txns):
            self.model.taken_back(client.txns.pop(txn))
        self.model.reconcile()

    @precondition(lambda self: self.mixed)
    @rule(key=MIXED, strict=st.booleans())
    def delete(self, key: str, strict: bool) -> None:
        there = bool(self.model.visible[key] or self.model.pending[key])
        if strict and not there:
            with pytest.raises(KeyNotFoundError):
                self.controller.delete([key], strict)
            return
        assert self.controller.delete([key], strict) == there
        self.model.deleted(key)
        self.model.reconcile()

    # ---- readers --------------------------------------------------------------------------

    @rule(data=st.data(), key=st.sampled_from(KEYS), entry=st.sampled_from(["", "w", "all"]))
    def look(self, data: st.DataObject, key: str, entry: str) -> None:
        """Some version of a key, or of an entry of it, is there or not; and is leased."""
        client = self.client(data)
        version = data.draw(
            st.sampled_from([0, 0, *self.model.visible[key], self.model.highest[key] + 1])
        )
        name = f"{key}/{entry}" if entry else key
        lease = next(self.numbers)
        want = m.Locate(1, lease, [m.Want(name, version)], -1)
        snapshot = self.model.visible[key].get(version or self.model.highest[key], {})
        if not snapshot or entry not in (*snapshot, "") or (entry and "paths" not in snapshot):
            with pytest.raises((KeyNotFoundError, VersionGoneError)) as caught:
                self.controller.locate(client.record, want)
            gone = caught.type is VersionGoneError
            assert gone is bool(version)
            on_its_way = bool(self.model.pending[key]) and not self.model.visible[key]
            assert gone or (caught.type is PartialPutError) is on_its_way
            return
        if "paths" in snapshot and not entry:
            fetch = m.Fetch(1, lease, key, version, None, -1)
            reply = self.controller.fetch(client.record, fetch)
            entries, leased = [one for one in reply.entries if one is not None], reply.leased
        else:
            entries, leased = self.controller.locate(client.record, want)
            assert entries[0].version == (version or self.model.highest[key])
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
        least = self.model.highest[name[0]] + ahead
        waiter = self.controller.waiting.add([name], least, fired.append)
        if waiter is None:
            assert fired == [[self.model.newest_of(name)]]
        else:
            self.waits.append((waiter, name, least, fired))

    # ---- at any time ----------------------------------------------------------------------

    @invariant()
    def who_waits_is_told_once_and_at_once(self) -> None:
        for wait in list(getattr(self, "waits", ())):
            _, name, least, fired = wait
            newest = self.model.newest_of(name)
            assert fired == ([[newest]] if newest and newest >= least else [])
            if fired:
                self.waits.remove(wait)

    @invariant()
    def what_can_be_read_stays_as_it_is(self) -> None:
        if not hasattr(self, "controller"):
            return
        for key in KEYS:
            for version, snapshot in self.model.visible[key].items():
                assert read(self.controller, key, version) == snapshot
        for client in self.clients + self.forked:
            for held in client.leases.values():
                assert all(self.peek(grant, len(seen)) == seen for grant, seen in held)

    @invariant()
    def all_memory_that_is_used_belongs_to_somebody(self) -> None:
        if not hasattr(self, "controller"):
            return
        held = {id(value): value for value in reachable(self.controller)}.values()
        lent = {id(v): v for v in leased(self.controller)}.values()
        for at, volume in enumerate(self.controller.volumes):
            here = [value for value in held if value.volume == at]
            placed = sum(rounded(v.nbytes) for v in here if v.data is None)
            assert volume.allocator.used == placed
            assert volume.inline == sum(len(v.data) for v in here if v.data is not None)
            assert volume.leased == sum(rounded(v.nbytes) for v in lent if v.volume == at)
            txns = [t for c in self.clients for t in c.record.txns.values() if t.values]
            assert volume.unfinished == sum(t.nbytes for t in txns if t.values[0].volume == at)


JointPuts.TestCase.settings = half()
# When it fails, hypothesis takes its time to find a short example.
TestJointPuts = pytest.mark.timeout(600)(JointPuts.TestCase)
