"""From settings to a model that can take requests: the text side (tokenizer, template) and the engine.

The two sides open the same file in different processes under the server, and in one process under `LLM`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import headrace
from headrace import _native
from headrace.backends import Backend, Executor, Limits
from headrace.backends.registry import backend_named
from headrace.base.errors import SettingError
from headrace.base.log import shown
from headrace.base.settings import PAGE, EngineSettings
from headrace.base.speculation import Speculation
from headrace.engine.engine import Engine, cache_room, context_length, identity
from headrace.engine.messages import ModelInfo
from headrace.engine.requests import OWN, own_defaults
from headrace.runtime.cache import Cache, cache_of
from headrace.runtime.encoded import in_formats
from headrace.runtime.kvfile import PageFile, open_store
from headrace.runtime.load import Prepared, Smaller, copy_formats, load_model, prepare
from headrace.text import ChatTemplate, Tokenizer
from headrace.weights import Checkpoint, open_checkpoint, resolve
from headrace.weights.report import quality_of


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns words into ids and back. template: None when the model brings none and none was given."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def find(settings: EngineSettings) -> Path:
    """The model's file or folder on this machine, fetched if need be."""
    return resolve(settings.model, revision=settings.revision)


def load(settings: EngineSettings) -> tuple[TextSide, Engine]:
    """Both sides in this process, out of one reading of the file."""
    checkpoint = open_checkpoint(find(settings))
    text = open_text(settings, checkpoint)
    draft = find_draft(settings, text.tokenizer)
    return text, load_engine(settings, checkpoint, text.tokenizer.vocab_size, draft)


def find_draft(settings: EngineSettings, tokenizer: Tokenizer) -> tuple[str, int] | None:
    """The path of the model that drafts for one with this tokenizer, fetched if need be, and how many ids both have.

    None where nobody was asked for. SettingError if its tokens are others.
    """
    config = _speculation(settings)
    if config is None or config.method != "draft_model":
        return None
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    other = _tokenizer(checkpoint)
    checkpoint.close()
    differing = list(islice(tokenizer.differing(other), 3))
    if differing:
        ids = (f"{i} is {tokenizer.token_bytes(i)!r:.40}, there {other.token_bytes(i)!r:.40}" for i in differing)
        raise SettingError(
            f"speculative_config.model must know the tokens of the model that it drafts for, and {shown(config.model)} "
            f"has others, such as: {'; '.join(ids)}; choose a model of the same family",
            param="speculative_config.model",
        )
    return str(path), min(tokenizer.vocab_size, other.vocab_size)


def open_text(settings: EngineSettings, checkpoint: Checkpoint) -> TextSide:
    """The tokenizer and chat template that the settings ask for, or the model brings."""
    tokenizer = _tokenizer(open_checkpoint(resolve(settings.tokenizer)) if settings.tokenizer else checkpoint)
    text, with_tools = tokenizer.chat_template, tokenizer.chat_templates.get("tool_use")
    if settings.chat_template is not None:
        text, with_tools = _template_text(settings.chat_template), None
    template = None if text is None else ChatTemplate(text, tokenizer, with_tools)
    return TextSide(tokenizer, template)


def _tokenizer(source: Checkpoint) -> Tokenizer:
    return Tokenizer.from_gguf(source.config) if source.kind == "gguf" else Tokenizer.from_folder(source.path)


def _template_text(given: str) -> str:
    """A template given inline (it holds braces) or as the path of a file."""
    if "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"chat_template {given!r} cannot be read: {error}", param="chat_template") from error


def generation_of(settings: EngineSettings, checkpoint: Checkpoint) -> dict[str, Any]:
    """The sampling defaults that the settings ask for. SettingError for a file, or for fields, that cannot be used."""
    source, override = settings.generation_config, dict(settings.override_generation_config or {})
    usable, most, _ = own_defaults(override)
    for name in override.keys() - usable.keys() - {"max_new_tokens" if most is not None else ""}:
        why = f"{name!r} is no sampling default, or has a value that cannot be; known: max_new_tokens, {', '.join(OWN)}"
        raise SettingError(f"override_generation_config: {why}", param="override_generation_config")
    named = {"auto": checkpoint.generation, "vllm": {}}
    return {**(named[source] if source in named else _generation_file(Path(source))), **override}


def _generation_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "generation_config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"generation_config {str(path)!r} cannot be read: {error}", param="generation_config"
        ) from None
    if not isinstance(found, dict):
        raise SettingError(f"generation_config {str(path)!r} is no JSON object", param="generation_config")
    return found


def load_engine(
    settings: EngineSettings, checkpoint: Checkpoint, vocab_size: int, draft: tuple[str, int] | None = None
) -> Engine:
    """The engine of a model; closes its checkpoint. vocab_size: ids that the tokenizer knows; no other is drawn.

    draft: see `find_draft`.
    """
    start, path = time.perf_counter(), checkpoint.path
    backend = backend_named(settings.backend, settings.isa, settings.dtype == "bfloat16", settings.kv_cache_dtype)
    generation = generation_of(settings, checkpoint)
    prepared = prepare(checkpoint, settings.weight_format)
    parameters = sum(prod(tensor.shape) for tensor in prepared.checkpoint.tensors.values())
    context = context_length(settings, prepared.config.context)
    vocab = min(vocab_size, prepared.config.vocab)
    config = _speculation(settings)
    copied = config is not None and config.method == "self"
    smaller = None
    if draft is not None:
        smaller = Smaller(prepare(Path(draft[0]), config.quantization if config else None), draft[1])
    cache, weight_bytes = _needs(settings, prepared, backend, copied, smaller)
    room = cache_room(settings, context, cache, max(available_memory() - weight_bytes, 0))
    slot_bytes = cache.window_bytes if room.slots else 0
    limits = Limits(
        tokens=settings.max_num_batched_tokens if settings.kv_cache else max(settings.max_num_batched_tokens, context),
        sequences=settings.max_num_seqs,
        pages=room.pages,
        context=context,
        vocab=vocab,
        threads=settings.threads,
        slots=room.slots,
    )
    header = "" if settings.kv_cache_dir is None else pages_identity(settings, checkpoint, backend, slot_bytes)
    model = load_model(prepared, backend, limits, copied, smaller)
    info = ModelInfo(
        name=settings.model,
        architecture=prepared.config.architecture,
        max_model_len=context,
        vocab_size=vocab,
        page_tokens=PAGE,
        pages=limits.pages,
        page_bytes=cache.page_bytes - slot_bytes,
        slots=limits.slots,
        slot_bytes=slot_bytes,
        window=cache.window if limits.slots else 0,
        kv_cache_dtype=backend.kv,
        quantization=settings.weight_format or "",
        weight_bytes=model.executor.weight_bytes,
        max_logprobs=settings.max_logprobs,
        threads=model.executor.threads,
        isa=model.executor.isa,
        load_seconds=time.perf_counter() - start,
        parameters=parameters,
        trained_len=prepared.config.context,
        dim=prepared.config.dim,
        generation=generation,
        quality=quality_of(path, identity(model.fingerprint, settings, backend.kv)),
    )
    rates = model.executor.rates() if settings.measure_roof else None
    try:
        store = _store(settings, header, model.executor)
    except SettingError:
        model.close()
        raise
    return Engine(model, settings, info, limits.tokens, rates, store)


def _store(settings: EngineSettings, header: str, executor: Executor) -> PageFile | None:
    if settings.kv_cache_dir is None:
        return None
    folder, size = Path(settings.kv_cache_dir), settings.kv_cache_dir_bytes
    return open_store(folder, size, header, executor.page_bytes + executor.slot_bytes, executor.page)


# Settings on which no bit of a page depends. Whoever adds one that is not here makes another file of it.
HARMLESS = frozenset(
    {"model", "revision", "tokenizer", "chat_template", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    | {"max_num_queued_reqs", "max_num_queued_tokens", "max_inter_token_ms", "max_logprobs", "generation_config"}
    | {"override_generation_config", "enable_prefix_caching", "kv_cache", "kv_cache_memory_bytes", "kv_cache_dir"}
    | {"kv_cache_dir_bytes", "threads", "batching", "isa", "measure_roof", "speculative_config"}
)


def pages_identity(settings: EngineSettings, checkpoint: Checkpoint, backend: Backend, slot_bytes: int = 0) -> str:
    """What the bytes of KV pages depend on besides tokens: weights, engine, machine and settings.

    slot_bytes: what of a page lies in a slot.
    """
    told = {name: value for name, value in asdict(settings).items() if name not in HARMLESS}
    told |= {"weights": checkpoint.digest(), "code": code_digest(), "kv": backend.kv, "page": PAGE, "slot": slot_bytes}
    return json.dumps(told | {"bytes": sys.byteorder}, sort_keys=True)


def code_digest() -> str:
    """Of all files of this engine, 64 hex digits: what changes them may change a bit."""
    digest = hashlib.sha256()
    for path in sorted({Path(_native.__file__), *Path(headrace.__file__).parent.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _needs(
    settings: EngineSettings, prepared: Prepared, backend: Backend, copied: bool, smaller: Smaller | None
) -> tuple[Cache, int]:
    """What the KV cache takes, and bytes of the weights, those of who drafts with them."""
    program, layouts = prepared.program, prepared.layouts()
    cache = cache_of(program, backend, settings.max_num_batched_tokens)
    weight_bytes = backend.weight_bytes(program, layouts)
    if copied:
        weight_bytes += backend.weight_bytes(program, in_formats(layouts, copy_formats(program, layouts)))
    if smaller is not None:
        cache = replace(cache, page_bytes=cache.page_bytes + backend.page_bytes(smaller.prepared.program))
        weight_bytes += backend.weight_bytes(smaller.prepared.program, smaller.prepared.layouts())
    if not settings.kv_cache:  # nothing is kept, so nothing can be let go
        cache = replace(cache, window=0)
    return cache, weight_bytes


def _speculation(settings: EngineSettings) -> Speculation | None:
    """How tokens are guessed; None: not at all. Without a KV cache nothing is."""
    config = settings.speculative_config
    return None if config is None or not settings.kv_cache else Speculation.of(config)


def available_memory() -> int:
    """Bytes that this process may still take: what the system has left, or less under a cgroup's limit."""
    free = 1 << 62
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
