"""Where a checkpoint is: what the reading and the writing half of a storage have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchstore_core.clients.calls.arguments import check_key, check_store_name, check_timeout
from torchstore_core.errors import ConfigurationError, UnsupportedValueError
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.storage.settings import using

__all__ = ["AtKey", "AtPath"]


class AtPath:
    """A half whose checkpoints are snapshots."""

    _path: str | None
    _storage_options: Mapping[str, Any] | None = None

    def _storage(self) -> Storage:
        """Open the storage of the checkpoint.

        Raises:
            ConfigurationError: nobody has said where it is, or it cannot be opened.
        """
        with using(self._storage_options):
            return open_storage(self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the snapshot.

        Raises:
            ConfigurationError: nobody has said where.
        """
        if self._path is None:
            raise ConfigurationError(
                f"give a path to {type(self).__name__}, or checkpoint_id= to the call"
            )
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether snapshots can be there."""
        try:
            open_storage(checkpoint_id)
        except ConfigurationError:
            return False
        return True


class AtKey:
    """A half whose checkpoints are state dicts in a live store.

    Args:
        key: the key of all of them; None: what ``checkpoint_id=`` of the call says.
        store_name: which store.
        timeout: seconds for each call of the store; None: the store's default.

    Raises:
        ConfigurationError, UnsupportedValueError: an argument is invalid.
    """

    def __init__(self, key: str | None, store_name: str, timeout: float | None) -> None:
        self._fixed = self._key = None if key is None else check_key(key)
        self._store_name = check_store_name(store_name)
        check_timeout(timeout)
        self._timeout = timeout

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another checkpoint."""
        if checkpoint_id is not None and self._fixed is None:
            self._key = check_key(_as_key(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """The key of the state dict.

        Raises:
            ConfigurationError: nobody has said which.
        """
        if self._key is None:
            raise ConfigurationError(
                f"give a key to {type(self).__name__}, or checkpoint_id= to the call"
            )
        return self._key

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a key."""
        try:
            check_key(_as_key(checkpoint_id))
        except UnsupportedValueError:
            return False
        return True


def _as_key(checkpoint_id: object) -> object:
    return os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
