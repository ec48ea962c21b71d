"""Floor 6: requests over time, and the process around them. Knows nothing of HTTP."""
