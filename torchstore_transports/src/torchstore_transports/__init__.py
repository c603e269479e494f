"""The built-in transports: ``shm`` (same host), ``inline`` (values in messages), and ``tcp``."""
