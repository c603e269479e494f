"""What is on other hosts: relays of clients, volumes in other processes."""
