"""What the environment says about stores, and what this process puts there for its children.

Torch-free.
"""

from __future__ import annotations

import json
import os
import threading

import msgspec

from torchstore_core.clients.calls.arguments import check_bools
from torchstore_core.clients.stores import ancestors
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.switches import is_on

DEFAULT_NAME = "torchstore"
#: Environment variable with the address of the default store; children inherit it.
ADDRESS = "TORCHSTORE_ADDRESS"
#: Environment variable with a JSON object of name to address, for stores of other names.
ADDRESSES = "TORCHSTORE_ADDRESSES"
#: Environment variable: whether values that need pickle are put and got; they are unless it is off.
ALLOW_PICKLE = "TORCHSTORE_ALLOW_PICKLE"

#: Held while anything changes that is kept about stores, and across a fork.
lock = threading.RLock()
# What this process was started with, for names that it has published a store of its own under.
_replaced: dict[str, str | None] = {}


def as_address(text: str) -> str:
    """An address as it is written: the path of a socket needs no ``unix:``.

    >>> as_address("/run/ts/control.sock"), as_address("unix:/run/ts/control.sock")
    ('unix:/run/ts/control.sock', 'unix:/run/ts/control.sock')
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"an address is a str like unix:/path, not {text!r}")
    return f"unix:{text}" if text.startswith("/") else text


def not_a_socket(address: str, otherwise: str) -> str:
    """Why this process cannot look an address up, and what to do instead."""
    return (
        f"{address!r} is no socket of this host. An address like RUNTIME:NAME says which store of "
        "its own job a process means, and only processes of that job can look it up. Here, "
        f"{otherwise}"
    )


def variable_of(store_name: str) -> str:
    """The environment variable that has the address of that store."""
    return ADDRESS if store_name == DEFAULT_NAME else ADDRESSES


def inherited_address(store_name: str) -> str | None:
    """The address that the environment gives for a store.

    Raises:
        ConfigurationError: what is there is unreadable.
    """
    text = _read(store_name)
    return None if text is None else as_address(text)


def publish(store_name: str, address: str | None) -> None:
    """Put an address into the environment, for children; None brings back what was there before.

    Raises:
        ConfigurationError: what is there is unreadable.
    """
    with lock:
        if address is not None:
            _replaced.setdefault(store_name, _read(store_name))
        _write(store_name, _replaced.pop(store_name, None) if address is None else address)
    ancestors.note(store_name, address)


def forget_what_was_replaced() -> None:
    """In a forked child: what it was started with is what its parent has published."""
    _replaced.clear()


def allows_pickle(given: bool | None = None) -> bool:
    """What ``allow_pickle=`` says; of None, TORCHSTORE_ALLOW_PICKLE, by default 1.

    Raises:
        ConfigurationError: it is no bool, or the variable is something else than 0 or 1.
    """
    if given is not None:
        check_bools(allow_pickle=given)
        return given
    return is_on(ALLOW_PICKLE, default=True)


def _read(store_name: str) -> str | None:
    if store_name == DEFAULT_NAME:
        return os.environ.get(ADDRESS) or None
    return _others().get(store_name)


def _write(store_name: str, address: str | None) -> None:
    text = address
    if store_name != DEFAULT_NAME:
        others = {name: where for name, where in _others().items() if name != store_name}
        if address is not None:
            others[store_name] = address
        text = json.dumps(others) if others else None  # in ASCII, as the locale may have no more
    if text is None:
        os.environ.pop(variable_of(store_name), None)
    else:
        os.environ[variable_of(store_name)] = text


def _others() -> dict[str, str]:
    text = os.environ.get(ADDRESSES, "")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{ADDRESSES} is a JSON object of store name to address: {error}"
        ) from error
