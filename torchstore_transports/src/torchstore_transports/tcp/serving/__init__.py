"""The server half: which clients may connect, where it listens, and how it serves requests."""
