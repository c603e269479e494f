"""What this host offers: its topology, memory, sockets, processes and copies."""
