"""Read one split of a dataset: several Parquet files as one. Every error names the file in one line."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import DataError, suggest
from holdfast.core.reading import parse_json
from holdfast.data.labels import read_labels
from holdfast.data.layout import find_splits

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["ParquetRows", "find_splits", "read_labels"]

DENSEST = 100  # most rows per byte of a file: real samples need far more space than equal labels
BUFFER = (
    1 << 20
)  # bytes of a column that are read ahead, instead of a whole row group, which may be the whole file


class ParquetRows:
    """The rows of some files, end to end. Files are opened on first use, so that cached data needs no
    Parquet."""

    def __init__(self, paths: Sequence[Path]):
        if not paths:
            raise DataError("no Parquet files to read")
        self.paths = tuple(paths)

    @property
    def count(self) -> int:
        return self._ends[-1]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files[0].schema_arrow.names)

    @cached_property
    def index_names(self) -> tuple[str, ...]:
        """The columns that pandas wrote as the index of its frame, which is no property of a sample."""
        try:
            about = parse_json((self._files[0].schema_arrow.metadata or {})[b"pandas"])
            return tuple(name for name in about["index_columns"] if isinstance(name, str))
        except (KeyError, TypeError, ValueError):
            return ()

    def need(self, column: str | Sequence[str]) -> str:
        """Return the name of the column, or the first name that exists of several that it may have."""
        wanted = (column,) if isinstance(column, str) else tuple(column)
        found = next((name for name in wanted if name in self.names), None)
        if found is None:
            raise DataError(
                f"{self.paths[0]}: there is no column"
                f" {' or '.join(map(repr, wanted))}{suggest(wanted[0], self.names)}"
            )
        return found

    def type_of(self, column: str) -> pa.DataType:
        return self._files[0].schema_arrow.field(self.need(column)).type

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes from the Hub's description of the columns in the files; () if it
        has none."""
        files_by_names = {
            _class_names(file.schema_arrow, column): path
            for path, file in zip(self.paths, self._files, strict=True)
        }
        files_by_names.pop((), None)
        if len(files_by_names) > 1:
            first, other = list(files_by_names.values())[:2]
            raise DataError(
                f"{other} names other classes of '{column}' than {first.name}, or in another order;"
                " download them again"
            )
        return next(iter(files_by_names), ())

    def batches(self, columns: Sequence[str], size: int = 1024) -> Iterator[pa.RecordBatch]:
        """Yield these columns in batches of at most `size` rows."""
        for column in columns:
            self.need(column)
        for path, file in zip(self.paths, self._files, strict=True):
            found = 0
            with _readable(path):
                for batch in file.iter_batches(batch_size=size, columns=list(columns)):
                    _check_indices(batch.columns)
                    found += len(batch)
                    yield batch
            _check_rows(path, found, file.metadata.num_rows)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one whole column."""
        import pyarrow as pa

        self.need(name)
        pieces = []
        for path, file in zip(self.paths, self._files, strict=True):
            with _readable(path):
                read = file.read(columns=[name]).column(0)
                _check_indices(read.chunks)
            _check_rows(path, len(read), file.metadata.num_rows)
            pieces += read.chunks
        return pa.chunked_array(pieces, type=self._files[0].schema_arrow.field(name).type)

    def place(self, row: int) -> str:
        """Return the place of a row, for an error message: the file, and the row's number in it."""
        file = bisect.bisect_right(self._ends, row)
        return f"{self.paths[file]}: row {row - (self._ends[file - 1] if file else 0)}"

    @cached_property
    def _files(self) -> list[pq.ParquetFile]:
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise DataError("Parquet datasets need pyarrow; run pip install pyarrow") from None
        files = []
        for path in self.paths:
            with _readable(path):
                files.append(pq.ParquetFile(path, buffer_size=BUFFER))
                _check_count(path, files[-1].metadata)
            _check_names(path, files[-1].schema_arrow.names)
            _check_same(self.paths[0], files[0].schema_arrow, path, files[-1].schema_arrow)
        if not sum(file.metadata.num_rows for file in files):
            raise DataError(f"{self.paths[0]} has no rows; download it again")
        return files

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(file.metadata.num_rows for file in self._files))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError, OverflowError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} cannot be read as Parquet, download it again: {why}") from None


def _class_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    try:
        about = parse_json((schema.metadata or {})[b"huggingface"])
        return tuple(str(name) for name in about["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _check_count(path: Path, about: pq.FileMetaData) -> None:
    """Check the number of rows before memory is allocated for them: with runs of equal values, a few bytes
    can claim any number."""
    size = path.stat().st_size
    if about.num_rows > DENSEST * size:
        raise DataError(f"{path} claims to hold {about.num_rows:,} rows in {size:,} bytes; download it again")
    _check_rows(
        path, sum(about.row_group(group).num_rows for group in range(about.num_row_groups)), about.num_rows
    )


def _check_rows(path: Path, found: int, claimed: int) -> None:
    if found != claimed:
        raise DataError(
            f"{path} is damaged: it claims to hold {claimed:,} rows but has {found:,}; download it again"
        )


def _check_indices(arrays: Sequence[pa.Array]) -> None:
    """Check that the indices of dictionary columns are inside their dictionary; Arrow does not check this."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for array in arrays:
        if pa.types.is_dictionary(array.type):
            ends = pc.min_max(array.indices).as_py()
            if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(array.dictionary):
                raise pa.ArrowInvalid(
                    f"index {ends['max']} is outside a dictionary of {len(array.dictionary)} values"
                )


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has two columns called '{twice[0]}'; rename one")


def _check_same(first: Path, wanted: pa.Schema, path: Path, schema: pa.Schema) -> None:
    if wanted.equals(schema, check_metadata=False):
        return
    missing = sorted(set(wanted.names) ^ set(schema.names))
    differs: Any = (
        missing
        or [name for name in wanted.names if wanted.field(name).type != schema.field(name).type]
        or ["their order"]
    )
    raise DataError(
        f"{path} has other columns than {first.name} ({', '.join(differs)}); keep only files of one"
        " dataset in a folder"
    )
