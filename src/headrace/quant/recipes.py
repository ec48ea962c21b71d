"""Which tensor gets which format: recipes as data, and what takes a format's place where its blocks do not fit a row.

Names of tensors are GGUF's. Does not know models or files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from headrace.base.errors import SettingError
from headrace.base.formats import FORMATS, Format
from headrace.quant.encode import CODINGS

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
SIX: Mapping[str, str] = {base: "q6_k" for base in CODINGS if base != "q8_0"}

# Where a row is no whole number of blocks: llama.cpp's choices (src/llama-quant.cpp).
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
FALLBACK |= dict.fromkeys(("q8_0", "q5_0", "q5_1", "q4_1", "q4_0"), "f16")

_LAYER = re.compile(r"blk\.(\d+)\.")
_CHOICES = (*CODINGS, "f16", "bf16", "f32")


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors whose name fits `pattern` (as a shell's) get `format[base]`, or keep the base format.

    some: of the layers only those of the first and last eighth, and every third between them: where llama.cpp's
    mixes spend bits too.
    """

    pattern: str
    format: Mapping[str, str]
    some: bool = False


# The first rule that fits counts. A tied embedding goes by the name of the head.
RECIPES: dict[str, tuple[Rule, ...]] = {
    "even": (),
    "mixed": (Rule(HEAD, SIX),),
    "medium": (Rule(HEAD, SIX), Rule("blk.*.attn_v.weight", SIX, True), Rule("blk.*.ffn_down*.weight", SIX, True)),
}


def recipe_named(name: str) -> tuple[Rule, ...]:
    """A recipe of the table, or of a JSON file: an object, pattern -> format. SettingError for anything else."""
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".json"):
        raise SettingError(f"recipe must be one of {', '.join(RECIPES)} or a .json file, got {name!r}", param="recipe")
    try:
        found = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"recipe {name!r} cannot be read: {error}", param="recipe") from None
    if not isinstance(found, dict) or not all(format in _CHOICES for format in found.values()):
        raise SettingError(
            f"recipe {name!r} must be an object of patterns and formats ({', '.join(_CHOICES)})", param="recipe"
        )
    return tuple(Rule(pattern, {base: str(format) for base in CODINGS}) for pattern, format in found.items())


def chosen(name: str, rules: tuple[Rule, ...], base: str, layers: int, tied: bool) -> Format:
    """The format of a tensor before its rows are looked at. tied: whether the embedding is the head as well."""
    name = HEAD if tied and name == EMBEDDING else name
    rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern) and _among(name, rule, layers)), None)
    return FORMATS[rule.format.get(base, base) if rule else base]


def fitting(format: Format, columns: int) -> Format:
    """`format`, or the first after it whose blocks fill a row."""
    while columns % format.block:
        format = FORMATS[FALLBACK[format.name]]
    return format


def _among(name: str, rule: Rule, layers: int) -> bool:
    match = _LAYER.match(name)
    if not rule.some or match is None:
        return True
    layer, eighth = int(match[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
