"""Moving the bytes of puts and gets."""
