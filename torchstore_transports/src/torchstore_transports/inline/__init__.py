"""``inline``: small values ride inside the control message."""
