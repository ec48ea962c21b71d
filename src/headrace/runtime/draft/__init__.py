"""Guesses at the tokens to come, which a step then verifies for little more than it costs without them."""

from headrace.runtime.draft.lookup import History
from headrace.runtime.draft.speculator import Counts, Speculator

__all__ = ["Counts", "History", "Speculator"]
