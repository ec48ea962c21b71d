"""Floor 2: where a model's numbers come from. Views of files, and the references that lead to them."""

from headrace.weights.checkpoint import Checkpoint, Tensor
from headrace.weights.opening import open_checkpoint
from headrace.weights.references import pull, resolve

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "pull", "resolve"]
