"""Storage strategies: which volume a put goes to. Each module is one plug-in."""

from torchstore_strategies.host import HostStrategy
from torchstore_strategies.local_rank import LocalRankStrategy
from torchstore_strategies.singleton import SingletonStrategy

__all__ = ["HostStrategy", "LocalRankStrategy", "SingletonStrategy"]
