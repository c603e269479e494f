"""``inprocess``: the smallest useful transport, for volumes hosted in the client's own process."""
