"""Conformance kits for plug-ins: pytest classes to subclass. They need pytest and nothing else.

>>> from torchstore_core.testing import StrategyConformance
>>> StrategyConformance.installed
True
"""

from torchstore_core.testing.strategies import StrategyConformance

__all__ = ["StrategyConformance"]
