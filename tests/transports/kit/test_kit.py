"""The public conformance kit finds what is wrong with a transport, by the test that is for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support import turn
from tests.transports.kit.broken.ending import clean

from torchstore_core.errors import TransportError
from torchstore_core.testing import TransportTests
from torchstore_core.testing.transports.stopping import _cancelled

BROKEN = "tests.transports.kit.broken"
SIZES = "test_every_size_arrives"
RANGE = "test_what_is_out_of_range_is_refused"
LEAKS = "test_links_leave_nothing_behind"
SEGMENTS = "test_every_segment_is_reached"
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
OTHERS = "test_a_stopped_client_holds_nobody_up"
DEADLINE = "test_a_deadline_ends_what_a_stopped_half_does_not"
PROGRESS = "test_progress_tells_that_bytes_have_moved"
FAILED = "test_failed_transfers_leave_nothing_behind"
ALONE = "test_the_end_of_a_link_is_nobody_elses"
AFTERWARDS = "test_after_a_failed_transfer_no_byte_moves"
STALE = "test_a_disconnected_client_begins_anew_or_is_refused"
VOLUMES = "test_volumes_of_one_process_do_not_mix"
REGISTERED = "test_registered_memory_is_that_of_now"
DEVICES = "test_memory_of_devices_arrives"
KILLED = "test_a_killed_half_is_noticed"
UNLISTENED = "test_nobody_listens_without_clients"
STRANGERS = "test_strangers_hold_nobody_up"
HALF_CLOSED = "test_a_closed_server_half_refuses"


def kit(entry: str) -> TransportTests:
    """The kit for one broken transport; a class of its own, since volumes are shared by class."""

    class Kit(TransportTests):
        name = "broken"
        light_halves = True
        gone_within = 0.5

    Kit.entry = entry
    return Kit()


def moving(name: str) -> str:
    return f"{BROKEN}.moving:plugin_{name}"


def ending(name: str) -> str:
    return f"{BROKEN}.ending:plugin_{name}"


def half(name: str) -> str:
    return f"{BROKEN}.halves:plugin_{name}"


def telling(name: str) -> str:
    return f"{BROKEN}.telling:plugin_{name}"


def lasting(name: str) -> str:
    return f"{BROKEN}.lasting:plugin_{name}"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    clean()


@pytest.mark.parametrize(
    ("entry", "test", "says"),
    [
        (moving("Short"), SIZES, "write: 1 bytes are wrong"),
        (moving("Long"), SIZES, "read: .* bytes are wrong|beside the destination"),
        (moving("Clearing"), SIZES, "write changed its source"),
        (moving("Absolute"), "test_a_negative_size_moves_nothing", "write of -1 bytes changed"),
        (moving("Deviceless"), DEVICES, "write from cpu: changed"),
        (moving("Swapping"), "test_a_batch_of_many_pieces_arrives", "write: .* bytes are wrong"),
        (moving("Narrow"), "test_offsets_beyond_4_gib_arrive", "write: other bytes are at 4294"),
        (moving("Thrifty"), "test_bytes_of_every_kind_arrive", "bytes, zeros: other bytes"),
        (moving("Few"), "test_a_batch_of_many_pieces_arrives", "write: .* bytes are wrong"),
        (moving("Capped"), "test_a_large_transfer_arrives", "write: .* bytes are wrong"),
        (moving("First"), SEGMENTS, "write: other bytes are at 4097 of segment 0"),
        (moving("Grown"), SEGMENTS, "write: other bytes are at 268.* of segment 0"),
        (moving("Strideless"), "test_rows_arrive", "write: 3 rows of 5 bytes at 7 here, 5 there"),
        (moving("Busy"), "test_transfers_at_the_same_time_do_not_mix", "bytes are wrong"),
        (
            moving("Shared"),
            "test_a_mapping_is_private_and_outlives_its_link",
            "changed the segment",
        ),
        (moving("Blind"), "test_a_window_shows_the_segment", "the segment has other bytes"),
        (
            moving("Stale"),
            REGISTERED,
            "write, again: other bytes",
        ),
        (half("Single"), "test_two_client_processes", "write in another process: .*somebody else"),
        (half("Common"), VOLUMES, "a write to one of two volumes is not there"),
        (moving("MovesOn"), CANCELLED, "bytes were written after a write had been cancelled"),
        (moving("MovesOn"), READING, "bytes came after a read had been cancelled"),
        (moving("Lingering"), AFTERWARDS, "moved after a write with a copy out of range had fail"),
        (moving("Lingering"), KILLED, "bytes came after a write to a killed half had failed"),
        (moving("Opening"), STALE, "a read over a link of a client that .* ended with None"),
        (half("Settled"), CANCELLED, "bytes were written after"),
        (half("Later"), CANCELLED, "bytes were written after"),
        (half("Later"), "test_a_killed_client_writes_no_more", "of a dead client came after"),
        (moving("Patient"), SOON, "ended after .* s, not within a second"),
        (
            ending("Apart"),
            "test_an_isolated_half_that_was_killed_is_made_anew",
            "that half is dead",
        ),
        (moving("Polite"), STOPPED, "ended after .* s, not within a second"),
        (half("Queueing"), OTHERS, "a write took more than 3 s while other clients"),
        (moving("Deaf"), DEADLINE, "deadline has passed returned as if it had not been cancelled"),
        (moving("Belated"), DEADLINE, "12582912 bytes were moved after a write had ended"),
        (moving("Plain"), KILLED, "ConnectionResetError.*no TransportErr"),
        (ending("Trusting"), RANGE, "the byte after the segment was accepted"),
        (ending("Unsigned"), RANGE, "write of an offset that overflows 64 bits (was|raised)"),
        (ending("Untyped"), RANGE, "ValueError.*no TransportError"),
        (ending("Boasting"), "test_what_has_arrived_is_told_honestly", "is 8, and the copy at 5"),
        (half("Boasting"), KILLED, "is 12, and not all of these copies are there"),
        (ending("Undecided"), OFFERS, "raised (ValueError|UnicodeDecodeError).*no TransportError"),
        (ending("Silent"), OFFERS, "took more than 5 s"),
        (half("Waiting"), HANDSHAKES, "took more than 5 s"),
        (half("Accepting"), HANDSHAKES, "a garbage handshake was accepted"),
        (half("Careless"), HANDSHAKES, "'handshake' raise KeyError, which is no TransportError"),
        (half("Confused"), HANDSHAKES, "after garbage handshakes"),
        (f"{BROKEN}.pickles:plugin", "test_handshakes_carry_no_pickles", "the offer is a pickle"),
        (
            f"{BROKEN}.pickles:plugin",
            "test_its_halves_import_no_unpickler",
            "pickles imports pickle",
        ),
        (ending("Open"), CLOSED, "a write after close.* was accepted"),
        (ending("Abrupt"), CLOSED, "OSError.*no TransportError"),
        (ending("Once"), CLOSE, "it is closed already"),
        (ending("Slow"), CLOSE, "took 0.[4-9]. s: it must not block"),
        pytest.param(
            half("Endless"),
            HALF_CLOSED,
            "close.* of the server half took more than 2.5 s",
            marks=pytest.mark.soak,  # the half holds its process up for 30 s
        ),
        (half("Undying"), HALF_CLOSED, "connect after close.* was accepted"),
        (ending("Descriptors"), LEAKS, "descriptors of this process"),
        (
            ending("Hasty"),
            "test_a_cancelled_connect_leaves_nothing_behind",
            "16 cancelled connects left .*descriptors of this process",
        ),
        (
            ending("Remembered"),
            "test_a_link_that_is_dropped_leaves_nothing_behind",
            "8 dropped links and loops left this behind: descriptors",
        ),
        (ending("Limited"), "test_more_than_max_bytes_is_not_asked_for", "that is too much"),
        (ending("Threads"), LEAKS, "threads of this process"),
        (ending("Mappings"), LEAKS, "mapped files of this process"),
        (ending("Children"), LEAKS, "child processes"),
        (ending("Failing"), FAILED, "failed transfers left this behind: desc.* of this process"),
        (half("Complaining"), FAILED, "failed transfers left this behind: desc.*the server half"),
        (
            ending("Leaving"),
            "test_cancelled_transfers_leave_nothing_behind",
            "cancelled transfers left this behind: descriptors of this process",
        ),
        (ending("Together"), ALONE, "a write .*another link was closed"),
        (half("Forgetful"), ALONE, "a write .*you are not known"),
        (half("Courteous"), STRANGERS, "took more than 5 s"),
        (half("Hospitable"), STRANGERS, "strangers left this behind: desc.* of the server half"),
        (half("Persistent"), UNLISTENED, "its last client has left"),
        (half("Elsewhere"), "test_two_network_namespaces", "listens at .*, not only at 10"),
        (
            half("Everywhere"),
            "test_two_network_namespaces",
            r"listens at .*0\.0\.0\.0.*, not only at 10",
        ),
        (f"{BROKEN}.heavy:plugin", "test_its_server_half_needs_no_torch", "imports torch, and"),
        (telling("Raising"), PROGRESS, "progress.. raised ValueError"),
        (telling("Wordy"), PROGRESS, "'much', which is no integer"),
        (telling("Pausing"), PROGRESS, "progress.. took .* ms: it must not block"),
        (telling("Restless"), PROGRESS, "does not stay the same although nothing moves"),
        (telling("Still"), PROGRESS, "progress.. is 0 before a write of 8 MiB, and after it"),
        (
            half("Counting"),
            "test_killed_clients_leave_nothing_behind",
            "8 killed clients left this behind: descriptors of the server half",
        ),
        (half("Hoarding"), LEAKS, "descriptors of the server half"),
        (
            lasting("Keeper"),
            "test_memory_does_not_grow_with_transfers",
            "MiB in this process, each",
        ),
        (lasting("Filling"), "test_it_makes_no_pages", "has made [0-9]+ MiB of pages"),
        (lasting("Recording"), "test_memory_does_not_grow_with_handshakes", "in the server half"),
        (lasting("Mourning"), "test_memory_does_not_grow_with_clients", "MiB in the server half"),
        (
            lasting("Caching"),
            "test_a_read_is_of_what_is_there_now",
            "did not see what the owner of the memory had written",
        ),
        (lasting("Blocking"), "test_the_event_loop_goes_on", "a write of 64 MiB took .* not block"),
        (half("Keeping"), "test_nothing_is_registered_after_the_last_client", "is 268435456 aft"),
        (half("Anew"), "test_a_client_may_begin_anew_after_disconnect", "that client has left"),
        (half("Local"), "test_two_network_namespaces", "write from another host: .*nobody is"),
        (half("Refusing"), SIZES, "does not serve in another process: .*a day like this"),
        (
            f"{BROKEN}.bids:plugin_halfless",
            "test_its_name_leads_to_its_halves",
            "client half .*Simple' is no Link",
        ),
        (
            f"{BROKEN}.bids:plugin_speechless",
            "test_its_probe_says_in_words_what_is_missing",
            "neither None nor a reason",
        ),
        (f"{BROKEN}.bids:heavy", "test_its_hook_module_is_light", "it imports torch"),
        (moving("OneLoop"), "test_two_event_loops_in_two_threads", "different loop|attached"),
        *((f"{BROKEN}.bids:bid_{name}", BIDS, "for a volume") for name in ("nan", "negative")),
        *((f"{BROKEN}.bids:bid_{name}", BIDS, "for a volume") for name in ("infinite", "none")),
        (f"{BROKEN}.bids:bid_networked", BIDS, "raised ValueError"),
        (f"{BROKEN}.bids:bid_nothing", BIDS, "a rate of 0.0"),
        (f"{BROKEN}.bids:bid_silent", BIDS, "a bid without a reason"),
        (f"{BROKEN}.bids:bid_wordless", BIDS, "a refusal without a reason"),
        (f"{BROKEN}.bids:bid_moody", PURE, "and then Bid"),
        (f"{BROKEN}.bids:bid_slow", PURE, "a bid takes .* ms"),
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
    entry = f"{BROKEN}.simple:plugin_SimpleLink"
    light_halves = True


@pytest.mark.soak  # another two-sided one passes in TestMailbox
class TestPosting(TransportTests):
    """The same, two-sided."""

    name = "broken"
    entry = half("Posting")
    light_halves = True
    large_bytes = 16 << 20


async def test_a_transfer_is_not_late_because_its_loop_stood_still() -> None:
    """As on a busy machine: when it goes on, the transfer still needs some turns to end."""

    async def transfer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(time.sleep, 1.2)
            for _ in range(10):
                await turn()

    await _cancelled(transfer(), 0.0, "write")


def test_bids_are_not_slow_because_the_machine_was_busy_once() -> None:
    made = kit(f"{BROKEN}.bids:bid_slow_once")
    try:
        getattr(made, PURE)()
    finally:
        made.teardown_class()


def test_a_link_with_every_ability_passes() -> None:
    made = kit(telling("Able"))
    try:
        for test in (PROGRESS, REGISTERED, DEVICES):
            getattr(made, test)()
    finally:
        made.teardown_class()


def test_a_half_that_listens_for_its_clients_passes() -> None:
    made = kit(half("Listening"))
    try:
        for test in (STRANGERS, UNLISTENED):
            getattr(made, test)()
    finally:
        made.teardown_class()


@pytest.mark.parametrize(
    ("entry", "test", "says"),
    [
        (
            moving("strideless"),
            "test_a_store_moves_tensors_of_every_kind",
            "every .* came back changed",
        ),
        (
            moving("cut"),
            "test_a_store_moves_parts_of_a_large_tensor",
            "a transposed destination has other values",
        ),
        (ending("limited"), "test_a_store_refuses_what_is_over_max_bytes", "that is too much"),
    ],
)
@pytest.mark.filterwarnings("ignore:transport 'limited'")
def test_what_is_wrong_is_found_in_a_store(
    install: Callable[[dict[str, str]], None], entry: str, test: str, says: str
) -> None:
    made = kit(entry)
    type(made).name = entry.rpartition("_")[2]
    install({made.name: entry})
    with pytest.raises((pytest.fail.Exception, TransportError), match=says):
        getattr(made, test)()
