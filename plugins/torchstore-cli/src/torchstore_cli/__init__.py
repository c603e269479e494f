"""The command-line tool ``torchstore``.

Everything but ``bench`` is torch-free, so that it starts at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit status: 0, 1 for an error, 2 for wrong usage, 130 if it was
    interrupted, 141 if nobody reads what it says.
    """
    from torchstore_cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
