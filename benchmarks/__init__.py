"""Scripts that measure; each says what in its first lines."""
