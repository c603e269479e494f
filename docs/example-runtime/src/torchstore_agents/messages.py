"""What program and agent tell each other: a line of JSON each."""

from __future__ import annotations

import msgspec

from torchstore_core.contracts.runtime import StoreOptions


class Start(msgspec.Struct):
    """The order to start a store. Its strategy travels apart, as name and fields."""

    options: StoreOptions
    strategy: tuple[str, bytes] | None = None


class Started(msgspec.Struct):
    """The answer: where it is, or with which code and message it has failed."""

    address: str = ""
    code: str = ""
    message: str = ""
