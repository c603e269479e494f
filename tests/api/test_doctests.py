"""Every example in a docstring of the four packages runs and is true."""

from __future__ import annotations

import doctest
import importlib

import pytest
from tests.api.test_packaging import SOURCES, modules_of

MODULES = [name for package in SOURCES for name in modules_of(package)]

#: The public face: a reader finds examples here.
WITH_EXAMPLES = {
    "torchstore_core",
    "torchstore_core.boxes",
    "torchstore_core.contracts.observer",
    "torchstore_core.errors",
    "torchstore_core.values",
    "torchstore_core.plugins.ranking",
    "torchstore_strategies.singleton",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    if name in WITH_EXAMPLES:
        assert results.attempted > 0


def test_the_publicmodules_of_are_among_them():
    assert set(MODULES) >= WITH_EXAMPLES
