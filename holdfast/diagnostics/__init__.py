"""Questions to a finished run: each is a function that takes a Run and returns a data frame, or a diagnosis
that can be drawn."""
