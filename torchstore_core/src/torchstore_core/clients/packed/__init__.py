"""Packed state dicts: one contiguous blob and a header."""
