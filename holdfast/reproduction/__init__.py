"""Reproduces tables and figures of papers: what a table consists of (study), which experiments it needs
(experiments), the numbers of its cells (values), what the paper claims (claims), and the whole (outcome,
page)."""
