"""The tables and figures of the five papers, one TOML file each (study.py says what is in it), and what they
print."""
