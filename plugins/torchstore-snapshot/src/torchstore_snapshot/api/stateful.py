"""What a snapshot is taken of: objects with a state dict."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from torchstore_snapshot.errors import AppStateError

__all__ = ["AppState", "RNGState", "StateDict", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state dict: modules, optimizers, schedulers, data loaders."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Tensors in it may be those of the object itself: they are read by a
        take and written to by a restore.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state over."""


#: Objects by their keys in a snapshot. Keys must not be empty.
AppState = Mapping[str, Stateful]


class StateDict(UserDict[str, Any]):
    """A dict that is its own state: for tensors, numbers and other values.

    >>> progress = StateDict(step=3)
    >>> progress.load_state_dict({"step": 7})
    >>> progress["step"]
    7
    """

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState:
    """The state of torch's random number generator of the CPU, which each rank has for itself.

    A take leaves the generator as it was, and a restore sets it last, so that the numbers drawn
    after a restore are those that were drawn after the take.
    """

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"rng_state": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state_dict["rng_state"])


def checked(app_state: AppState) -> list[tuple[str, Stateful]]:
    """Return the objects by key, in the order in which all ranks handle them: sorted, with the
    state of the random number generator first.

    Raises:
        AppStateError: it is no mapping, a key is not a non-empty str, a value is a class or
            not :class:`Stateful`, or there are several :class:`RNGState`.
    """
    given: object = app_state
    if not isinstance(given, Mapping):
        raise AppStateError(
            "an app_state is a dict of objects with state_dict() and load_state_dict(), by key, "
            f"not a {type(given).__qualname__}"
        )
    for key, value in app_state.items():
        name: object = key
        if not isinstance(name, str) or not name:
            raise AppStateError(f"the keys of an app_state are non-empty str, not {name!r}")
        if isinstance(value, type):  # it has the methods, but no state
            raise AppStateError(
                f"app_state[{key!r}] is the class {value.__qualname__}; give an object of it, such "
                f"as {value.__qualname__}()"
            )
        if not isinstance(value, Stateful):
            raise AppStateError(
                f"app_state[{key!r}] has no state_dict() and load_state_dict(): it is a "
                f"{type(value).__qualname__}; put plain values into a StateDict"
            )
    found = sorted(app_state.items(), key=lambda item: (not isinstance(item[1], RNGState), item[0]))
    if sum(isinstance(value, RNGState) for _, value in found) > 1:
        raise AppStateError("an app_state has at most one RNGState")
    return found
