"""A checkpoint that another library quantised, as if its weights were single tensors.

Owes: `understood`: for each module that has parts (quants, scales, ...) one matrix under the name of a plain weight, in
a block format of ours; a `BadModelFile` that names the part which is missing or wrong. The one place where packed files
and what they mean meet. Does not know models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from headrace.base.errors import BadModelFile
from headrace.base.formats import F16, F32, INTEGERS
from headrace.base.log import log
from headrace.quant.blocks import Bytes
from headrace.quant.packed import Outline, Scheme, Unfit, rows_of
from headrace.quant.schemes import scheme_of
from headrace.weights import Checkpoint, Tensor
from headrace.weights.checkpoint import PackedTensor
from headrace.weights.safetensors import CONFIG, QUANTIZATION


def understood(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the parts of packed weights put together; the same one if it has none.

    Cheap: reads shapes, and no weights. Raises `BadModelFile`.
    """
    config = checkpoint.config
    if checkpoint.kind != "safetensors" or config.get(QUANTIZATION) in (None, {}):
        return checkpoint
    try:
        scheme = scheme_of(config[QUANTIZATION])
    except Unfit as unfit:
        raise BadModelFile(checkpoint.path / CONFIG, f"{QUANTIZATION}: {unfit}") from None
    modules, tensors = _sorted(checkpoint, scheme)
    for module, parts in modules.items():
        name = f"{module}.weight"
        if name in tensors:
            raise BadModelFile(tensors[name].file, "is there as a plain weight and in packed parts", tensor=name)
        tensors[name] = _packed(scheme, name, module, parts)
    _note(checkpoint.path, [tensor for tensor in tensors.values() if isinstance(tensor, PackedTensor)])
    plain = {key: value for key, value in config.items() if key != QUANTIZATION}
    return checkpoint.understood(plain, tensors, scheme.about)


def _sorted(checkpoint: Checkpoint, scheme: Scheme) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(parts of each module by the ends of their names, all other tensors)."""
    modules: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        module, _, end = name.rpartition(".")
        if end in scheme.parts and (end != "weight" or tensor.format.name in INTEGERS):
            modules.setdefault(module, {})[end] = tensor
        elif end not in scheme.unused:
            others[name] = tensor
    return modules, others


def _packed(scheme: Scheme, name: str, module: str, parts: Mapping[str, Tensor]) -> PackedTensor:
    one = next(iter(parts.values()))
    for end, needed in scheme.parts.items():
        if needed and end not in parts:
            raise BadModelFile(
                one.file, f"is missing, which {scheme.about} needs beside {one.name}", tensor=f"{module}.{end}"
            )
    try:
        outline = scheme.outline(parts)
    except Unfit as unfit:
        raise _named(unfit, module, parts) from None
    largest = max(parts.values(), key=lambda part: part.data.nbytes)
    unpack = partial(_rows, scheme, module, outline)
    return PackedTensor(name, outline.shape, outline.format, largest.file, largest.data, parts, unpack)


def _rows(scheme: Scheme, module: str, outline: Outline, parts: Mapping[str, Tensor]) -> Bytes:
    try:
        return rows_of(scheme, parts, outline)
    except Unfit as unfit:
        raise _named(unfit, module, parts) from None


def _named(unfit: Unfit, module: str, parts: Mapping[str, Tensor]) -> BadModelFile:
    part = parts.get(unfit.part) or next(iter(parts.values()))
    return BadModelFile(part.file, str(unfit), tensor=f"{module}.{unfit.part}")


def _note(path: Path, packed: Collection[PackedTensor]) -> None:
    """Says what is not kept as it is."""
    wide = sum(any(part.format is F32 for part in tensor.parts.values()) for tensor in packed)
    if wide:
        log.warning(
            "%s: %d weights have float32 scales, which are rounded to float16: by 1 in 2,048 at most", path, wide
        )
    scattered = sum(tensor.format is F16 for tensor in packed)
    if scattered:
        log.warning(
            "%s: in %d weights the inputs of a group do not follow each other (act-order): they are taken as float16,"
            " which is large and slow; --quantization makes them small again",
            path,
            scattered,
        )
