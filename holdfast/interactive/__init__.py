"""What a Python session or a notebook holds and sees: runs and sweeps with pictures, progress, Ctrl-C.

Empty on purpose: the commands import the progress bar before they know whether they need torch."""
