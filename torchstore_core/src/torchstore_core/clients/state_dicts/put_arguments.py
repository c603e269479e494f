"""The arguments of ``put_state_dict`` besides ``blocking``, in which its overloads differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class PutArguments(TypedDict, total=False):
    """Those of the method."""

    version: int | None
    rewind: bool
    participants: int | None
    participant: str | int | None
    transfer_dtype: torch.dtype | Mapping[str, torch.dtype | None] | None
    partial: bool
    keep: int | None
    when_full: str | None
    timeout: float | None
    allow_pickle: bool | None


class StorePutArguments(PutArguments, total=False):
    """Those of the function, which names the store."""

    store_name: str
