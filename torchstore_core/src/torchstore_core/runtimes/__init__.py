"""Runtimes of the core: ``local``."""
