"""Stores of ranks that a launcher such as torchrun has started: ``ts.initialize_spmd``."""
