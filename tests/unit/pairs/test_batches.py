"""Both ends of a pair cut a batch into the same messages, wherever their memory lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchstore_transports.pairs.batches import MESSAGE_MAX, groups, messages

_SIZES = st.lists(st.one_of(st.integers(0, 3000), st.integers(200_000, 20 << 20)), max_size=40)


@given(_SIZES, st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_both_ends_cut_alike_and_every_byte_is_in_one_message(
    sizes: list[int], gaps: list[int]
) -> None:
    here, there, position = [], [], 0
    for size, gap in zip(sizes, gaps, strict=False):
        here.append((position, size))
        there.append((sum(there[-1]) if there else 7, size))
        position += size + gap
    mine, other = list(messages(here)), list(messages(there))
    assert [message.nbytes for message in mine] == [message.nbytes for message in other]
    assert [len(group) for group in groups(mine)] == [len(group) for group in groups(other)]
    for runs, cut in ((here, mine), (there, other)):
        assert all(0 < message.nbytes <= MESSAGE_MAX for message in cut)
        assert all(sum(run[1] for run in one.runs) == one.nbytes for one in cut)
        pieces = [run for message in cut for run in message.runs]
        assert _joined(pieces) == _joined(runs)


def _joined(runs: list[tuple[int, int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for position, nbytes in runs:
        if found and sum(found[-1]) == position:
            found[-1][1] += nbytes
        elif nbytes:
            found.append([position, nbytes])
    return found
