"""A copier: the process that moves bytes from one volume to another for the store."""
