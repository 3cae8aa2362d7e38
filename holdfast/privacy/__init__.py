"""Differential privacy of what clients send: the settings, clipping and noise, and what they cost. The
simulator and the nodes of a federation use the same lines."""
