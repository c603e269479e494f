"""The transport ``monarch-rdma``: bytes move between registered memory of both sides.

The volume drives the transfers: a client registers the memory to be written or read, and with one
endpoint call per chunk it asks the volume to move bytes between that memory and its segment.
Monarch's RDMA uses InfiniBand or RoCE where there is such hardware, and TCP where there is none.
"""
