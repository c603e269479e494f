"""Packed state dicts: a header and one contiguous blob."""
