"""Carrying out what was planned: bytes move between this process and volumes. Torch-free."""
