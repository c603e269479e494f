"""A server that comes back: its keeper, the log of what changed its state, and reading it again."""
