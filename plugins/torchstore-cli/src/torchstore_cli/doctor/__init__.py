"""``torchstore doctor``."""
