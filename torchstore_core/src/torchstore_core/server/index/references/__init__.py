"""References that own: what keeps versions alive besides their keys."""
