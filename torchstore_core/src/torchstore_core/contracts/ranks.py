"""The contract of ``initialize_spmd``: a rank's place in the job, and the runtime of all ranks.

Torch-free.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping

import msgspec

from torchstore_core.contracts.runtime import Runtime
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError

__all__ = ["RankRuntime", "SPMDEnv"]

_NUMBERS = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}
_ADDRESS = "MASTER_ADDR"
_HOW = (
    "start the script with `torchrun --nproc-per-node=N script.py`, which sets RANK, LOCAL_RANK, "
    "WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or set them, or give "
    "env=SPMDEnv(...)"
)


class SPMDEnv(msgspec.Struct, frozen=True):
    """A rank's place in the job, as torchrun describes it in the environment.

    Args:
        rank: the rank of this process in the whole job.
        local_rank: the rank of this process on its host.
        world_size: the number of ranks in the whole job.
        local_world_size: the number of ranks on this host; the same on every host.
        master_addr: where the ranks meet: the host name or address of rank 0's host.
        master_port: the TCP port there.

    Raises:
        ConfigurationError: a value is invalid, or values contradict each other; the message lists
            everything that is wrong.

    >>> SPMDEnv(0, 0, 1, 1, "127.0.0.1", 29500).one_host
    True
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    def __post_init__(self) -> None:
        wrong: list[str] = []
        given: dict[str, int] = {}
        for field in _NUMBERS:
            number = getattr(self, field)
            if type(number) is int:
                given[field] = number
            else:
                wrong.append(f"{field} is a whole number, not {number!r}")
        if type(self.master_addr) is not str or not self.master_addr:
            wrong.append(f"master_addr is a host name or an address, not {self.master_addr!r}")
        wrong += _contradictions(given)
        if wrong:
            raise _error(wrong)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SPMDEnv:
        """Return the place that ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``,
        ``MASTER_ADDR`` and ``MASTER_PORT`` describe.

        Args:
            environment: the environment variables; None: ``os.environ``.

        Raises:
            ConfigurationError: variables are missing, not numbers, or contradictory; the message
                lists everything that is wrong.

        >>> SPMDEnv.from_environment({
        ...     "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        ...     "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        ... }).rank
        1
        """
        environment = os.environ if environment is None else environment
        names = [*_NUMBERS.values(), _ADDRESS]
        missing = [name for name in names if not environment.get(name)]
        wrong = [f"{' and '.join(missing)} not set"] if missing else []
        numbers: dict[str, int] = {}
        for field, name in _NUMBERS.items():
            text = environment.get(name, "")
            try:
                if text:
                    numbers[field] = int(text)
            except ValueError:
                wrong.append(f"{name} is a whole number, not {text!r}")
        wrong += _contradictions(numbers)
        if wrong:
            raise _error(wrong)
        return cls(master_addr=environment[_ADDRESS], **numbers)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size


class RankRuntime(Runtime):
    """One rank's part in a store that all ranks of a launcher start together.

    ``initialize_spmd`` creates one from the factory of the runtime ``spmd``. Like the factories of
    all runtimes, it can be called without an argument: the environment then gives the rank's place.

    Args:
        env: this rank's place in the job.
    """

    @abstractmethod
    def __init__(self, env: SPMDEnv | None = None) -> None:
        """Raise ``ConfigurationError`` if ``env`` is None and the environment is not a rank's."""

    @abstractmethod
    def default_volumes(self, strategy: Strategy | None) -> int:
        """Return how many volumes a store of all ranks gets if the caller does not say."""

    @abstractmethod
    async def withdraw(self, store_name: str, error: Exception) -> None:
        """Tell the other ranks that this one will not join because of ``error``, which happened
        before :meth:`start`. Raises nothing, and takes a few seconds at most.
        """


def _contradictions(numbers: dict[str, int]) -> list[str]:
    """Return what is wrong with the numbers that are given, as a list of messages."""
    wrong: list[str] = []
    least_of = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}
    for field, least in least_of.items():
        if numbers.get(field, least) < least:
            wrong.append(f"{_NUMBERS[field]} is at least {least}, not {numbers[field]}")
    if not 1 <= numbers.get("master_port", 1) < 1 << 16:
        wrong.append(f"MASTER_PORT is 1 to 65535, not {numbers['master_port']}")
    if wrong:
        return wrong
    rank, world = numbers.get("rank"), numbers.get("world_size")
    local_rank, local_world = numbers.get("local_rank"), numbers.get("local_world_size")
    if rank is not None and world is not None and rank >= world:
        wrong.append(f"RANK {rank} is not below WORLD_SIZE {world}")
    if local_rank is not None and local_world is not None and local_rank >= local_world:
        wrong.append(f"LOCAL_RANK {local_rank} is not below LOCAL_WORLD_SIZE {local_world}")
    if rank is not None and local_rank is not None and local_rank > rank:
        wrong.append(f"LOCAL_RANK {local_rank} is above RANK {rank}")
    if world is not None and local_world is not None and world % local_world:
        wrong.append(f"WORLD_SIZE {world} is no multiple of LOCAL_WORLD_SIZE {local_world}")
    return wrong


def _error(wrong: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"these are not the variables of a rank: {'; '.join(wrong)}. {_HOW[0].upper()}{_HOW[1:]}",
        details={"wrong": wrong},
    )
