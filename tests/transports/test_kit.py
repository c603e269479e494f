"""The public conformance kit finds what is wrong with a transport, by the test that is for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transports import broken, broken_halves

from torchstore_core.testing import TransportTests

SIZES = "test_every_size_arrives"
RANGE = "test_what_is_out_of_range_is_refused"
LEAKS = "test_links_leave_nothing_behind"
BIDS = "test_its_bids_make_sense"
PURE = "test_its_bids_are_pure_and_quick"
CLOSED = "test_a_closed_link_refuses"
CLOSE = "test_close_is_quick_and_may_come_twice"
OFFERS = "test_a_garbage_offer_is_refused"
HANDSHAKES = "test_garbage_handshakes_are_refused"
CANCELLED = "test_after_a_cancelled_write_no_byte_moves"
READING = "test_after_a_cancelled_read_no_byte_moves"
SOON = "test_a_cancelled_transfer_ends_within_a_second"
STOPPED = "test_a_stopped_half_holds_nobody_up"
HALF_CLOSED = "test_a_closed_server_half_refuses"


def kit(entry: str) -> TransportTests:
    """The kit for one broken transport; a class of its own, since volumes are shared by class."""

    class Kit(TransportTests):
        name = "broken"
        light_halves = True
        gone_within = 0.5

    Kit.entry = entry
    return Kit()


def client(name: str) -> str:
    return f"{broken.__name__}:plugin_{name}"


def server(name: str) -> str:
    return f"{broken_halves.__name__}:plugin_{name}"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    broken.clean()


@pytest.mark.parametrize(
    ("entry", "test", "says"),
    [
        (client("Short"), SIZES, "write: 1 bytes are wrong"),
        (client("Long"), SIZES, "read: .* bytes are wrong|beside the destination"),
        (client("Clearing"), SIZES, "write changed its source"),
        (client("Swapping"), "test_a_batch_of_many_pieces_arrives", "write: .* bytes are wrong"),
        (client("Few"), "test_a_batch_of_many_pieces_arrives", "write: .* bytes are wrong"),
        (client("Capped"), "test_a_large_transfer_arrives", "write: .* bytes are wrong"),
        (client("Strideless"), "test_rows_arrive", "write: 3 rows of 5 bytes at 7 here, 5 there"),
        (client("Busy"), "test_transfers_at_the_same_time_do_not_mix", "bytes are wrong"),
        (
            client("Shared"),
            "test_a_mapping_is_private_and_outlives_its_link",
            "changed the segment",
        ),
        (client("MovesOn"), CANCELLED, "bytes were written after a write had been cancelled"),
        (client("MovesOn"), READING, "bytes came after a read had been cancelled"),
        (server("SettledLink"), CANCELLED, "bytes were written after"),
        (server("Late"), CANCELLED, "bytes were written after"),
        (server("Later"), "test_a_killed_client_writes_no_more", "of a dead client came after"),
        (client("Patient"), SOON, "ended after 1.. s, not within a second"),
        (client("Polite"), STOPPED, "ended after .* s, not within a second"),
        (client("Plain"), "test_a_killed_half_is_noticed", "ConnectionResetError.*no TransportErr"),
        (client("Trusting"), RANGE, "the byte after the segment was accepted"),
        (client("Unsigned"), RANGE, "write of an offset that overflows 64 bits (was|raised)"),
        (client("Untyped"), RANGE, "ValueError.*no TransportError"),
        (client("Boasting"), "test_what_has_arrived_is_told_honestly", "is 8, and the copy at 5"),
        (client("Undecided"), OFFERS, "raised (ValueError|UnicodeDecodeError).*no TransportError"),
        (server("Silent"), OFFERS, "took more than 5 s"),
        (server("Waiting"), HANDSHAKES, "took more than 5 s"),
        (server("Accepting"), HANDSHAKES, "a garbage handshake was accepted"),
        (server("Confused"), HANDSHAKES, "after garbage handshakes"),
        (server("Pickled"), "test_handshakes_carry_no_pickles", "the offer is a pickle"),
        (server("Pickled"), "test_its_halves_import_no_unpickler", "broken_halves imports pickle"),
        (client("Open"), CLOSED, "a write after close.* was accepted"),
        (client("Abrupt"), CLOSED, "OSError.*no TransportError"),
        (client("Once"), CLOSE, "it is closed already"),
        (client("Slow"), CLOSE, "took 0.[4-9]. s: it must not block"),
        (server("Endless"), HALF_CLOSED, "close.* of the server half took more than 5 s"),
        (server("Undying"), HALF_CLOSED, "connect after close.* was accepted"),
        (client("Descriptors"), LEAKS, "descriptors of this process"),
        (
            client("Hasty"),
            "test_a_cancelled_connect_leaves_nothing_behind",
            "16 cancelled connects left .*descriptors of this process",
        ),
        (client("Threads"), LEAKS, "threads of this process"),
        (client("Mappings"), LEAKS, "mapped files of this process"),
        (client("Children"), LEAKS, "child processes"),
        (server("Hoarding"), LEAKS, "descriptors of the server half"),
        (server("Keeping"), "test_nothing_is_registered_after_the_last_client", "is 268435456 aft"),
        (server("Anew"), "test_a_client_may_begin_anew_after_disconnect", "that client has left"),
        (server("Local"), "test_two_network_namespaces", "write from another host: .*nobody is"),
        (server("Refusing"), SIZES, "does not serve in another process: .*a day like this"),
        (f"{broken.__name__}:heavy", "test_its_hook_module_is_light", "it imports torch"),
        (client("OneLoop"), "test_two_event_loops_in_two_threads", "different loop|attached"),
        *((f"{broken.__name__}:bid_{name}", BIDS, "for a volume") for name in ("nan", "negative")),
        *((f"{broken.__name__}:bid_{name}", BIDS, "for a volume") for name in ("infinite", "none")),
        (f"{broken.__name__}:bid_nothing", BIDS, "a rate of 0.0"),
        (f"{broken.__name__}:bid_silent", BIDS, "a bid without a reason"),
        (f"{broken.__name__}:bid_wordless", BIDS, "a refusal without a reason"),
        (f"{broken.__name__}:bid_moody", PURE, "and then Bid"),
        (f"{broken.__name__}:bid_slow", PURE, "a bid takes .* ms"),
    ],
)
def test_what_is_wrong_is_found(entry: str, test: str, says: str) -> None:
    made = kit(entry)
    arguments = ("process",) if test == SIZES else ()
    try:
        # Whatever a transport raises fails the test, too; only a skip does not.
        with pytest.raises((pytest.fail.Exception, Exception), match=f"(?s){says}"):
            getattr(made, test)(*arguments)
    finally:
        made.teardown_class()


class TestSimple(TransportTests):
    """What the broken ones are without their faults."""

    name = "broken"
    entry = client("SimpleLink")
    light_halves = True


class TestPosting(TransportTests):
    """The same, two-sided."""

    name = "broken"
    entry = server("Posting")
    light_halves = True


# It unpickles on purpose, in another class of its module.
TestPosting.test_its_halves_import_no_unpickler = None  # type: ignore[assignment]
