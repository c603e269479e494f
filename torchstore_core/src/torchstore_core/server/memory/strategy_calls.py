"""Calls to the store's strategy, which is third-party code: any failure becomes a PluginError.

This includes exceptions that would otherwise end a process or a task: a strategy that calls
``sys.exit()`` is broken, but must not end the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NoReturn, TypeVar

from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts
from torchstore_core.errors import PluginError
from torchstore_core.plugins.absent_strategy import AbsentStrategy

T = TypeVar("T")

# A result with more entries per volume than this, on average, is taken to be endless.
_MENTIONS = 8
_MAX_TEXT = 500


def by_key(strategy: Strategy) -> bool:
    """Return whether keys are placed separately. Raises ``PluginError`` if the strategy fails."""
    answer = _asked(strategy, "say by_key", lambda: strategy.by_key)
    if type(answer) is not bool:
        _refuse(strategy, f"says by_key is {_text(answer)}, which is no bool")
    return answer


def copies(strategy: Strategy) -> int:
    """Return how many copies a value gets, at least 1. Raises ``PluginError`` if the strategy
    fails.
    """
    answer = _asked(strategy, "say how many copies it wants", lambda: strategy.copies)
    if type(answer) is not int or answer < 1:
        _refuse(strategy, f"wants {_text(answer)} copies, which is no int above 0")
    return answer


def order(
    strategy: Strategy,
    client: ClientFacts,
    volumes: Sequence[VolumeFacts],
    nbytes: int,
    keys: Sequence[str],
) -> list[int]:
    """Return the volumes that the strategy names for a put, best first, each once.

    Raises:
        PluginError: the strategy fails, or names no volume, a volume that does not exist, or far
            too many.
    """
    what = f"place {keys[0]!r}" if keys else "place a put without values"
    return _named(
        strategy, what, len(volumes), lambda: strategy.place(client, volumes, nbytes, keys)
    )


def order_for_copy(
    strategy: Strategy,
    client: ClientFacts,
    volumes: Sequence[VolumeFacts],
    nbytes: int,
    key: str,
    copies: Sequence[int],
) -> list[int]:
    """Return the volumes that the strategy names for a further copy of a value, best first, each
    once.

    Raises:
        PluginError: as for :func:`order`.
    """
    return _named(
        strategy,
        f"place a copy of {key!r}",
        len(volumes),
        lambda: strategy.place_copy(client, volumes, nbytes, key, copies),
    )


def _named(
    strategy: Strategy, what: str, volumes: int, question: Callable[[], Sequence[int]]
) -> list[int]:
    most = _MENTIONS * volumes
    answer = _asked(strategy, what, lambda: list(islice(question(), most + 1)))
    if not answer:
        _refuse(strategy, "named no volume")
    if len(answer) > most:
        _refuse(strategy, f"named more than {most} volumes of {volumes}")
    for index in answer:
        if type(index) is not int or not 0 <= index < volumes:
            _refuse(strategy, f"named volume {_text(index)} of {volumes}")
    return list(dict.fromkeys(answer))


def choice(strategy: Strategy, client: ClientFacts, among: Sequence[VolumeFacts]) -> int:
    """Return the position in ``among`` of the copy that the strategy chooses for a reader.

    Raises:
        PluginError: the strategy fails, or chooses a copy that does not exist.
    """
    answer = _asked(strategy, "choose a copy", lambda: strategy.choose(client, among))
    if type(answer) is not int or not 0 <= answer < len(among):
        _refuse(strategy, f"chose copy {_text(answer)} of {len(among)}")
    return answer


def _asked(strategy: Strategy, what: str, question: Callable[[], T]) -> T:
    try:
        return question()
    except BaseException as error:  # third-party code
        if isinstance(strategy, AbsentStrategy) and isinstance(error, PluginError):
            raise
        raise PluginError(
            f"strategy {type(strategy).__name__} cannot {what}: {_text(error)}"
        ) from error


def _refuse(strategy: Strategy, why: str) -> NoReturn:
    raise PluginError(f"strategy {type(strategy).__name__} {why}")


def _text(thing: object) -> str:
    """Return the repr of an object, which is third-party code, too: shortened, and without
    characters that cannot be encoded.
    """
    try:
        text = repr(thing)
    except BaseException:  # noqa: BLE001 - another error is being reported
        text = f"a {type(thing).__name__}"
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    return text.encode("utf-8", "replace").decode()
