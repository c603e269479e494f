"""Several snapshots beside each other."""
