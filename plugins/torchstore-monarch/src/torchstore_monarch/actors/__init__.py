"""The actors of a store: its controller, its hosts, and the directory that owns them."""
