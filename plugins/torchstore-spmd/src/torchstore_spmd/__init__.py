"""One store for all ranks that a launcher has started: what ``ts.initialize_spmd`` runs."""
