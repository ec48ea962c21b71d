"""Models of the Hugging Face hub: which files of a repository make the model, and fetching just those.

Owes: short waits when there is no network, the user's settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE are
huggingface_hub's own), and words for what went wrong. Does not know what is in the files.
"""

from __future__ import annotations

import glob
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

import huggingface_hub  # its names load what they need when they are first used
from huggingface_hub import constants
from tqdm import tqdm

from headrace.base.errors import DownloadError, HeadraceError, ModelNotFound
from headrace.weights.cache import digest_of, failed, recall, remember
from headrace.weights.gguf import SPLIT_NAME

# With no quantisation named, the first of these that the repository has: small and good first, then the nearest.
PREFERENCE = (
    "Q4_K_M", "Q4_1", "Q4_0", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16", "F16", "F32",
)  # fmt: skip

_FOLDER_FILES = frozenset({
    "config.json", "generation_config.json", "model.safetensors.index.json",
    "quantize_config.json", "quant_config.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
})  # fmt: skip
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
T = TypeVar("T")
_TRUE = {"1", "ON", "YES", "TRUE"}
_NAMES_SHOWN = 12

PATIENCE = 10.0  # seconds for the hub to answer when there is nowhere else to go
PROBE = 3.0  # seconds when there is


@dataclass(frozen=True, slots=True)
class HubModel:
    """repo: ``org/name``. revision: branch, tag or commit, or None: main. pick: a quantisation or a file, or None."""

    repo: str
    revision: str | None = None
    pick: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.pick}' if self.pick else ''}"


def fetch_model(model: HubModel, shown: bool, *, patience: float = PATIENCE, sha256: str | None = None) -> Path:
    """The GGUF file or the folder of `model`; what was fetched before is not asked for again.

    sha256: of the file, if only that one will do; it is checked when the file arrives. ModelNotFound, or DownloadError.
    """
    key = f"{model}#{sha256}" if sha256 else str(model)
    known = recall(key)
    if known is not None:
        return known
    try:
        if is_offline():
            raise DownloadError(f"{model}: not fetched before, and HF_HUB_OFFLINE is set")
        files = _list(model, patience)
    except DownloadError as error:
        if sha256:
            raise
        return _cached(model, error)
    names = choose_files(str(model), files, model.pick)
    if sha256 not in (None, files[names[0]]):
        raise DownloadError(f"{model}: the hub's file has sha256 {files[names[0]]}, expected {sha256}")
    folder = _download(model, names, shown)
    for name in names:
        _check_digest(folder / name, files[name])
    path = _model_path(folder, names)
    remember(key, path, [folder / name for name in names])
    return path


def _check_digest(path: Path, expected: str | None) -> None:
    """A file that is not what the hub announced is deleted: huggingface_hub would take it for good from now on."""
    if expected is None:
        return
    found = digest_of(path)
    if found != expected:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise DownloadError(f"{path.name}: arrived with sha256 {found}, expected {expected}; try again")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


# --- which files --------------------------------------------------------------------------------------------------


def choose_files(model: str, files: Collection[str], pick: str | None) -> list[str]:
    """The files of a repository that make the model, the first part of a GGUF file first; ModelNotFound if none do.

    pick: a file (``*.gguf``) or a quantisation (``Q4_K_M``); None: by PREFERENCE, or safetensors if there is no GGUF.
    """
    models = _gguf_models(files)
    if pick and pick.lower().endswith(".gguf"):
        chosen = [parts for first, parts in models.items() if pick in (first, PurePosixPath(first).name)]
    elif models:
        kinds = (pick,) if pick else PREFERENCE
        chosen = [parts for kind in kinds for parts in _of_kind(models, kind)]
        chosen = chosen or (list(models.values()) if not pick and len(models) == 1 else [])
    else:
        chosen = [] if pick else _safetensors(files)
    if not chosen:
        raise ModelNotFound(_nothing_fits(model, list(models), pick))
    return chosen[0]


def _gguf_models(files: Collection[str]) -> dict[str, list[str]]:
    """First file -> all files of it, for each GGUF model that is there whole."""
    names = sorted(f for f in files if f.lower().endswith(".gguf") and not _NOT_A_MODEL.search(f))
    models = {}
    for name in names:
        match = SPLIT_NAME.fullmatch(name)
        if match is None:
            models[name] = [name]
        elif int(match["part"]) == 1:
            count = int(match["parts"])
            parts = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
            if set(parts) <= set(names):
                models[name] = parts
    return models


def _of_kind(models: Mapping[str, list[str]], kind: str) -> list[list[str]]:
    """The models with that quantisation in their name; the shortest name first: it has no further qualifiers."""
    named = re.compile(rf"(^|[-._/]){re.escape(kind)}([-./]|$)", re.IGNORECASE)
    return [models[first] for first in sorted(models, key=len) if named.search(first)]


def _safetensors(files: Collection[str]) -> list[list[str]]:
    shards = sorted(f for f in files if _SHARD.fullmatch(f))
    if "model.safetensors.index.json" in files:  # a second, whole copy beside the shards is left where it is
        shards = [f for f in shards if f != "model.safetensors"] or shards
    if not shards or "config.json" not in files:
        return []
    return [[*shards, *sorted(f for f in files if f in _FOLDER_FILES)]]


def _nothing_fits(model: str, models: list[str], pick: str | None) -> str:
    if not models:
        return f"{model}: the repository holds neither GGUF files nor config.json with model.safetensors"
    more = f" and {len(models) - _NAMES_SHOWN} more" if len(models) > _NAMES_SHOWN else ""
    wanted = f"no {pick} among" if pick else "no file of a known quantisation; name one of"
    return f"{model}: {wanted} {', '.join(models[:_NAMES_SHOWN])}{more}"


def _model_path(folder: Path, names: list[str]) -> Path:
    return folder / names[0] if names[0].lower().endswith(".gguf") else folder


# --- asking and fetching --------------------------------------------------------------------------------------------


def _list(model: HubModel, patience: float) -> dict[str, str | None]:
    """The repository's files, each with its sha256 where the hub tells it."""
    api = huggingface_hub.HfApi(library_name="headrace")
    ask = partial(api.model_info, model.repo, revision=model.revision, files_metadata=True, timeout=patience)
    with _in_words(model):
        info = _within(patience + 1, ask, f"{model}: the hub ({api.endpoint}) did not answer in {patience:.0f} s")
    return {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or ()}


def _within(seconds: float, call: Callable[[], T], late: str) -> T:
    """What `call` returns or raises; DownloadError if it takes longer (a name look-up has no limit of its own)."""
    answers: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer = call()
        except Exception as error:  # handed over to the thread that waits, whatever it is
            answers.put(partial(_raise, error))
        else:
            answers.put(lambda: answer)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)()
    except queue.Empty:
        raise DownloadError(late) from None


def _raise(error: Exception) -> NoReturn:
    raise error


def _download(model: HubModel, names: list[str], shown: bool) -> Path:
    with _in_words(model):
        folder = huggingface_hub.snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=None if shown and sys.stderr.isatty() else _NoBar,
            library_name="headrace",
        )
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    if missing:
        raise DownloadError(f"{model}: did not arrive: {', '.join(missing)}")
    return Path(folder)


class _NoBar(tqdm):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@contextmanager
def _in_words(model: HubModel) -> Iterator[None]:
    """What huggingface_hub raises, in this project's errors."""
    errors = huggingface_hub.errors
    try:
        yield
    except (HeadraceError, KeyboardInterrupt):
        raise
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{model}: accept its terms on the hub and set HF_TOKEN") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        reason = "not on the hub, or private: check the name and revision, or set HF_TOKEN"
        raise ModelNotFound(f"{model}: {reason}") from error
    except OSError as error:
        if error.errno is not None:  # ours: disk and permissions; those of HTTP carry no number
            raise failed(str(model), Path(constants.HF_HUB_CACHE), error) from error
        raise DownloadError(f"{model}: the hub did not deliver: {error}") from error
    except Exception as error:  # an HTTP library's own errors: not ours to list
        raise DownloadError(f"{model}: the hub did not deliver: {type(error).__name__}: {error}") from error


def _cached(model: HubModel, error: DownloadError) -> Path:
    """The model out of huggingface_hub's cache, whoever fetched it; raises `error` if it is not there."""
    folder = _snapshot(model)
    if folder is None:
        raise error
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return _model_path(folder, choose_files(str(model), files, model.pick))


def _snapshot(model: HubModel) -> Path | None:
    """The cache of huggingface_hub (guide "Understand caching"): refs/BRANCH holds COMMIT, snapshots/COMMIT files."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}"
    revision = model.revision or "main"
    reference = root / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = root / "snapshots" / commit
    return folder if folder.is_dir() else None
