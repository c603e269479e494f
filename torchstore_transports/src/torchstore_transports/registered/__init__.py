"""Memory that transports register with a device or a library. This package is a library; it
registers no transport.
"""
