"""``tcp``: moves bytes between any two hosts that reach each other, over several connections."""
