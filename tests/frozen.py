"""Imported last by the fork server: what it has imported is never garbage, and a collection in one
of its children neither walks it nor copies its pages. Nor does one of them, when it ends, take
apart torch's tables of operators, which takes as long as all else that a short one does.
"""

from __future__ import annotations

import gc
import weakref

for _finalizer, _info in weakref.finalize._registry.items():  # type: ignore[attr-defined]
    if _info.func.__module__ == "torch.library":
        _finalizer.atexit = False
gc.collect()
gc.freeze()
