"""Sources of samples. A source is chosen by data.name, configured by data.options, and returns Samples.

To add one: subclass Source, register it under a name, and return Samples from load. A source of Parquet files
subclasses FolderSource, which finds them; it decodes through `cached`, so that decoding is done once. The
registry finds the files.
"""

from holdfast.data.sources.base import FolderSource, Source

__all__ = ["FolderSource", "Source"]
