"""From bytes to a committed snapshot: files, the manifest, publishing. Torch-free."""
