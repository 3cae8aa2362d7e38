"""What only C-PFL's figures show."""
