"""What every call has in common: its deadline, its observers, its arguments, its event loop."""
