"""The client: everything between a call of the API and the bytes in a volume."""
