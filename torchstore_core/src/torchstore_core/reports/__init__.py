"""Reports about a store, its keys and its volumes, as values and as text for people."""
