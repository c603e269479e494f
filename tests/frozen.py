"""Imported last by the fork server: what it has imported is never garbage, and a collection in one
of its children neither walks it nor copies its pages.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
