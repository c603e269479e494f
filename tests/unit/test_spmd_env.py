"""Who a rank is: what the environment says, and what is wrong with it."""

from __future__ import annotations

import pytest

import torchstore_core as ts
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.plugins.registry import Registry
from torchstore_spmd.runtime import default_volumes

GOOD = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_says() -> None:
    env = ts.SPMDEnv.from_environment(GOOD)
    assert env == ts.SPMDEnv(3, 1, 4, 2, "node-0", 29500)
    assert not env.one_host
    assert ts.SPMDEnv(1, 1, 2, 2, "::1", 1).one_host


def test_it_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert ts.SPMDEnv.from_environment().rank == 3


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("text", [None, "", "x"])
def test_each_variable_is_needed(name: str, text: str | None) -> None:
    environment = {k: v for k, v in GOOD.items() if k != name}
    if text is not None:
        environment[name] = text
    if (name, text) == ("MASTER_ADDR", "x"):
        assert ts.SPMDEnv.from_environment(environment).master_addr == "x"
        return
    with pytest.raises(ts.ConfigurationError, match=name):
        ts.SPMDEnv.from_environment(environment)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "4"}, "RANK 4 is not below WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK is at least 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2 is not below LOCAL_WORLD_SIZE 2"),
        ({"RANK": "0"}, "LOCAL_RANK 1 is above RANK 0"),
        ({"LOCAL_WORLD_SIZE": "3"}, "no multiple"),
        ({"LOCAL_WORLD_SIZE": "8"}, "no multiple"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is at least 1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 1 to 65535"),
    ],
)
def test_contradictions(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=words):
        ts.SPMDEnv.from_environment({**GOOD, **changes})


def test_one_error_says_all_that_is_wrong_and_how_to_start() -> None:
    with pytest.raises(ts.ConfigurationError) as caught:
        ts.SPMDEnv.from_environment({"RANK": "x", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"})
    for words in (
        "WORLD_SIZE and MASTER_PORT and MASTER_ADDR not set",
        "RANK is a whole number, not 'x'",
        "LOCAL_RANK 2 is not below LOCAL_WORLD_SIZE 2",
        "torchrun --nproc-per-node",
        "SPMDEnv(",
    ):
        assert words in str(caught.value)
    assert len(caught.value.details["wrong"]) == 3


@pytest.mark.parametrize(
    "arguments", [("0", 0, 1, 1, "a", 1), (0, 0, 1, 1, "", 1), (1, 0, 1, 1, "a", 1)]
)
def test_one_made_by_hand_is_checked_too(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ts.ConfigurationError):
        ts.SPMDEnv(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "volumes"), [("singleton", 1), ("host", 2), ("local-rank", 4), (None, 1)]
)
def test_how_many_volumes_a_strategy_gets(name: str | None, volumes: int) -> None:
    strategy = None if name is None else Registry().strategy(name)()
    assert default_volumes(strategy, ts.SPMDEnv.from_environment(GOOD)) == volumes


def test_a_strategy_of_somebody_else_gets_a_volume_a_rank() -> None:
    class Mine(Strategy, frozen=True, tag="mine"):
        pass

    assert default_volumes(Mine(), ts.SPMDEnv.from_environment(GOOD)) == 4
