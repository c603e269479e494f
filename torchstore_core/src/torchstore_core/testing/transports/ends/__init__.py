"""Both ends of a transport under test: volumes and clients, here and in other processes."""
