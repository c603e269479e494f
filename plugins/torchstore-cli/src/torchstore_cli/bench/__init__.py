"""``torchstore bench``."""
