"""The built-in transports: ``shm`` (same host), ``inline`` (small values in the message), ``tcp``."""
