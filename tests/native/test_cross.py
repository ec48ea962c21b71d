"""Kernels of machines that this one isn't: Arm's, compiled by Debian's cross compiler and run by qemu, give the bits of
this machine's. What is compared is digests of every kernel's results: see cross/digest.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "cross"
ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


def tool(name: str) -> str:
    """A program of the environment that runs the tests, or of the machine."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or name


def built(folder: Path, *options: str) -> Path:
    make = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    for call in (["-G", "Ninja", make, "-DCMAKE_BUILD_TYPE=", *options, "-S", HERE, "-B", folder], ["--build", folder]):
        done = subprocess.run([tool("cmake"), *call], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "digest"


def lines(*command: str | Path) -> list[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in (ARM[2].partition("=")[2], QEMU[0]) if not shutil.which(name)]
    if missing and os.environ.get("HEADRACE_REQUIRE_MODELS"):
        pytest.fail(f"{missing} are not installed")
    if missing:
        pytest.skip(f"{missing} are not installed (Debian: g++-aarch64-linux-gnu qemu-user)")
    return built(tmp_path_factory.mktemp("arm"), *ARM)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two builds
def test_every_instruction_set_of_both_families_gives_the_same_bits(native: Path, arm: Path) -> None:
    expected = lines(native, "scalar")
    assert len(expected) > 15
    here, there = lines(native), lines(*QEMU, arm)
    assert there == ["neon_i8mm", "neon_dot", "scalar"]
    results = {f"{name} here": lines(native, name) for name in here}
    results |= {f"{name} there": lines(*QEMU, arm, name) for name in there}
    for name, got in results.items():
        assert got == expected, name


@pytest.mark.slow
def test_amx_on_emulated_tiles_gives_the_same_bits(native: Path) -> None:
    if "avx512" not in lines(native):
        pytest.skip("the rest of AMX's kernels are AVX-512's, which this machine lacks")
    assert lines(native, "amx_emulated") == lines(native, "scalar")
