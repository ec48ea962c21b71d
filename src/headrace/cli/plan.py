"""``headrace plan``: bytes of weights and KV cache before anything is loaded, and how many requests fit in a memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from headrace.backends.registry import backend_named
from headrace.base.errors import SettingError
from headrace.base.log import to_stderr
from headrace.base.settings import DEFAULT_MODEL, PAGE, EngineSettings
from headrace.base.speculation import Speculation
from headrace.cli.flags import COUNT, json_object
from headrace.runtime.plan import Subject, Weights, beside, of_numbers, of_path
from headrace.weights import resolve

SEQUENCES = (1, 8, 32)
CONTEXT = 8192
MOST = 1 << 20  # of any plain number
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

LEGEND = """Every matrix in one format, or in the one that takes its place where its blocks do not fill rows. Bytes of
memory, repacked; a process takes some 0.1 GB more."""
LEGEND_MS = "ms: what memory alone needs for a step in which so many sequences decode; no machine is faster."


def run(
    model: Annotated[
        str | None,
        typer.Argument(help="A model as for `serve`, or a config.json.", show_default=DEFAULT_MODEL),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="As `serve` has it; of a model.", show_default="auto")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization", "-q", metavar="FORMAT", help="As `serve` has it; of a model.", show_default="none"
        ),
    ] = None,
    speculative_config: Annotated[
        dict[str, Any] | None,
        typer.Option(
            "--speculative-config",
            "-sc",
            parser=json_object,
            metavar="JSON",
            help="As `serve` has it: who drafts, too.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=MOST, help="Without a model: its layers,")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, max=MOST, help="its heads of keys and values,")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, max=MOST, help="and their size;")] = None,
    bits: Annotated[
        float | None, typer.Option(min=1, max=64, help="bits of a key's element;", show_default="16")
    ] = None,
    parameters: Annotated[int | None, typer.Option(help="values in its weights, such as 7g.", **COUNT)] = None,
    memory: Annotated[int | None, typer.Option(help="Say what fits in it: 24G (GiB), 24g (10^9).", **COUNT)] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a request; 32K: 32,768.", show_default="the model's own, at most 8192", **COUNT),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests at once.", **COUNT)] = 8,
    bandwidth: Annotated[
        int | None,
        typer.Option(help="Bytes that memory gives a second, such as 50g: the least times of steps.", **COUNT),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """KV bytes a token, a context and a concurrency; weights in each format; what fits; how fast steps could be."""
    to_stderr()
    numbers = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size}
    extra = {"bits": bits, "parameters": parameters}
    _at_least_1(parameters=parameters, memory=memory, context=context, requests=requests, bandwidth=bandwidth)
    if any(value is not None for value in (*numbers.values(), *extra.values())):
        named = model or revision or kv_cache_dtype or quantization or speculative_config
        subject = _of_numbers(named is not None, numbers, extra)
    else:
        settings = EngineSettings.of(
            model or DEFAULT_MODEL,
            revision=revision,
            kv_cache_dtype=kv_cache_dtype or "auto",
            quantization=quantization,
            speculative_config=speculative_config,
        )
        subject = _of_settings(settings)
    told = _told(subject, _context(subject, context), requests, memory, bandwidth)
    print(json.dumps(told, indent=1) if as_json else _shown(told))


def _of_settings(settings: EngineSettings) -> Subject:
    """The model, with who drafts for it."""
    guesses = None if settings.speculative_config is None else Speculation.of(settings.speculative_config)
    copied, drafted = (guesses is not None and guesses.method == method for method in ("self", "draft_model"))
    backend = backend_named("cpu", kv=settings.kv_cache_dtype)
    path = resolve(settings.model, revision=settings.revision)
    subject = of_path(path, backend, settings.weight_format, copied)
    if guesses is None or not drafted:
        return subject
    return beside(subject, of_path(resolve(guesses.model), backend, guesses.quantization))


def _at_least_1(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise SettingError(f"{name} must be at least 1, got {value}", param=name)


def _of_numbers(named: bool, numbers: dict[str, int | None], extra: dict[str, Any]) -> Subject:
    """named: a model, or what only a model can have, was given beside numbers."""
    if named:
        given = [name for name, value in (numbers | extra).items() if value is not None]
        raise SettingError(f"{_flags(given)}: the model says these; give a model or numbers, not both", param=given[0])
    missing = [name for name, value in numbers.items() if value is None]
    if missing:
        raise SettingError(f"without a model, {_flags(missing)} must be given too", param=missing[0])
    return of_numbers(**numbers, bits=extra["bits"] or 16, values=extra["parameters"] or 0)  # type: ignore[arg-type]


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _context(subject: Subject, asked: int | None) -> int:
    own = subject.config.context if subject.config else asked or CONTEXT
    if asked is not None and asked > own:
        raise SettingError(f"context is {asked}, but this model was trained for {own} tokens", param="context")
    return asked or min(own, CONTEXT)


def _told(subject: Subject, context: int, requests: int, memory: int | None, bandwidth: int | None) -> dict[str, Any]:
    cache, config = subject.cache, subject.config
    told: dict[str, Any] = {}
    if config is not None:
        names = ("architecture", "layers", "kv_heads", "head_dim", "context")
        told["model"] = {name: getattr(config, name) for name in names} | {"values": subject.values}
    told["kv_cache"] = {
        "bytes_a_token": _plain(cache.token_bytes),
        "page_tokens": PAGE,
        "page_bytes": cache.page_bytes,
        "context": context,
        "bytes_a_request": cache.least_bytes(context),
        "requests": requests,
        "bytes": cache.bytes(context, requests),
    }
    if cache.parted(context):
        told["kv_cache"] |= {
            "window": cache.window,
            "slot_bytes": cache.window_bytes,
            "slots_a_request": cache.slots(context),
        }
    if memory is not None:
        told["memory"] = memory
    if memory is not None and not subject.weights:
        told["kv_cache"]["requests_that_fit"] = cache.requests(memory, context)
    told["weights"] = [_row(w, subject, context, requests, memory, bandwidth) for w in subject.weights]
    return told


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value


def _row(
    weights: Weights, subject: Subject, context: int, requests: int, memory: int | None, bandwidth: int | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "format": weights.format or "as served",
        "bits": round(8 * weights.bytes / subject.values, 2),
        "bytes": weights.bytes,
        "bytes_with_requests": weights.bytes + weights.drafter + subject.cache.bytes(context, requests),
    }
    if weights.drafter:
        row["drafter_bytes"] = weights.drafter
    if memory is not None:
        row["requests_that_fit"] = subject.cache.requests(memory - weights.bytes - weights.drafter, context)
    if bandwidth is not None:
        row["least_ms"] = {str(n): 1e3 * weights.step_bytes(n, context) / bandwidth for n in SEQUENCES}
    return row


# --- for people -----------------------------------------------------------------------------------------------------


def _shown(told: dict[str, Any]) -> str:
    kv, model = told["kv_cache"], told.get("model")
    lines = [f"{model['architecture']}, {model['layers']} layers, {model['values']:,} values"] if model else []
    facts = {
        "KV cache, a token": kv["bytes_a_token"],
        f"a page of {kv['page_tokens']}": kv["page_bytes"],
        f"{kv['context']:,} tokens": kv["bytes_a_request"],
        f"{kv['requests']} such requests": kv["bytes"],
    }
    lines += [f"{name:<22}{value:>20,} bytes  {_size(value):>9}" for name, value in facts.items()]
    if "window" in kv:
        lines.append(
            f"{'a window of ' + format(kv['window'], ','):<22}{kv['slots_a_request']:>20,} pages of layers that have it"
        )
    if "requests_that_fit" in kv:
        lines.append(f"{'fit in ' + _size(told['memory']):<22}{kv['requests_that_fit']:>20,}")
    if told["weights"]:
        lines += ["", *_aligned([_cells(row, told) for row in told["weights"]]), LEGEND]
        lines += [LEGEND_MS] if "least_ms" in told["weights"][0] else []
    return "\n".join(lines)


def _cells(row: dict[str, Any], told: dict[str, Any]) -> dict[str, str]:
    cells = {
        "weights": row["format"],
        "bits": f"{row['bits']:.2f}",
        "bytes": f"{row['bytes']:,}",
        **({"who drafts": f"{row['drafter_bytes']:,}"} if "drafter_bytes" in row else {}),
        f"with {told['kv_cache']['requests']} requests": _size(row["bytes_with_requests"]),
    }
    if "requests_that_fit" in row:
        cells[f"fit in {_size(told['memory'])}"] = f"{row['requests_that_fit']:,}"
    return cells | {f"ms at {n}": f"{ms:,.2f}" for n, ms in row.get("least_ms", {}).items()}


def _aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]


def _size(value: float) -> str:
    """Three digits, in decimal units as on data sheets."""
    unit, name = next(((u, n) for u, n in _UNITS if value >= u), (1.0, "B"))
    count = value / unit
    return f"{count:,.{max(0, 3 - len(str(int(count))))}f} {name}"
