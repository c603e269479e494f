"""The dtypes in which the entries of a state dict are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from torchstore_core.errors import ConfigurationError

#: The type of the ``transfer_dtype`` argument.
Casts = torch.dtype | Mapping[str, torch.dtype | None] | None
_WILDCARD = re.compile(r"[*?]|\[.[^]]*\]")


class CastPlan:
    """Determines the dtype that each entry is stored in.

    Attributes:
        unused: the patterns, as long as no name has matched any of them.
    """

    def __init__(self, wanted: Casts) -> None:
        self._all: torch.dtype | None = None
        self._patterns: list[tuple[str, torch.dtype | None]] = []
        if isinstance(wanted, torch.dtype):
            self._all = _floating(wanted)
        elif isinstance(wanted, Mapping):
            for pattern, dtype in wanted.items():
                if not isinstance(pattern, str):
                    raise ConfigurationError(f"transfer_dtype: a pattern is a str, not {pattern!r}")
                self._patterns.append((pattern, None if dtype is None else _floating(dtype)))
            # The pattern with the most literal characters comes first.
            self._patterns.sort(key=lambda item: -len(_WILDCARD.sub("", item[0])))
        elif wanted is not None:
            raise ConfigurationError(
                f"transfer_dtype is a torch.dtype or a dict of patterns, not {wanted!r}"
            )
        self.unused = [pattern for pattern, _ in self._patterns]

    def of(self, name: str) -> torch.dtype | None:
        """The dtype to store an entry in; None: its own dtype."""
        for pattern, dtype in self._patterns:
            if fnmatchcase(name, pattern):
                self.unused = []
                return dtype
        return self._all


def _floating(dtype: object) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigurationError(f"transfer_dtype is a floating-point dtype, not {dtype!r}")
