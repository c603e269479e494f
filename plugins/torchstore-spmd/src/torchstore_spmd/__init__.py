"""One store for all ranks that a launcher has started: the runtime of ``ts.initialize_spmd``."""
