"""What file systems are opened with besides their URLs: the ``storage_options`` of a call, and what
the program has set in ``fsspec.config.conf``. The process that writes gets both, as values that
msgpack has.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from torchstore_core.errors import ConfigurationError

__all__ = ["Settings", "configured", "current", "for_folders", "settings_for", "using"]

_current: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "storage_options", default=None
)
_with_folders: contextvars.ContextVar[bool] = contextvars.ContextVar("with_folders", default=False)


class Settings(msgspec.Struct, array_like=True):
    """What another process needs to open the same file systems.

    Args:
        options: the ``storage_options`` of the call.
        conf: fsspec's configuration of each protocol in the URL; None for one that has none.
    """

    options: dict[str, Any] = {}
    conf: dict[str, dict[str, Any] | None] = {}

    def apply(self) -> None:
        """Make fsspec's configuration that of the program, for storage that is opened later."""
        if not self.conf:
            return
        import fsspec  # type: ignore[import-untyped]  # takes long; local files need none of it

        for protocol, values in self.conf.items():
            if values is None:
                fsspec.config.conf.pop(protocol, None)
            else:
                fsspec.config.conf[protocol] = values


@contextlib.contextmanager
def using(options: Mapping[str, Any] | None, *, with_folders: bool = False) -> Iterator[None]:
    """While it lasts, file systems that this thread opens get these options.

    Args:
        with_folders: local folders are opened, too, of course without them; otherwise, who gives
            them for a folder is told that they have no effect.

    Raises:
        ConfigurationError: they are no dict with names.

    >>> with using({"endpoint_url": "http://127.0.0.1:9000"}):
    ...     current()
    {'endpoint_url': 'http://127.0.0.1:9000'}
    """
    given: object = options
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ):
        raise ConfigurationError(
            "storage_options is a dict of arguments by name, "
            f"not a {type(given).__name__} or one with other keys than str"
        )
    token, other = _current.set(options), _with_folders.set(with_folders)
    try:
        yield
    finally:
        _current.reset(token)
        _with_folders.reset(other)


def current() -> dict[str, Any]:
    """Return the options of the call that this thread is in."""
    return dict(_current.get() or {})


def for_folders() -> bool:
    """Whether options are a mistake where this thread opens a folder."""
    return bool(_current.get()) and not _with_folders.get()


def configured(url: str) -> dict[str, dict[str, Any] | None]:
    """Return fsspec's configuration of each protocol in a URL; None for one that has none."""
    import fsspec

    protocols = [part.partition("://")[0] for part in url.split("::")]
    return {protocol: fsspec.config.conf.get(protocol) for protocol in protocols}


def settings_for(url: str) -> Settings:
    """Return what another process needs to open a URL as this one does.

    Raises:
        ConfigurationError: a value is an object, which another process cannot be sent.
    """
    options, conf = current(), configured(url)
    _check("storage_options", options)
    for protocol, values in conf.items():
        _check(f"fsspec.config.conf[{protocol!r}]", values)
    return Settings(options, conf)


def _check(where: str, value: object) -> None:
    """Raise ConfigurationError, naming the value, unless it arrives as what it is."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if type(value) is dict and all(type(name) is str for name in value):
        for name, inner in value.items():
            _check(f"{where}[{name!r}]", inner)
    elif type(value) is list:
        for number, inner in enumerate(value):
            _check(f"{where}[{number}]", inner)
    else:
        raise ConfigurationError(
            f"async_take writes in another process, which cannot be sent {where}: it is a "
            f"{type(value).__name__}, neither a number, text, bytes, a list nor a dict of those; "
            "give such values, set environment variables, or use take"
        )
