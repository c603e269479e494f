"""Lists the public API, a line for each name: what users, plug-ins and scripts may rely on.

``python -m tests.api.listing > tests/api/public_api.txt`` records it; ``test_public_api.py``
compares the two.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator

import msgspec

#: The modules whose public names are promised.
MODULES = [
    "torchstore_core",
    "torchstore_core.blocking",
    "torchstore_core.contracts.hooks",
    "torchstore_core.contracts.observer",
    "torchstore_core.contracts.runtime",
    "torchstore_core.contracts.strategy",
    "torchstore_core.contracts.transport",
    "torchstore_core.errors",
    "torchstore_core.testing",
    "torchstore_core.values",
    "torchstore_strategies",
]

#: Users are given these; how they are made is not promised.
_MADE_BY_THE_STORE = {
    "torchstore_core.Client",
    "torchstore_core.PendingPut",
    "torchstore_core.blocking.Client",
    "torchstore_core.blocking.PendingPut",
}


def listing() -> list[str]:
    """Every public name with its signature."""
    lines: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None)
        if names is None:
            names = [n for n, v in vars(module).items() if _is_public(n, v, name)]
        for public in sorted(names):
            lines += _described(f"{name}.{public}", getattr(module, public))
    strategies = importlib.import_module("torchstore_core")
    for public in sorted(strategies._STRATEGIES):
        lines += _described(f"torchstore_core.{public}", getattr(strategies, public))
    return lines


def _is_public(name: str, value: object, module: str) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module


def _described(name: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        if issubclass(value, BaseException):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"class {name}({bases}) code={getattr(value, 'code', None)!r}"
        else:
            yield f"class {name}"
        if issubclass(value, msgspec.Struct):
            for field in msgspec.structs.fields(value):
                yield f"{name}.{field.name}: {_plain(str(field.type))}"
        elif dataclasses.is_dataclass(value):
            for attribute in dataclasses.fields(value):
                yield f"{name}.{attribute.name}: {_plain(str(attribute.type))}"
        elif name not in _MADE_BY_THE_STORE:
            yield f"{name}{_signature(value)}"
        for member in sorted(dir(value)):
            if not member.startswith("_") and not member.startswith("test_"):
                yield from _member(f"{name}.{member}", inspect.getattr_static(value, member))
    elif callable(value):
        yield f"{_kind(value)} {name}{_signature(value)}"
    else:
        yield f"{name} = {_plain(str(value))}"


def _member(name: str, member: object) -> Iterator[str]:
    if isinstance(member, (classmethod, staticmethod)):
        how = type(member).__name__
        yield f"{how} {_kind(member.__func__)} {name}{_signature(member.__func__)}"
    elif isinstance(member, property):
        yield f"property {name}{_signature(member.fget)}"
    elif inspect.isfunction(member):
        yield f"{_kind(member)} {name}{_signature(member)}"


def _kind(value: object) -> str:
    return "async def" if inspect.iscoroutinefunction(value) else "def"


def _signature(value: object) -> str:
    try:
        return _plain(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def _plain(text: str) -> str:
    """Without where in our packages a type is at home: that is not promised."""
    text = re.sub(r"\btorchstore_\w+(\.\w+)*\.(?=[A-Z_a-z])", "", text)
    text = re.sub(r"\bm\.(?=[A-Z])", "", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    print("\n".join(listing()))
