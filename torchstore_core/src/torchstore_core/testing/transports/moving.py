"""Every byte arrives, in both directions, and no other memory changes."""

from __future__ import annotations

import asyncio
import ipaddress
import operator
import random
from collections.abc import Sequence

import msgspec
import pytest

from torchstore_core.contracts.transport import Bid, Copy, Link
from torchstore_core.testing import leftovers
from torchstore_core.testing.networks import Namespace, two_networks
from torchstore_core.testing.transports.base import (
    PLACES,
    Ends,
    TransportKit,
    check,
    fail,
    over_a_link,
    run,
)
from torchstore_core.testing.transports.ends.client import Client, Errand
from torchstore_core.testing.transports.ends.endpoints import Endpoints
from torchstore_core.testing.transports.ends.memory import Memory, kinds, pattern
from torchstore_core.testing.transports.ends.session import Session

__all__ = ["MovingTests"]

_BESIDE = 300_001
_SIZES = (0, 1, 2, 3, 7, 8, 63, 64, 65, 4095, 4096, 4097, 65_537, (1 << 20) + 1)
_PIECES = 10_000
_AT_ONCE = 12
_TURN = 30_001
# Of bytes of every kind: as large as what is sent at once, and less; and larger.
_KINDS_BYTES = (257, 70_003, (1 << 20) + 5)
_BATCHED = 1 << 20
_4_GIB = 1 << 32
_VAST = _4_GIB + (64 << 20)


async def round_trip(endpoints: Endpoints, link: Link, sizes: Sequence[int], seed: int) -> None:
    """Write pieces in a random order, and read them into other memory in another order. The pieces
    have gaps between them, and lie in different orders in local memory and in the segment.
    """
    shuffled = random.Random(seed)  # noqa: S311
    here, there = list(range(len(sizes))), list(range(len(sizes)))
    shuffled.shuffle(here)
    shuffled.shuffle(there)
    locally, local_bytes = _apart(sizes, here)
    places, nbytes = _apart(sizes, there)
    data = pattern(seed, local_bytes)
    offset = endpoints.take(nbytes)
    expected, back = bytearray(b"\xee" * nbytes), bytearray(b"\xcc" * local_bytes)
    for at, size in enumerate(sizes):
        piece = data[locally[at] : locally[at] + size]
        expected[places[at] : places[at] + size] = piece
        back[locally[at] : locally[at] + size] = piece
    endpoints.put(offset, b"\xee" * nbytes)
    source, target = Memory(data), Memory(b"\xcc" * local_bytes)

    def copies(memory: Memory) -> list[Copy]:
        order = list(range(len(sizes)))
        shuffled.shuffle(order)
        return [Copy(memory.address + locally[i], 0, offset + places[i], sizes[i]) for i in order]

    await link.write(copies(source))
    _compare("write", sizes, bytes(expected), endpoints.look(offset, nbytes))
    check(source.is_intact() and source.data() == data, "write changed its source")
    await link.read(copies(target))
    _compare("read", sizes, bytes(back), target.data())
    check(target.is_intact(), f"read: bytes beside the destination changed ({_named(sizes)})")


def _apart(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Return offsets of pieces in this order, with gaps of up to 4 bytes, and the total size."""
    places, at = [0] * len(sizes), 3
    for count, index in enumerate(order):
        places[index] = at
        at += sizes[index] + count % 5
    return places, at + 3


def _compare(what: str, sizes: Sequence[int], expected: bytes, found: bytes) -> None:
    if found == expected:
        return
    both = (int.from_bytes(one, "little") for one in (expected, found))
    wrong = operator.xor(*both).to_bytes(len(expected), "little")  # quick, for many bytes as well
    first, last = len(wrong) - len(wrong.lstrip(b"\0")), len(wrong.rstrip(b"\0")) - 1
    fail(
        f"{what}: {len(wrong) - wrong.count(0)} bytes are wrong, between {first} and {last} of "
        f"{len(expected)} ({_named(sizes)})"
    )


def _named(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} pieces of {min(sizes)} to {max(sizes)} bytes"


class MovingTests(TransportKit):
    """Tests that transfers of all sizes and kinds arrive."""

    @pytest.mark.parametrize("place", PLACES)
    def test_every_size_arrives(self, place: str) -> None:
        """From zero bytes to a megabyte and a byte, each as its own batch, at odd offsets."""
        endpoints = self.at(place)

        async def work(_: Session, link: Link) -> None:
            await link.write([])
            await link.read([])
            for seed, size in enumerate(_SIZES):
                await round_trip(endpoints, link, [size], seed)

        self.with_link(endpoints, work)

    @over_a_link()
    async def test_a_large_transfer_arrives(self, ends: Ends) -> None:
        """Move about :attr:`large_bytes` in one piece, and compare all of them."""
        endpoints, _, link = ends
        nbytes = self.large_bytes - 3
        data, offset = pattern(99, nbytes), endpoints.take(nbytes)
        source, target = Memory(data), Memory(nbytes)
        await link.write([source.copy(offset)])
        _compare("write", [nbytes], data, endpoints.look(offset, nbytes))
        await link.read([target.copy(offset)])
        _compare("read", [nbytes], data, target.data())
        check(target.is_intact(), "read: bytes beside the destination changed")

    @over_a_link()
    async def test_bytes_of_every_kind_arrive(self, ends: Ends) -> None:
        """Those that can be compressed and those that cannot, in one batch and each alone."""
        endpoints, _, link = ends
        for nbytes in _KINDS_BYTES:
            made = kinds(nbytes)
            sources = {what: Memory(data) for what, data in made.items()}
            writes = [one.copy(endpoints.take(nbytes)) for one in sources.values()]
            batches = [writes, *([copy] for copy in writes)] if nbytes < _BATCHED else [writes]
            for batch in batches:
                for copy in batch:
                    endpoints.put(copy.offset, b"\xee" * nbytes)
                await link.write(batch)
            targets = [Memory(nbytes) for _ in writes]
            await link.read([t.copy(c.offset) for t, c in zip(targets, writes, strict=True)])
            for (what, data), copy, target in zip(made.items(), writes, targets, strict=True):
                found = endpoints.look(copy.offset, nbytes)
                check(found == data, f"write of {nbytes} bytes, {what}: other bytes")
                check(target.data() == data, f"read of {nbytes} bytes, {what}: other bytes")

    def test_offsets_beyond_4_gib_arrive(self) -> None:
        """In a segment that is so large, whose memory has no pages elsewhere. They do not fit into
        32 bits.
        """
        place = PLACES[0] if self.anywhere().root is not None else PLACES[1]
        if type(self).endpoints is not TransportKit.endpoints:
            pytest.skip("its volumes are its own (endpoints is overridden)")
        vast = type(self)()
        vast.segment_bytes = _VAST  # type: ignore[misc]
        starts = [_4_GIB - _TURN // 2, _4_GIB + 4097, _VAST - _TURN]
        endpoints = vast.endpoints(place)
        try:

            async def work(session: Session, link: Link) -> None:
                source, target = Memory(pattern(63, _TURN)), Memory(_TURN)
                await link.write([source.copy(4097)])
                if await session.registered():
                    pytest.skip("it registers all memory up to there, which makes pages of it")
                for start in starts:
                    low = start % _4_GIB
                    endpoints.put(low, bytes(_TURN))
                    await link.write([source.copy(start)])
                    right = endpoints.look(start, _TURN) == source.data()
                    check(right, f"write: other bytes are at {start}")
                    if low < start:
                        clean = endpoints.look(low, _TURN) == bytes(_TURN)
                        check(clean, f"a write to {start} has also written to {low}")
                    await link.read([target.copy(start)])
                    check(target.data() == source.data(), f"read: other bytes came from {start}")

            self.with_link(endpoints, work)
        finally:
            endpoints.close()

    @over_a_link()
    async def test_every_segment_is_reached(self, ends: Ends) -> None:
        """Copies of one batch go to both segments in turn, although they are neighbours otherwise:
        first to places at the beginning, then to the ends, which nobody has needed before.
        """
        endpoints, _, link = ends
        if len(endpoints.segments) == 1:
            pytest.skip("its volume has one segment")
        sizes = [len(segment) for segment in endpoints.segments]
        for seed, starts in ((61, [4097, 4097]), (62, [size - 4 * _TURN for size in sizes])):
            data = pattern(seed, 4 * _TURN)
            source, target = Memory(data), Memory(len(data))
            expected = [bytearray(b"\xee" * len(data)) for _ in sizes]
            copies = []
            for turn, at in enumerate(range(0, len(data), _TURN)):
                number = turn % 2
                copies.append(Copy(source.address + at, number, starts[number] + at, _TURN))
                expected[number][at : at + _TURN] = data[at : at + _TURN]
            for number, start in enumerate(starts):
                endpoints.put(start, b"\xee" * len(data), number)
            await link.write(copies)
            for number, start in enumerate(starts):
                found = endpoints.look(start, len(data), number)
                right = found == expected[number]
                check(right, f"write: other bytes are at {start} of segment {number}")
            moved = target.address - source.address
            await link.read([msgspec.structs.replace(c, address=c.address + moved) for c in copies])
            check(target.data() == data, f"read: other bytes came from {starts} of both")

    @over_a_link()
    async def test_volumes_of_one_process_do_not_mix(self, ends: Ends) -> None:
        """One client has links to both. What it writes is in the volume that it is for, and when it
        has left one of them, or that one is closed, it has the other one as before.
        """
        endpoints, session, early = ends
        offset = endpoints.take(_BESIDE)
        async with endpoints.another() as (beside, memory):
            beside.peer = session.peer
            other, late = await beside.connect(), await session.connect()
            for seed, link in enumerate((early, late)):
                ours, theirs = Memory(pattern(seed, _BESIDE)), Memory(pattern(9, _BESIDE))
                endpoints.put(offset, bytes(_BESIDE))
                memory[offset : offset + _BESIDE] = bytes(_BESIDE)
                await asyncio.gather(
                    link.write([ours.copy(offset)]), other.write([theirs.copy(offset)])
                )
                right = endpoints.look(offset, _BESIDE) == ours.data()
                check(right, "a write to one of two volumes is not there")
                right = memory[offset : offset + _BESIDE] == theirs.data()
                check(right, "a write to the other one of two volumes is not there")
                for mine, volume in ((ours, link), (theirs, other)):
                    target = Memory(_BESIDE)
                    await volume.read([target.copy(offset)])
                    check(target.data() == mine.data(), "a read is of the other volume")
            other.close()
            await beside.disconnect()
            for seed, when in ((3, "the client has left the other one"), (4, "that is closed")):
                ours = Memory(pattern(seed, _BESIDE))
                await late.write([ours.copy(offset)])
                right = endpoints.look(offset, _BESIDE) == ours.data()
                check(right, f"what is written to one of two volumes when {when} is not there")
                await beside.close_volume()

    def test_a_batch_of_many_pieces_arrives(self) -> None:
        """10,000 pieces: most have up to some hundred bytes, a few are large."""
        endpoints = self.anywhere()
        shuffled = random.Random(7)  # noqa: S311
        sizes = [shuffled.choice((0, 1, 5, 64, 100, 333)) for _ in range(_PIECES)]
        for at in range(0, _PIECES, 2500):
            sizes[at] = 70_001
        self.with_link(endpoints, lambda _, link: round_trip(endpoints, link, sizes, 2))

    @over_a_link()
    async def test_rows_arrive(self, ends: Ends) -> None:
        """Copies of several rows arrive, with gaps at one end, at both ends, and at neither."""
        endpoints, _, link = ends
        if not self.spec().in_band and not self.link_class().rows:
            pytest.skip("it takes no copies of several rows (Link.rows is False)")
        shapes = [(1, 1, 0, 0), (3, 5, 2, 0), (7, 64, 0, 9), (100, 33, 31, 7), (50, 4096, 100, 4)]
        shapes += [(4, 100_000, 0, 0), (1000, 8, 8, 24), (2, 0, 3, 3), (0, 10, 0, 0)]
        await _rows_round_trip(endpoints, link, shapes)

    @over_a_link()
    async def test_memory_of_devices_arrives(self, ends: Ends) -> None:
        """Copies between the segment and each type of device that the link declares arrive."""
        endpoints, _, link = ends
        devices = () if self.spec().in_band else tuple(sorted(self.link_class().devices))
        if not devices:
            pytest.skip("it reaches no memory of devices (Link.devices is empty)")
        import torch

        present = [name for name in devices if getattr(torch, name).is_available()]
        if not present:
            pytest.skip(f"this host has no device of {', '.join(devices)}")
        data = pattern(5, 100_001)
        offset = endpoints.take(len(data))
        for name in present:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(name)
            target = torch.zeros_like(source)
            device = str(source.device)
            place = (0, offset, len(data), 1, 0, 0, device)
            endpoints.put(offset, bytes(len(data)))
            await link.write([Copy(source.data_ptr(), *place)])
            check(endpoints.look(offset, len(data)) == data, f"write from {device}: changed")
            await link.read([Copy(target.data_ptr(), *place)])
            check(torch.equal(source, target), f"read to {device}: changed")

    @over_a_link()
    async def test_transfers_at_the_same_time_do_not_mix(self, ends: Ends) -> None:
        """A dozen round trips run concurrently on one link."""
        endpoints, _, link = ends
        await asyncio.gather(*(_several(endpoints, link, seed) for seed in range(_AT_ONCE)))

    def test_two_event_loops_in_two_threads(self) -> None:
        """One client uses two loops, with one link, or two links if they are bound to loops."""
        endpoints = self.anywhere()
        bound = self.spec().loop_bound

        async def main() -> None:
            async with endpoints.session() as session:
                link = await session.connect()

                async def elsewhere() -> None:
                    own = await session.connect() if bound else link
                    try:
                        for seed in range(4):
                            await _several(endpoints, own, 200 + seed)
                    finally:
                        if bound:
                            own.close()
                        await session.leave_loop()

                other = asyncio.ensure_future(asyncio.to_thread(run, elsewhere()))
                for seed in range(4):
                    await _several(endpoints, link, 100 + seed)
                await other

        run(main())

    def test_two_client_processes(self) -> None:
        """Both write at the same time; then each reads what the other has written."""
        endpoints = self.at("process")
        clients: list[Client] = []
        try:
            clients = [Client(endpoints.reach, environment=self.environment) for _ in range(2)]
            offsets = [endpoints.take(3 << 20) for _ in clients]
            for what, order in (("write", (0, 1)), ("read", (1, 0))):
                for client, at in zip(clients, order, strict=True):
                    client.tell(Errand(what, at, offsets[at], (2 << 20) + at))
                for client in clients:
                    answer = client.answer()
                    check(answer == "ok", f"{what} in another process: {answer}")
            for at, offset in enumerate(offsets):
                found = endpoints.look(offset, (2 << 20) + at)
                check(found == pattern(at, (2 << 20) + at), "another process wrote other bytes")
        finally:
            for client in clients:
                client.close()

    def test_two_network_namespaces(self) -> None:
        """The volume and the client are in network namespaces that are joined only by a cable.

        The processes in each namespace find one of its two addresses in ``TORCHSTORE_BIND``, and
        listen only there, or at the loopback.
        """
        crosses, why = self.crosses_hosts, "crosses_hosts is False"
        if crosses is None:
            here = self.anywhere().session().context
            volume = msgspec.structs.replace(here.volume, host_id="another")
            bid = self.spec().bid(msgspec.structs.replace(here, volume=volume, same_host=False))
            crosses, why = isinstance(bid, Bid), bid.reason
        if not crosses:
            pytest.skip(f"it does not cross hosts: {why}")
        with two_networks(second=not self.chooses_address) as (one, other):
            hosts = [
                {**self.environment, "TORCHSTORE_HOST_ID": n.name, "TORCHSTORE_BIND": n.address}
                for n in (one, other)
            ]
            volume_there = Endpoints(
                self.plugin(),
                hosting=self.hosting,
                wrapper=one.wrapper,
                environment=hosts[0],
                same_host=False,
                nbytes=self.segment_bytes,
            )
            client: Client | None = None
            try:
                check(not volume_there.refusal, f"not served there: {volume_there.refusal}")
                client = Client(volume_there.reach, other.wrapper, hosts[1])
                for what in ("write", "read"):
                    client.tell(Errand(what, 3, 4097, 5_000_001))
                    answer = client.answer()
                    listening = leftovers.listening(volume_there.processes())
                    places = {leftovers.readable(address) for address, _ in listening}
                    wrong = sorted(place for place in places if not _may_listen(place, one))
                    check(not wrong, f"it listens at {wrong}, not only at {one.address}")
                    check(answer == "ok", f"{what} from another host: {answer}")
                found = volume_there.look(4097, 5_000_001)
                check(found == pattern(3, 5_000_001), "the other host wrote other bytes")
            finally:
                if client is not None:
                    client.close()
                volume_there.close()


async def _several(endpoints: Endpoints, link: Link, seed: int) -> None:
    await round_trip(endpoints, link, [100_000 + seed, 3, 8192, 50_001], seed)


async def _rows_round_trip(
    endpoints: Endpoints, link: Link, shapes: Sequence[tuple[int, int, int, int]]
) -> None:
    """Move a batch of copies. A shape is: rows, bytes per row, gaps between rows here and there."""
    writes, reads, later = [], [], []
    for at, (rows, nbytes, here, there) in enumerate(shapes):
        stride, step = nbytes + here, nbytes + there
        local = pattern(at, rows * stride)
        source, target = Memory(local), Memory(b"\xcc" * len(local))
        offset = endpoints.take(rows * step)
        endpoints.put(offset, b"\xee" * (rows * step))
        copy = Copy(source.address, 0, offset, nbytes, rows, stride, step)
        writes.append(copy)
        reads.append(msgspec.structs.replace(copy, address=target.address))
        later.append((local, source, target, copy))
    await link.write(writes)
    await link.read(reads)
    for local, source, target, copy in later:
        named = f"{copy.rows} rows of {copy.nbytes} bytes at {copy.stride} here, {copy.step} there"
        expected, back = bytearray(), bytearray()
        for row in range(copy.rows):
            data = local[row * copy.stride :][: copy.nbytes]
            expected += data + b"\xee" * (copy.step - copy.nbytes)
            back += data + b"\xcc" * (copy.stride - copy.nbytes)
        found = endpoints.look(copy.offset, len(expected))
        check(found == expected, f"write: {named}: other bytes are in the segment")
        check(target.data() == back and target.is_intact(), f"read: {named}: other bytes came")
        check(source.data() == local, f"write: {named}: changed its source")


def _may_listen(address: str, host: Namespace) -> bool:
    return address == host.address or ipaddress.ip_address(address).is_loopback
