"""Floor 1: the op vocabulary, the recorder of programs, and what each op means. Knows no device and no request."""

from headrace.program.program import Op, Program, Value, Weight
from headrace.program.recorder import Recorder, StepInputs
from headrace.program.rope import Rope
from headrace.program.step import Sampled, Sampling, Step
from headrace.program.weights import Layout, Part, WeightData, WeightSource

__all__ = [
    "Layout",
    "Op",
    "Part",
    "Program",
    "Recorder",
    "Rope",
    "Sampled",
    "Sampling",
    "Step",
    "StepInputs",
    "Value",
    "Weight",
    "WeightData",
    "WeightSource",
]
