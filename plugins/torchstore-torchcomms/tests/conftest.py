"""Which tests of this package run with the soak tests alone."""

from __future__ import annotations

import pytest

# What these are about is the machinery that gloo's transport has, too, whose tests always run.
_OF_THE_MACHINERY = {
    "test_a_cancelled_read_writes_nothing_afterwards",
    "test_a_cancelled_write_is_settled",
    "test_a_half_that_is_stopped_fails_within_the_time_of_the_pair",
    "test_a_killed_client_leaves_nothing",
    "test_a_pair_is_made_anew_though_the_new_half_starts_slowly",
    "test_a_pair_that_died_unnoticed_is_made_anew",
    "test_a_write_cancelled_while_the_half_is_stopped_is_in_quarantine",
    "test_cancelling_one_call_does_not_disturb_others",
    "test_many_at_the_same_time",
    "test_nothing_is_left_of_pairs_that_were_given_up",
    "test_only_ranges_of_the_segment",
    "test_strides_and_slices",
    "test_the_half_is_killed_in_the_middle",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They run with the soak tests alone: each starts processes with torch."""
    for item in items:
        if "torchcomms" in item.nodeid and item.name in _OF_THE_MACHINERY:
            item.add_marker("soak")
