"""Parts of a store that are on other hosts: relays for clients, and volumes in other processes."""
