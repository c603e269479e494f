"""From a snapshot to values in memory."""
