"""Rotary position embedding: which angle each pair of a head turns by at each position.

Pairs are (i, i + rotary/2), "NeoX" order; a checkpoint with interleaved pairs has its rows reordered when loaded.
Sources: RoFormer (Su et al. 2021); linear interpolation (Chen et al. 2023); YaRN (Peng et al. 2023); Llama 3's
frequency bands as in Hugging Face's `rope_type: llama3`; per-frequency factors as in GGUF's `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn into angles.

    rotary: how many of a head's values turn (even, at most the head size).
    factor, low, high, original: of the kinds `linear`, `llama3` (all four) and `yarn` (factor, original, and the
        betas).
    freq_factors: divides each pair's frequency (length rotary/2) when the file brings them; empty otherwise.
    attention_factor: multiplies cos and sin; None lets `yarn` take 0.1 ln(factor) + 1, others 1.
    """

    rotary: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()

    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position for each pair, float64 [rotary/2]."""
        base = self.theta ** (-np.arange(0, self.rotary, 2, dtype=np.float64) / self.rotary)
        scaled = {
            "default": lambda f: f,
            "linear": lambda f: f / self.factor,
            "llama3": self._llama3,
            "yarn": self._yarn,
        }
        out: NDArray[np.float64] = scaled[self.kind](base)
        return out / np.asarray(self.freq_factors, np.float64) if self.freq_factors else out

    def _llama3(self, base: NDArray[np.float64]) -> NDArray[np.float64]:
        wave = 2 * math.pi / base
        smooth = (self.original / wave - self.low) / (self.high - self.low)
        mixed = (1 - smooth) * base / self.factor + smooth * base
        out = np.where(wave > self.original / self.low, base / self.factor, mixed)
        return np.where(wave < self.original / self.high, base, out)

    def _yarn(self, base: NDArray[np.float64]) -> NDArray[np.float64]:
        def pair_of(turns: float) -> float:  # the pair that makes `turns` full turns over the original context
            return self.rotary * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), self.rotary - 1)
        ramp = np.clip((np.arange(self.rotary // 2) - low) / max(high - low, 1e-3), 0, 1)
        return base / self.factor * ramp + base * (1 - ramp)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0

    def table(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin, each float32 [positions, rotary/2], computed in float64; every back end reads this table."""
        angle = np.arange(positions, dtype=np.float64)[:, None] * self.frequencies()[None, :]
        return (
            (np.cos(angle) * self.magnitude).astype(np.float32),
            (np.sin(angle) * self.magnitude).astype(np.float32),
        )
