"""torchstore inside Monarch jobs. Everything is reached through torchstore's own API."""
