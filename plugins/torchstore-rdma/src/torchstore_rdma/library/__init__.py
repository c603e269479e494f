"""NIXL, and UCX below it, as this package uses them."""
