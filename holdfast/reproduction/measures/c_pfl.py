"""Measures of C-PFL's figures."""
