"""Which versions of which keys there are, and which are on their way."""
