"""Stands in for torchcomms where there is no RDMA device: see ``_transport``."""
