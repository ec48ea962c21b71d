"""Safetensors folders: config.json, and one file of tensors or several with an index that says which holds what.

Owes: the same checks as for GGUF, and tensor views. The index decides: a tensor that it does not name is left out, a
tensor that it names must be where it says. Does not know what a tensor means.

Layout (huggingface/safetensors, README, "Format"): the length of the header as uint64, the header as JSON (name ->
dtype, shape, data_offsets), then the data, which the tensors cover without gap or overlap.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import BadModelFile, ModelNotFound
from headrace.base.formats import BF16, F16, F32, INTEGERS, Format
from headrace.weights.checkpoint import Checkpoint, Tensor
from headrace.weights.mapped import MappedFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
QUANTIZATION = "quantization_config"  # the key of a config.json
# Where it is before libraries agreed on that key, and which of them wrote it.
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

_DTYPES: dict[str, Format] = {"F32": F32, "F16": F16, "BF16": BF16} | {n.upper(): f for n, f in INTEGERS.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the limit of the reference implementation
_JSON_LIMIT = 100_000_000  # bytes of a config or an index
_RANK_LIMIT = 8
_NAMES_SHOWN = 10

log = logging.getLogger(__name__)


def read_safetensors(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; BadModelFile if anything is wrong or missing."""
    config, said = _configuration(folder)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    index = _read_index(folder)
    names = [SINGLE] if index is None else list(dict.fromkeys(index.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadModelFile(folder, f"files are missing, was the download cut off? {_listed(missing)}")
    files = [MappedFile(folder / name) for name in names]
    parts = [_read_file(file) for file in files]
    held = {name: part for name, (part, _) in zip(names, parts, strict=True)}
    tensors = held[SINGLE] if index is None else _choose(folder, index, held)
    headers = [(file, start) for file, (_, start) in zip(files, parts, strict=True)]
    deciding = [MappedFile(folder / name) for name in (said if index is None else [*said, INDEX])]
    described = [(file, file.size) for file in deciding]
    return Checkpoint("safetensors", folder, config, tensors, [*described, *headers], generation)


# --- the folder -----------------------------------------------------------------------------------------------------


def _configuration(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration with what a file of its own says of quantisation, and the files that it is from."""
    config = read_json(folder / CONFIG)
    for name, method in _BESIDE.items():
        if not config.get(QUANTIZATION) and (folder / name).is_file():
            own = {"quant_method": method} | read_json(folder / name)
            return config | {QUANTIZATION: own}, [CONFIG, name]
    return config, [CONFIG]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None if the folder holds one file without an index."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            raise ModelNotFound(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        return None
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise BadModelFile(path, "weight_map must map the name of each tensor to a file")
    for tensor, name in index.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
            raise BadModelFile(path, f"{name!r} is no name of a .safetensors file in this folder", tensor=tensor)
    return index


def _choose(folder: Path, index: Mapping[str, str], held: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of the index, each from the file that the index says."""
    absent = [name for name, file in index.items() if name not in held[file]]
    if absent:
        raise BadModelFile(folder / INDEX, f"names tensors that its files do not hold: {_listed(absent)}")
    stray = [f"{name} in {file}" for file, tensors in held.items() for name in tensors if index.get(name) != file]
    if stray:
        log.warning("%s: %d tensors that the index does not name are ignored: %s", folder, len(stray), _listed(stray))
    return {name: held[file][name] for name, file in index.items()}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's folder; BadModelFile if it is none, or far too large."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise BadModelFile(path, f"is larger than {_JSON_LIMIT} bytes")
        return _parse_json(path, path.read_bytes())
    except FileNotFoundError:
        raise BadModelFile(path, "is missing; a model folder needs it") from None
    except OSError as error:
        raise BadModelFile(path, f"cannot be read: {error}") from error


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object in which no key occurs twice."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadModelFile(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadModelFile(path, "is not a JSON object")
    return value


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadModelFile(path, f"the key {name!r} occurs twice")
        found[name] = value
    return found


# --- one file -------------------------------------------------------------------------------------------------------


def _read_file(file: MappedFile) -> tuple[dict[str, Tensor], int]:
    """(tensors by name, where their data begins in bytes)."""
    length = int.from_bytes(file.buffer[:8], "little")
    if file.size < 8 or length > file.size - 8:
        raise BadModelFile(file.path, f"the header needs {length} bytes, but the file has {file.size}; was it cut off?")
    if length > _HEADER_LIMIT:
        raise BadModelFile(file.path, f"a header of {length} bytes; the limit is {_HEADER_LIMIT}")
    header = _parse_json(file.path, file.buffer[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    spans = {name: _span(file.path, name, entry) for name, entry in header.items()}
    _check_cover(file, {name: (begin, end) for name, (_, _, begin, end) in spans.items()}, file.size - start)
    tensors = {
        name: Tensor(name, shape, format, file.path, file.view(start + begin, end - begin))
        for name, (shape, format, begin, end) in spans.items()
    }
    return tensors, start


def _span(path: Path, name: str, entry: Any) -> tuple[tuple[int, ...], Format, int, int]:
    """Shape, format, first byte and end of a tensor, which fit each other."""
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets")), fields.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > _RANK_LIMIT:
        raise BadModelFile(path, "needs a shape and two data_offsets, all whole numbers from 0 on", tensor=name)
    format = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if format is None:
        raise BadModelFile(path, f"dtype {dtype!r} is not supported, only {', '.join(_DTYPES)}", tensor=name)
    begin, end = offsets
    length = math.prod(shape) * format.bytes
    if end - begin != length:
        raise BadModelFile(path, f"{dtype} {shape} takes {length} bytes, data_offsets are {offsets}", tensor=name)
    return tuple(shape), format, begin, end


def _sizes(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        return None
    return value


def _check_cover(file: MappedFile, spans: Mapping[str, tuple[int, int]], size: int) -> None:
    """The tensors cover the `size` bytes of data, each byte once."""
    for name, (_, end) in spans.items():
        if end > size:
            raise BadModelFile(file.path, f"ends at byte {end} of {size} bytes of data", tensor=name)
    at = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise BadModelFile(file.path, f"begins at byte {begin} of the data and {what}, to {at}", tensor=name)
        at = end
    if at != size:
        raise BadModelFile(file.path, f"has {size} bytes of data, its tensors take {at}")
