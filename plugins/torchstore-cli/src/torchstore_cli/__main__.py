"""``python -m torchstore_cli`` runs ``torchstore``."""

from __future__ import annotations

import sys

from torchstore_cli import main

if __name__ == "__main__":
    sys.exit(main())
