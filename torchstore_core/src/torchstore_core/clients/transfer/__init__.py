"""How the bytes of a put and of a get move."""
