"""Spilling to object storage, and whatever else fsspec knows the URLs of."""
