"""How tokens are guessed before the model has computed them: vLLM's `speculative_config`, checked.

Owes: a `SettingError` that names the key for what cannot be. Does not know: how anything is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.base.errors import SettingError
from headrace.base.formats import ENCODED

FIELD = "speculative_config"
METHODS = ("ngram", "suffix", "self", "draft_model")
MOST = 16  # tokens that may be drafted after one
MOST_KEPT = 1 << 18  # tokens of earlier sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Names are vLLM's.

    method: "ngram" goes on as the text did where its last prompt_lookup_min to prompt_lookup_max tokens stood before;
    "suffix" the same with as many tokens as agree; "self", which vLLM has not, asks a copy of the model in 4 bits;
    "draft_model" asks another, smaller model with the same tokens, the reference `model`, which alone means it too;
    quantization: what its float weights become as they are loaded.
    num_speculative_tokens: the most that are drafted after one token.
    shared_history_tokens: of "suffix": the most of earlier sequences that are kept to look in, too, each for those of
    the same API key and cache_salt alone.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 32
    shared_history_tokens: int = 0
    model: str = ""
    quantization: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Speculation:
        """From a setting, such as ``{"method": "suffix"}``."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise _wrong(str(name)[:60], f"is not known; known: {', '.join(sorted(known))}")
        config = {"method": "draft_model"} | dict(given) if "model" in given else dict(given)
        if config.get("method") not in METHODS:
            raise _wrong("method", f"must be one of {', '.join(METHODS)}, got {config.get('method')!r}")
        if config["method"] == "ngram":  # vLLM's defaults: one for the other, or 5
            low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
            both = [value for value in (low, high) if value is not None] or [5]
            config["prompt_lookup_min"], config["prompt_lookup_max"] = both[0], both[-1]
        made = cls(**config)
        made._check()
        return made

    def _check(self) -> None:
        bounds = {"num_speculative_tokens": MOST, "prompt_lookup_max": 1024, "prompt_lookup_min": 1024}
        for name, most in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise _wrong(name, f"must be from 1 to {most}, got {value!r}")
        kept = self.shared_history_tokens
        if (
            isinstance(kept, bool)
            or not isinstance(kept, int)
            or not 0 <= kept <= MOST_KEPT * (self.method == "suffix")
        ):
            raise _wrong("shared_history_tokens", f"is of method suffix, and from 0 to {MOST_KEPT}, got {kept!r:.40}")
        drafting = self.method == "draft_model"
        if not isinstance(self.model, str) or "\0" in self.model or bool(self.model.strip()) != drafting:
            raise _wrong("model", "must be a model reference with method draft_model, and is of no use with others")
        if self.quantization is not None and not (drafting and self.quantization in ENCODED):
            raise _wrong("quantization", f"is of method draft_model, and one of {', '.join(ENCODED)}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _wrong("prompt_lookup_min", f"must be at most prompt_lookup_max ({self.prompt_lookup_max})")


def _wrong(name: str, why: str) -> SettingError:
    return SettingError(f"{FIELD}.{name} {why}", param=f"{FIELD}.{name}")
