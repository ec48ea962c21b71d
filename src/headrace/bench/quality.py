"""How good models are at a text, how far each is from a reference, how large it is and how fast.

Owes: figures of the very arithmetic that serves: each model runs as its settings say, through its own executor. Held at
a time: the reference and one other model, and of each LOGITS_BYTES of logits, whatever the vocabulary; a window is cut
into as many steps as that takes, which changes no bit. Does not know the command line, or how figures are shown.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import EngineError, SettingError
from headrace.base.settings import PAGE, EngineSettings
from headrace.bench.offline import opened
from headrace.bench.step import StepBench
from headrace.engine.llm import LLM
from headrace.engine.loading import find
from headrace.program import Step
from headrace.quant.quality import F32, F64, Ids, Mean, compare, negative_log_likelihood
from headrace.text import Tokenizer
from headrace.weights.report import MOST_NAME, Quality, save_quality

LOGITS_BYTES = 1 << 26
Window = list[int]
Done = Callable[[str, int], None]

_ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_inter_token_ms": 0}
_NO_PART = {"model", "speculative_config", *_ALONE}  # settings that change no answer, or that measuring needs
_SETTING = re.compile(r",(?=[a-z_]+=)")
_PROMPT, _DECODED, _STEPS = 512, 128, 32  # tokens whose speeds are measured


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as it is run. name: what a table calls it. given: the settings that were asked for."""

    name: str
    settings: EngineSettings
    given: dict[str, Any]

    @classmethod
    def of(cls, text: str, context: int) -> Variant:
        """``REFERENCE,setting=value,...``: a model reference, and names of `EngineSettings` with values, which are JSON
        or else plain words. context: tokens that it must take at a time. SettingError for what cannot be.
        """
        model, *pairs = _SETTING.split(text)
        given = {name: _value(value) for name, _, value in (pair.partition("=") for pair in pairs)}
        if refused := _NO_PART & given.keys():
            name = min(refused)
            raise SettingError(f"{name} has no part in what is measured here; leave it out of {text!r}", param=name)
        longer = {"max_model_len": context} if context > 8192 else {}
        name = ",".join([Path(model).name, *pairs])
        return cls(name, EngineSettings.of(model, **longer | _ALONE | given), given)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured, on which text.

    text: what models are evaluated on; its first tokens count. tokens: of all windows. context: tokens of a window,
    which knows nothing of the others; each begins with what the model wants before a text, and all but its first
    token are predicted. speed: also measure steps.
    """

    text: str
    tokens: int = 4096
    context: int = 512
    speed: bool = True

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("context", 2)):
            if getattr(self, name) < least:
                raise SettingError(f"{name} must be at least {least}, got {getattr(self, name)}", param=name)


def windows(tokenizer: Tokenizer, asked: Asked) -> list[Window]:
    """The text in windows of token ids, `asked.tokens` in all if the text has them. A last token alone is left out."""
    prefix = list(tokenizer.prefix)
    step = asked.context - len(prefix)
    if step < 1:
        raise SettingError(f"context must be above {len(prefix)}, got {asked.context}", param="context")
    ids = tokenizer.encode(asked.text, add_special_tokens=False, parse_special=False)
    cut = [prefix + ids[at : at + step] for at in range(0, len(ids), step)]
    full, rest = divmod(asked.tokens, asked.context)
    kept = [*cut[:full], *(window[:rest] for window in cut[full : full + 1])]
    if not (whole := [window for window in kept if len(window) >= 2]):
        raise SettingError("the text is too short: nothing of it can be predicted", param="text")
    return whole


def evaluate(
    variants: Sequence[Variant], against: Variant | None, asked: Asked, done: Done = lambda name, tokens: None
) -> dict[str, Any]:
    """A row of figures for each variant, after one for the reference if there is one; what was read.

    done: is told which variant has gone through how many more tokens. SettingError for models that do not share a
    vocabulary.
    """
    rows: list[dict[str, Any]] = []
    text: list[Window] = []
    with ExitStack() as held:
        reference = held.enter_context(_Opened(against)) if against else None
        first = reference
        for number, variant in enumerate(variants):
            with _Opened(variant) as model:
                first = first or model
                text = text or windows(first.tokenizer, asked)
                model.must_speak_as(first, text)
                scores = _scored(model, reference, text, partial(done, variant.name))
                if reference and number == 0:
                    rows.append(reference.told(asked) | _likelihood(scores["reference_nll"]))
                rows.append(model.told(asked) | _figures(scores))
    return {"rows": rows, "windows": len(text), "ids_sha256": _digest(text)}


def save(variant: Variant, row: dict[str, Any], against: Variant, text: str) -> Path:
    """A row of `evaluate` into the report beside the variant's model, whose path is returned."""
    quality = Quality(
        **{name: row[name] for name in ("perplexity", "kl_mean", "kl_p99", "top1", "tokens")},
        against=against.name[:MOST_NAME],
        text=text[:MOST_NAME],
    )
    return save_quality(find(variant.settings), row["identity"], quality)


class _Opened:
    """A loaded model that predicts windows."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._llm: LLM = opened(variant.settings)
        self.tokenizer, self.info = self._llm.get_tokenizer(), self._llm.info
        self._executor = self._llm.engine.model.executor
        rows = min(variant.settings.max_num_batched_tokens, LOGITS_BYTES // (4 * self.info.vocab_size))
        if self.info.slots:  # what the rows see must lie in them, whole pages at both ends
            rows = min(rows, (self.info.slots - 2) * PAGE - self.info.window)
        self.rows = max(1, rows)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self._llm.close()

    def must_speak_as(self, other: _Opened, text: Sequence[Window]) -> None:
        """SettingError unless both have one vocabulary, but for padding at its end, and take such windows."""
        name, ours, theirs = self.variant.name, self.tokenizer, other.tokenizer
        common = min(self.info.vocab_size, other.info.vocab_size)
        same = ours.prefix == theirs.prefix and max(map(max, text)) < common
        if not same or any(ours.token_bytes(id) != theirs.token_bytes(id) for id in range(common)):
            raise SettingError(
                f"{name} and {other.variant.name} have different vocabularies: what they predict cannot be compared",
                param="against",
            )
        if (longest := max(map(len, text))) > min(self.info.max_model_len, other.info.max_model_len):
            raise SettingError(f"context is {longest}, and {name} or the reference takes less", param="context")

    def logits(self, window: Window, start: int, end: int) -> F32:
        """Of the tokens start to end of a window whose tokens before start are in the cache: [rows, vocabulary]."""
        logits = self._executor.run(Step.alone(window[:end], start, keep_logits=True, slots=self.info.slots)).logits
        assert logits is not None
        logits = logits[:, : self.info.vocab_size]
        if not np.isfinite(logits).all():
            raise EngineError(f"{self.variant.name}: logits are not finite between tokens {start} and {end}")
        return logits

    def told(self, asked: Asked) -> dict[str, Any]:
        """What it is, how large, and how fast."""
        info = self.info
        return {
            "name": self.variant.name,
            "model": self.variant.settings.model,
            "settings": self.variant.given,
            "identity": self._llm.engine.identity,
            "bytes": info.weight_bytes,
            "bits": 8 * info.weight_bytes / info.parameters,
            "kv_bytes_a_token": (info.page_bytes + info.slot_bytes) / PAGE,
            **(self._speeds() if asked.speed and self.variant.settings.backend == "cpu" else {}),
        }

    def _speeds(self) -> dict[str, float]:
        bench, longest = StepBench(self._llm), self.info.max_model_len
        prompt, decoded, steps = min(_PROMPT, longest - 1), min(_DECODED, longest // 2), min(_STEPS, longest // 4)
        return {
            "prefill_tokens_per_s": bench.prefill(prompt)["tokens_per_s"],
            "decode_tokens_per_s": bench.decode(1, decoded, steps)["tokens_per_s"],
        }


def _scored(
    model: _Opened, reference: _Opened | None, text: Sequence[Window], done: Callable[[int], None]
) -> dict[str, F64]:
    """What was measured of each token but the windows' first, in turn."""
    columns: dict[str, list[Any]] = {}
    for window, start, end in _chunks(text, min(model.rows, reference.rows if reference else model.rows)):
        ids: Ids = np.array(window[start + 1 : end + 1], np.int32)
        logits = model.logits(window, start, end)
        if reference is None:
            found: dict[str, Any] = {"nll": negative_log_likelihood(logits, ids)}
        else:
            expected = reference.logits(window, start, end)
            known = min(logits.shape[1], expected.shape[1])
            compared = compare(expected[:, :known], logits[:, :known], ids)
            found = {name: getattr(compared, name) for name in ("nll", "reference_nll", "kl", "agreed")}
        for name, values in found.items():
            columns.setdefault(name, []).append(np.asarray(values, np.float64))
        done(end - start)
    return {name: np.concatenate(pieces) for name, pieces in columns.items()}


def _chunks(text: Sequence[Window], rows: int) -> Iterator[tuple[Window, int, int]]:
    for window in text:
        for start in range(0, len(window) - 1, rows):
            yield window, start, min(start + rows, len(window) - 1)


def _figures(scores: dict[str, F64]) -> dict[str, Any]:
    told = _likelihood(scores["nll"])
    if "kl" in scores:
        told |= _with_error("nll_delta", scores["nll"] - scores["reference_nll"]) | _with_error("kl_mean", scores["kl"])
        told |= {"kl_p99": float(np.quantile(scores["kl"], 0.99)), "kl_max": float(scores["kl"].max())}
        told |= _with_error("top1", scores["agreed"])
    return told


def _likelihood(nll: F64) -> dict[str, Any]:
    mean = Mean.of(nll)
    perplexity = math.exp(mean.value)
    error = None if mean.error is None else perplexity * mean.error
    return {"tokens": len(nll), **_with_error("nll", nll), "perplexity": perplexity, "perplexity_se": error}


def _with_error(name: str, values: F64) -> dict[str, Any]:
    mean = Mean.of(values)
    return {name: mean.value, f"{name}_se": mean.error}


def _digest(text: Sequence[Window]) -> str:
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()
