"""Messages about volumes, to and from their processes: memory, copies, and what they spill."""
