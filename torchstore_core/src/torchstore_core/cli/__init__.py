"""The command-line tool ``torchstore``. Needs the extra: ``pip install 'torchstore-core[cli]'``.

Everything but ``bench`` is torch-free, so that it starts at once.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NEEDS = ("click", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status: 0, 1 for an error, 2 for wrong usage."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        sys.stderr.write(f"torchstore: {what}: pip install 'torchstore-core[cli]'\n")
        return 1
    from torchstore_core.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
