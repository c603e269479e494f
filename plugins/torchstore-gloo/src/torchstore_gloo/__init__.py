"""``gloo``: bytes over TCP by the library behind ``torch.distributed``'s CPU backend."""
