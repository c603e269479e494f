"""Which plug-ins there are, which serves a transfer, and strategies as plain data."""
