"""Data that is handed over in Python: arrays, tensors, datasets and data frames, one for each client or one
for all.

`entries` takes apart what is given, `values` makes arrays of it, `labels` numbers the labels, `encode`
makes one sample store, `content` holds it with its digest, `kept` writes it into a run directory and reads
it again, `data` has the public class."""
