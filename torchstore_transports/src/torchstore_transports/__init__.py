"""The built-in transports: ``shm`` (same host) and ``inline`` (small values in the message)."""
