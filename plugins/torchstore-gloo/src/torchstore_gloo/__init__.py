"""``gloo``: moves bytes over TCP with the library of ``torch.distributed``'s CPU backend."""
