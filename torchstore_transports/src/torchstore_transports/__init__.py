"""The built-in transports: ``shm`` (one host), ``inline`` (in the message), ``tcp`` (networks)."""
