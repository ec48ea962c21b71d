"""From a path to a checkpoint: which reader a file or a folder is for."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import BadModelFile, ModelNotFound
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.gguf import SPLIT_NAME, read_gguf
from headrace.weights.safetensors import CONFIG, INDEX, SINGLE, read_safetensors


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file (the first of a split set), or a folder with safetensors or one GGUF model.

    ModelNotFound if nothing is there, BadModelFile if what is there cannot be used.
    """
    if path.is_file():
        return read_gguf(path)
    if not path.is_dir():
        raise ModelNotFound(f"{path}: no such file or folder")
    if not any((path / name).is_file() for name in (CONFIG, SINGLE, INDEX)):
        return read_gguf(_only_gguf(path))
    return read_safetensors(path)


def _only_gguf(folder: Path) -> Path:
    models = [p for p in sorted(folder.glob("*.gguf")) if _begins_model(p.name)]
    if not models:
        raise ModelNotFound(f"{folder}: holds neither {CONFIG} with {SINGLE} nor a .gguf file")
    if len(models) > 1:
        raise BadModelFile(folder, f"holds several models; name one of them: {', '.join(p.name for p in models)}")
    return models[0]


def _begins_model(name: str) -> bool:
    match = SPLIT_NAME.fullmatch(name)
    return match is None or int(match["part"]) == 1
