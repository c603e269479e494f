"""``inline``: small values travel inside the control message."""
