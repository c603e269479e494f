"""torchstore inside Monarch jobs. Users reach all of this through torchstore's own API."""
