"""Which objects have which parts of a spill space, against a list that says it page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.server.spilling.objects.layout import Layout, ObjectName

PAGES = 24
_run = st.tuples(st.integers(0, PAGES - 1), st.integers(1, 8)).map(
    lambda run: (run[0], min(run[1], PAGES - run[0]))
)
_step = st.one_of(
    st.tuples(st.just("write"), _run.map(lambda run: [run])),
    st.tuples(st.just("free"), st.lists(_run, max_size=3)),
    st.tuples(st.just("keep"), st.lists(_run, max_size=3)),
)


@given(st.lists(_step, max_size=30), _run)
def test_what_was_written_last_is_found_and_what_nobody_uses_is_told_once(
    steps: list[tuple[str, list[tuple[int, int]]]], wanted: tuple[int, int]
) -> None:
    layout = Layout()
    pages: list[tuple[ObjectName, int] | None] = [None] * PAGES
    for number, (what, runs) in enumerate(steps):
        before = {page[0] for page in pages if page}
        touched = {at for start, count in runs for at in range(start, start + count)}
        if what == "write":
            [(start, count)] = runs
            name = ObjectName(1, number, start, count)
            unused = layout.write(name)
            for at in touched:
                pages[at] = name, at - start
        else:
            unused = layout.free(runs) if what == "free" else layout.keep_only(runs)
            for at in range(PAGES):
                if (at in touched) == (what == "free"):
                    pages[at] = None
        left = {page[0] for page in pages if page}
        assert sorted(unused) == sorted(before - left)
        assert sorted(layout.names) == sorted(left)
    start, count = wanted
    found: list[tuple[ObjectName, int] | None] = [None] * count
    for part in layout.find([wanted]):
        for at in range(part.nbytes):
            found[part.to + at] = part.name, part.at + at
    assert found == pages[start : start + count]


def test_several_runs_follow_one_another() -> None:
    layout = Layout()
    first, second = ObjectName(1, 0, 8, 4), ObjectName(1, 1, 0, 4)
    layout.write(first)
    layout.write(second)
    parts = layout.find([(9, 2), (0, 4)])
    assert [(one.name, one.at, one.nbytes, one.to) for one in parts] == [
        (first, 1, 2, 0),
        (second, 0, 4, 2),
    ]
