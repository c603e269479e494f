"""Strategies, nested ones included, as plain data that other processes can read without pickle."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.contracts.strategy import Strategy
from torchstore_core.errors import ConfigurationError, PluginError
from torchstore_core.plugins.registry import Registry


def check_transport(strategy: object, registry: Registry) -> None:
    """Check that the transports that a strategy forces or prefers are installed here.

    A transport that is installed but blocked passes.

    Raises:
        ConfigurationError: a transport is not installed (the error lists those that are), or
            ``transport`` is neither a name nor a tuple of names.
        PluginError: several distributions claim a transport.
    """
    if not isinstance(strategy, Strategy):
        return  # encode_strategy raises the error
    names = _transport_names(strategy)
    if not names:
        return
    what = f"transport={strategy.transport!r} of {type(strategy).__name__}"
    registry.check_transports(what, names)


def _transport_names(strategy: Strategy) -> Sequence[str]:
    given: object = strategy.transport
    if given is None:
        return ()
    names = given if isinstance(given, tuple | list) else (given,)
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(
            f"transport={given!r} of {type(strategy).__name__}: it is the name of a transport, a "
            "tuple of names, or None"
        )
    return names


def encode_strategy(strategy: object) -> tuple[str, bytes]:
    """Return the entry-point name of a strategy (its tag), and its fields as JSON.

    Raises:
        PluginError: it is not a Strategy with a tag, or its fields are not plain data.
        ConfigurationError: its ``transport`` is neither a name nor a tuple of names.
    """
    if not isinstance(strategy, Strategy) or not isinstance(_config(strategy).tag, str):
        raise PluginError(
            "a strategy is an instance of a msgspec Struct derived from Strategy with a tag, its "
            f"entry-point name; not {strategy!r}"
        )
    config = _config(strategy)
    if config.array_like or config.tag_field != "type":
        raise PluginError(
            f"strategy {type(strategy).__name__} cannot cross processes: it must be neither "
            "array_like nor have a tag_field of its own"
        )
    _transport_names(strategy)
    try:
        return str(config.tag), msgspec.json.encode(strategy)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise PluginError(
            f"strategy {type(strategy).__name__} cannot cross processes: {error}; its fields are "
            "plain data (numbers, str, lists, tuples, other strategies)"
        ) from error


def plain_options(options: StoreOptions) -> dict[str, Any]:
    """Return a store's options as plain data: ``strategy`` is the name of the strategy, and
    ``strategy_fields`` has its fields. Of the default strategy, both are left out.

    Raises:
        PluginError, ConfigurationError: as for :func:`encode_strategy`.
    """
    fields = msgspec.structs.asdict(options)
    strategy = fields.pop("strategy")
    if strategy is not None:
        fields["strategy"], fields["strategy_fields"] = encode_strategy(strategy)
    return fields


def decode_strategy(name: str, fields: bytes, registry: Registry) -> Strategy:
    """Build the strategy of that name from its fields. Nested strategies are looked up by their own
    names.

    Raises:
        PluginError: there is no such strategy, it is broken, or the fields do not belong to it.
    """
    cls = registry.strategy(name)
    try:
        return _made(cls, fields, registry)
    except PluginError:
        raise
    except Exception as error:  # a strategy's own checks may raise anything
        raise PluginError(f"strategy {name!r}: bad fields: {error}") from error


def _config(strategy: Strategy) -> Any:
    return type(strategy).__struct_config__


def _made(cls: type[Strategy], fields: bytes, registry: Registry) -> Strategy:
    given = msgspec.json.decode(fields, type=dict[str, msgspec.Raw])
    given.pop("type", None)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(cls):
        raw = given.pop(field.encode_name, None)
        if raw is not None:
            values[field.name] = _value(field.type, bytes(raw), registry)
    if given:
        raise TypeError(f"it has no {', '.join(map(repr, given))}")
    return cls(**values)


def _value(kind: Any, raw: bytes, registry: Registry) -> Any:
    """Decode a field's value as its type; strategies in it are looked up by their names."""
    kind = _plain(kind)
    if isinstance(kind, type) and issubclass(kind, Strategy):
        tag = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("type")
        if tag is None:
            raise TypeError("a nested strategy without its name")
        made = decode_strategy(msgspec.json.decode(bytes(tag), type=str), raw, registry)
        if not isinstance(made, kind):
            raise TypeError(f"a {type(made).__name__} is no {kind.__name__}")
        return made
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if not _mentions_strategy(kind):
        return msgspec.json.decode(raw, type=kind)
    if origin in (types.UnionType, typing.Union):
        if raw.strip() == b"null":
            return None
        return _value(next(one for one in inner if _mentions_strategy(one)), raw, registry)
    if origin in (tuple, list):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return origin(_value(inner[0], bytes(item), registry) for item in items)
    raise TypeError(f"{kind} is not supported: a strategy, a tuple of them, or None")


def _plain(kind: Any) -> Any:
    """Return the type without ``Annotated``."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _mentions_strategy(kind: Any) -> bool:
    kind = _plain(kind)
    if isinstance(kind, type) and issubclass(kind, Strategy):
        return True
    return any(_mentions_strategy(one) for one in typing.get_args(kind))
