"""Scripts that measure or draw; the docstring of each says what."""
