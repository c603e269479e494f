"""The user's word for a job: which transport carries the values, and where that is said."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.support import running_store

import torchstore_core as ts

_LARGE = 300_000


@pytest.mark.parametrize("strategy", ["singleton", ts.SingletonStrategy(transport="shm")])
async def test_a_job_chooses_its_transport(
    strategy: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the bids and the strategy say. It is said once, when it is used first, and by
    ``explain``.
    """
    monkeypatch.setenv("TORCHSTORE_TRANSPORT", "tcp")
    caplog.set_level(logging.INFO, "torchstore_core")
    async with running_store(strategy=strategy) as client:
        await client.put("large", torch.arange(_LARGE))
        await client.put("small", torch.arange(3))
        assert torch.equal(await client.get("large"), torch.arange(_LARGE))
        assert torch.equal(await client.get("small"), torch.arange(3))
        (large,) = await client.explain(1 << 30)
        assert large["chosen"] == large["forced"] == "tcp"
        assert large["summary"].startswith("tcp (TORCHSTORE_TRANSPORT forces it); then ")
        assert "\n" not in large["summary"]
        (small,) = await client.explain(100)
        assert small["chosen"] == "inline"
        assert "forces" not in small["summary"]  # it rides in the message that is sent anyway
    said = [one.getMessage() for one in caplog.records]
    said = [line for line in said if line.endswith("TORCHSTORE_TRANSPORT chooses")]
    assert said == [f"volume torchstore-0: {large['summary']}"]


async def test_a_choice_that_does_not_reach_the_volume_is_not_said_to_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fits into a control message is carried nevertheless, and it is said by what, and why."""
    monkeypatch.setenv("TORCHSTORE_TRANSPORT", "inprocess")
    async with running_store() as client:
        await client.put("small", torch.arange(3))
        (small,) = await client.explain(100)
    assert (small["chosen"], small["forced"]) == ("inline", "inprocess")
    assert small["summary"] == (
        "inline (rides in the control message that is sent anyway; inprocess, which "
        "TORCHSTORE_TRANSPORT forces, does not reach it: the volume is in another process); then "
        "nothing else; TORCHSTORE_TRANSPORT chooses"
    )


async def test_a_preferred_transport_that_is_not_used_is_named_with_the_reason() -> None:
    """A bid that refuses and a link that has failed look alike, if only what carries is named."""
    async with running_store(prefer=["inprocess", "tcp"]) as client:
        (large,) = await client.explain(1 << 30)
    assert large["chosen"] == "tcp"
    why = "inprocess, which is preferred, is not used: the volume is in another process"
    assert large["summary"].startswith(f"tcp (it is preferred; {why}); then ")
