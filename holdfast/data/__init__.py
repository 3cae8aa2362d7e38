"""Data: one sample store, and tables that record which rows, under which labels, belong to which client."""
