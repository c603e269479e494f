"""Where snapshots are stored: one small contract, and its implementations. Torch-free."""
