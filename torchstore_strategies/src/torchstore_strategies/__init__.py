"""Storage strategies, which decide the volume that a put goes to. Each module is one plug-in."""

from torchstore_strategies.hashing import HashStrategy
from torchstore_strategies.host import HostStrategy
from torchstore_strategies.local_rank import LocalRankStrategy
from torchstore_strategies.replicated import ReplicatedStrategy
from torchstore_strategies.singleton import ControllerStorageVolumes, SingletonStrategy
from torchstore_strategies.spread import SpreadStrategy

__all__ = [
    "ControllerStorageVolumes",
    "HashStrategy",
    "HostStrategy",
    "LocalRankStrategy",
    "ReplicatedStrategy",
    "SingletonStrategy",
    "SpreadStrategy",
]
