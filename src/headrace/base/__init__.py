"""Floor 0: errors, settings, formats, log. Imports nothing of the project."""
