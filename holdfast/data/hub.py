"""Download a dataset's Parquet files from the Hugging Face Hub, once, into the cache.

Only the files of the train and test splits of one subset are downloaded, with huggingface_hub's progress bar.
Its environment variables apply here too: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.files import write_json
from holdfast.core.reading import parse_json, read_whole
from holdfast.data.layout import arrange, choose_test

CONVERTED = "refs/convert/parquet"  # where the Hub stores its own conversion of datasets that are not Parquet
PATIENCE = 10.0  # seconds to wait for an answer
WHOLE = ".whole.json"  # written last: lists the files of a complete download


class Unreachable(Exception):
    """Says in a few words why the Hub cannot be used."""


@dataclass(frozen=True)
class Repository:
    """A dataset on the Hub, or no dataset where the id is None."""

    id: str | None
    subset: str | None = None
    revision: str | None = None
    test_split: str | None = None  # a split other than the default one

    @property
    def folder(self) -> str:
        """The name of its folder. Each subset, revision and choice of splits has its own, so that one file
        can mark it complete."""
        words = [self.id or "", self.subset or "", *([self.revision] if self.revision else [])]
        name = "--".join(word.replace("/", "--") for word in words).rstrip("-")
        return f"{name}--test={self.test_split.replace('/', '--')}" if self.test_split else name


def fetch(repository: Repository, downloads: Path | None) -> Path:
    """Return the folder of the Parquet files; download them unless that was done before. An interrupted
    download continues."""
    if repository.id is None:
        raise Unreachable("data.options.repo is not set")
    if downloads is None:
        raise Unreachable("there is no folder to download into, set HOLDFAST_CACHE")
    target = downloads / repository.folder
    if _is_whole(target):
        return target
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise Unreachable("HF_HUB_OFFLINE is set")
    try:
        import huggingface_hub
    except ImportError:
        raise Unreachable("it needs huggingface_hub: pip install huggingface_hub") from None
    try:
        _download(huggingface_hub, repository, target)
    except (Unreachable, DataError):
        raise
    except Exception as error:  # the network and the library can raise anything
        raise Unreachable(_in_words(error, repository)) from None
    return target


def _download(library: Any, repository: Repository, target: Path) -> None:
    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = library.HfApi(endpoint=endpoint, library_name="holdfast")
    revision, files = _listed(api, repository)
    size = sum(files.values())
    print(
        f"downloading {repository.id} from the Hub: {len(files)} files, {size / 1e6:,.1f} MB",
        file=sys.stderr,
        flush=True,
    )
    library.snapshot_download(
        repository.id,
        repo_type="dataset",
        revision=revision,
        local_dir=target,
        allow_patterns=[glob.escape(name) for name in files],
        etag_timeout=PATIENCE,
        endpoint=endpoint,
        library_name="holdfast",
    )
    short = [
        name
        for name, size in files.items()
        if not (target / name).is_file() or (target / name).stat().st_size < size
    ]
    if short:
        raise Unreachable(f"{short[0]} is incomplete, run the command again to continue the download")
    write_json(target / WHOLE, {"repo": repository.id, "revision": revision, "files": sorted(files)})


def _listed(api: Any, repository: Repository) -> tuple[str, dict[str, int]]:
    """Return the commit and its files with sizes: of the given revision, or of main, or else of the Hub's
    conversion."""
    tries = [repository.revision] if repository.revision else [None, CONVERTED]
    for revision in tries:
        try:
            about = api.dataset_info(repository.id, revision=revision, timeout=PATIENCE, files_metadata=True)
        except Exception as error:
            if revision == CONVERTED and type(error).__name__ == "RevisionNotFoundError":
                break
            raise
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or []}
        where = f"{repository.id} on the Hub"
        splits = arrange(sizes, repository.subset, where)
        if "train" in splits:
            test = choose_test(splits, repository.test_split, where)
            wanted = [str(path) for path in splits["train"] + (splits[test] if test else [])]
            return about.sha, {name: sizes[name] for name in wanted}
    raise Unreachable(f"{repository.id} has no Parquet files for a train split")


def _is_whole(target: Path) -> bool:
    try:
        about = parse_json(read_whole(target / WHOLE))
        return all((target / name).is_file() for name in about["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _in_words(error: Exception, repository: Repository) -> str:
    kind = type(error).__name__
    words = {
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
        "GatedRepoError": f"{repository.id} requires you to accept its terms on its page; then set HF_TOKEN",
        "RepositoryNotFoundError": f"there is no dataset {repository.id}; if it is private, set HF_TOKEN",
        "RevisionNotFoundError": f"{repository.id} has no revision {repository.revision}",
        "HFValidationError": f"'{repository.id}' is not a dataset id, expected OWNER/NAME",
    }
    if kind in words:
        return words[kind]
    why = (str(error).strip().splitlines() or [kind])[0]
    return f"no answer: {why}" if "Connect" in kind or "Timeout" in kind else f"{kind}: {why}"
