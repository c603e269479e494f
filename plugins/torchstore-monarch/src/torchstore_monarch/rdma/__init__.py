"""The transport ``monarch-rdma``: bytes move between registered memory of both sides.

A volume drives the transfers: a client registers what it wants to be written or read, and one
endpoint call per chunk has the volume write there from its segment, or read from there into it.
Monarch's RDMA uses InfiniBand or RoCE where there is such hardware, and TCP where there is none.
"""
