"""The server half: who may connect where, and what is done for them."""
