"""Nested dicts of tensors, put and fetched as one version."""
