"""``torchcomms-rdma``: one-sided transfers by the ``RdmaTransport`` of torchcomms."""
