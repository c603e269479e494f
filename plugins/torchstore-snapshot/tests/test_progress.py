"""Whoever asks for it hears how far a take, a restore or a check is."""

from __future__ import annotations

import itertools
import os
import pty
import sys
from pathlib import Path

import pytest
import torch

from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.restoring.restore import Verify


def test_a_function_hears_of_every_byte_once(tmp_path: Path) -> None:
    state = StateDict(
        large=torch.ones(5_000_000), rows=torch.ones(300, 300).t(), small=torch.ones(3), n=1
    )
    nbytes = sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
    seen: list[tuple[int, int]] = []

    def hear(done: int, total: int) -> None:
        seen.append((done, total))

    def ended(total: int) -> None:
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert len(seen) > 2
        assert seen[-1] == (total, total)
        seen.clear()

    snapshot = Snapshot.take(tmp_path / "s", {"m": state}, fsync=False, progress=hear)
    ended(nbytes)
    snapshot.restore({"m": state}, progress=hear)
    ended(2 * nbytes)
    snapshot.restore({"m": state}, verify=False, progress=hear)
    ended(nbytes)
    assert snapshot.verify(progress=hear) == {}
    assert seen[-1] == (nbytes, nbytes)


@pytest.mark.parametrize("verify", [True, False, "streaming"])
def test_what_threads_do_last_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Verify
) -> None:
    """So that they end at about the same time; before, they take much at a time."""
    monkeypatch.setenv("TORCHSTORE_COPY_THREADS", "1")  # so that tasks end in order
    state = StateDict(**{str(at): torch.ones(6 << 20) for at in range(4)})
    Snapshot.take(tmp_path / "s", {"m": state}, fsync=False)
    done = [0]
    Snapshot(tmp_path / "s").restore(
        {"m": state}, verify=verify, progress=lambda now, _: done.append(now)
    )
    tasks = [after - before for before, after in itertools.pairwise(done)]
    assert max(tasks) >= 12 << 20
    assert max(tasks[-2:]) <= 4 << 20


def test_a_function_hears_of_a_take_in_the_background(tmp_path: Path) -> None:
    state = {"m": StateDict(large=torch.ones(5_000_000), rows=torch.ones(3000, 300).t(), n=1)}
    nbytes = 20_000_000 + 3_600_000
    seen: list[tuple[int, int]] = []
    pending = Snapshot.async_take(
        tmp_path / "s",
        state,
        fsync=False,
        memory_budget=8 << 20,
        progress=lambda *each: seen.append(each),
    )
    pending.wait(300)
    assert seen[-1] == (nbytes, nbytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("budget", [None, 8 << 20])
def test_a_function_that_raises_ends_the_take(tmp_path: Path, budget: int | None) -> None:
    """In the background, too, where it is called by the thread that hears of all takes."""
    state = {"m": StateDict(w=torch.ones(25_000_000))}

    def fails(done: int, total: int) -> None:
        raise ValueError(f"{done} of {total}")

    with pytest.raises(ValueError, match="of 100000000"):
        Snapshot.take(tmp_path / "s", state, fsync=False, progress=fails)
    assert not (tmp_path / "s").exists()

    def take() -> None:
        Snapshot.async_take(
            tmp_path / "s", state, fsync=False, memory_budget=budget, progress=fails
        ).wait(300)

    with pytest.raises(ValueError, match="of 100000000"):
        take()
    # It may have been committed before it could be given up.
    pending = Snapshot.async_take(tmp_path / "s", state, fsync=False, overwrite=True)
    assert not pending.wait(300).verify()


def _shows(terminal: int, title: str) -> bool:
    """Whether a title is written to a terminal; waits until it is."""
    text = ""
    while title not in text:
        text += os.read(terminal, 1 << 16).decode(errors="replace")  # may end within a character
    return True


def test_bars_appear_on_terminals_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"m": StateDict(a=torch.ones(1000))}
    Snapshot.take(tmp_path / "t", state, fsync=False, progress=True)
    with monkeypatch.context() as without:
        without.setattr(sys, "stderr", None)  # a daemon has none
        Snapshot.take(tmp_path / "w", state, fsync=False, progress=True)
    assert capfd.readouterr() == ("", "")
    ours, its = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    try:
        with os.fdopen(its, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            Snapshot.take(tmp_path / "u", state, fsync=False, progress=True)
            assert _shows(ours, "taking")
            Snapshot.async_take(tmp_path / "v", state, fsync=False, progress=True).wait(300)
            assert _shows(ours, "taking")
            Snapshot(tmp_path / "u").restore(state, progress=True)
            assert _shows(ours, "restoring")
            Snapshot(tmp_path / "u").verify(progress=True)
            assert _shows(ours, "verifying")
            monkeypatch.undo()
    finally:
        os.close(ours)
    assert capfd.readouterr() == ("", "")
