"""Puts and gets of many whole, plain tensors, in columns instead of value by value."""
