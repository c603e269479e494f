"""``torchcomms``: bytes by send and receive of torchcomms, on any backend that it has."""
