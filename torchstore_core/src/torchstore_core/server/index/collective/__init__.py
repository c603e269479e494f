"""Versions that several puts make together: what each adds, and when they become visible."""
