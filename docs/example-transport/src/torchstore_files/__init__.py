"""``files``: the volume's memory, opened as a file; for processes of one host and one user."""
