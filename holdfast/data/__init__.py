"""Data: one sample store, and tables that say which rows, under which labels, belong to which client."""
