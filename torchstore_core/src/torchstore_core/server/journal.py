"""What a server says of itself, a line each: start, joins, leaves, full, lost, paused, stop."""

from __future__ import annotations

import logging

__all__ = ["journal"]

#: Its name does not change, so that a logging configuration can name it.
journal = logging.getLogger("torchstore.server")
