"""State dicts: nested dicts of tensors that are put and fetched as one version."""
