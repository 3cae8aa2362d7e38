"""Questions to a finished run: each is a function that takes a Run and returns a data frame."""
