"""The map of defences: every defence against every attack (`python -m benchmarks.defences`).

axes.py      which defences and attacks there are, with the settings that a map needs
scales.py    datasets, clients, rounds and networks of a scale; the cells of a map
blocks.py    runs the cells of one attack on one dataset as one sweep, and keeps what it measured
measured.py  what is read from a finished cell
record.py    the table file of a map, written and read
facts.py     what the record says in words: computed by rules
claims.py    the papers' claims beside what was measured
page.py      the generated parts of docs/defences.md
picture.py   the map as a picture"""
