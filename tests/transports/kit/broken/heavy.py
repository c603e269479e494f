"""A server half that needs torch, and does not say that it is isolated."""

from __future__ import annotations

import torch  # noqa: F401
from tests.transports.kit.broken.simple import Plugin, Simple


class Heavy(Simple):
    """Has torch in the server's process."""


plugin = Plugin(server=Heavy)
