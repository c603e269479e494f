"""``rdma``: one-sided transfers through NIXL, over whatever fabric UCX finds between two hosts."""
