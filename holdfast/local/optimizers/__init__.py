"""Clients' optimisers, one file each."""
