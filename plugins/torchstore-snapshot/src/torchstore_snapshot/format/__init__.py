"""What a snapshot looks like on storage: the manifest, data files and hashes. Torch-free."""
