"""Importing the package is cheap: its two lowest floors, and nothing heavy."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_its_two_lowest_floors() -> None:
    names = "*sorted(m for m in sys.modules if m.startswith('headrace.'))"
    code = f"import headrace, sys; print({names}, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[-1] == "False"
    assert {name.split(".")[1] for name in out[:-1]} == {"base", "core"}
