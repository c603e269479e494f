"""Every example in a docstring of a distribution runs and is true."""

from __future__ import annotations

import doctest
import importlib

import pytest
from tests.api.test_packaging import SOURCES, modules_of, path_of

#: Examples that lack their prompt would go unnoticed, but for these: the public face.
PUBLIC = {
    "torchstore_core",
    "torchstore_core.boxes",
    "torchstore_core.contracts.observer",
    "torchstore_core.errors",
    "torchstore_core.values",
    "torchstore_core.plugins.ranking",
    "torchstore_strategies.singleton",
}
WITH_EXAMPLES = {
    name
    for package in SOURCES
    for name in modules_of(package)
    if ">>> " in path_of(name).read_text()
}


# What torch says of a checkpoint that one process makes alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES | PUBLIC))
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted > 0
