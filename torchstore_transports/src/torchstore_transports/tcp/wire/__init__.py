"""What both halves share: messages, the greeting, connections."""
