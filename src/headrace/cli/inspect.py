"""``headrace inspect``: what a model is made of, without loading it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headrace.base.log import to_stderr
from headrace.base.settings import DEFAULT_MODEL
from headrace.cli.flags import ModelArgument
from headrace.runtime.load import prepare
from headrace.weights import resolve
from headrace.weights.inspect import Description, Group, describe


def run(
    model: ModelArgument = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Architecture, formats by tensor group, bytes, context, KV bytes a token."""
    to_stderr()
    prepared = prepare(resolve(model, revision=revision))
    about = describe(prepared.checkpoint)
    facts = _facts(about, prepared)
    if as_json:
        print(json.dumps({**facts, "groups": {group.name: _group(group) for group in about.groups}}, indent=1))
        return
    for name, value in facts.items():
        print(f"{name:<20}{value:,}" if isinstance(value, int) else f"{name:<20}{value}")
    print(f"\n{'group':<12}{'tensors':>8}{'values':>15}{'bytes':>15}  formats")
    for group in about.groups:
        formats = ", ".join(f"{name} x{count}" for name, count in group.formats.items())
        print(f"{group.name:<12}{group.tensors:>8}{group.values:>15,}{group.bytes:>15,}  {formats}")


def _facts(about: Description, prepared: Any) -> dict[str, Any]:
    config = prepared.config
    return {
        "path": str(about.path),
        "kind": about.kind,
        "name": about.name,
        "architecture": config.architecture,
        "values": about.values,
        "bytes": about.bytes,
        **({"quantised": about.scheme} if about.scheme else {}),
        "bits_a_value": f"{8 * about.bytes / max(about.values, 1):.2f}",
        "layers": config.layers,
        "width": config.dim,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab,
        "context": config.context,
        "kv_bytes_a_token": int(prepared.kv_bytes_per_token()),
    }


def _group(group: Group) -> dict[str, Any]:
    return {"tensors": group.tensors, "values": group.values, "bytes": group.bytes, "formats": group.formats}
