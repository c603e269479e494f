"""What both halves share: messages, authentication, connections."""
