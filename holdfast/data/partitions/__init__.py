"""Ways to assign samples to clients, one per file; base.py says how to add one. The registry finds the files."""

from holdfast.data.partitions.base import Assignment, Partition

__all__ = ["Assignment", "Partition"]
