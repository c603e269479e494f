"""Copies that the store makes by itself: where a volume was lost, and where one is drained."""
