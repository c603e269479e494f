"""The memory of the store: segments, placement, leases, and lost volumes."""
