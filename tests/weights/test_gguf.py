"""The GGUF reader: what is right is read exactly, what is wrong is refused in words that name file and tensor."""

from __future__ import annotations

import dataclasses
import math
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelfiles import (
    ARRAY,
    BOOL,
    FLOAT,
    INT32,
    STRING,
    UINT16,
    UINT32,
    Described,
    described,
    gguf_bytes,
    plain_pairs,
    plain_tensors,
)

from headrace.base.errors import BadModelFile, HeadraceError, ModelNotFound
from headrace.base.formats import BY_GGML_TYPE, FORMATS, Format
from headrace.quant.blocks import dequantize
from headrace.weights import Checkpoint, open_checkpoint

Store = Callable[..., Path]
VALID = gguf_bytes(plain_pairs(), plain_tensors())


def refused(path: Path, match: str, tensor: str | None = None) -> None:
    with pytest.raises(BadModelFile, match=match) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert caught.value.tensor == tensor


# --- what is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read_as_written(stored: Store, version: int) -> None:
    checkpoint = open_checkpoint(stored(gguf_bytes(plain_pairs(), plain_tensors(), version=version)))
    assert checkpoint.kind == "gguf"
    assert checkpoint.config == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": ["<s>", "é", "", "日本", "🙂"],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
        "flags": [True, False, True],
        "nested": [[-1, 2], ["x"]],
    }
    assert checkpoint.generation == {}
    for written in plain_tensors():
        tensor = checkpoint.tensors[written.name]
        assert tensor.shape == written.dims[::-1] and tensor.format is BY_GGML_TYPE[written.kind]
        assert tensor.data.tobytes() == written.data and not tensor.data.flags.writeable
        assert tensor.rows().shape == (np.prod(tensor.shape[:-1]), tensor.format.row_bytes(tensor.shape[-1]))


def test_every_scalar_type(stored: Store) -> None:
    values = {0: 255, 1: -128, 2: 65535, 3: -32768, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 10: 2**64 - 1, 11: -(2**63)}
    values |= {12: 0.1}
    pairs = [(f"k{kind}", kind, value) for kind, value in values.items()]
    arrays = [(f"a{kind}", ARRAY, (kind, [value, value])) for kind, value in values.items()]
    config = open_checkpoint(stored(gguf_bytes(pairs + arrays, plain_tensors()))).config
    assert {kind: config[f"k{kind}"] for kind in values} == values
    assert {kind: config[f"a{kind}"] for kind in values} == {kind: [value, value] for kind, value in values.items()}


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_every_format_as_the_gguf_package_reads_it(stored: Store, format: Format) -> None:
    path = stored(gguf_bytes(plain_pairs(), [described("w", (3, 512), format)]))
    ours, theirs = open_checkpoint(path).tensors["w"], gguf.GGUFReader(path).tensors[0]
    assert np.asarray(theirs.data).tobytes() == ours.data.tobytes()
    expected = gguf.quants.dequantize(np.asarray(theirs.data), theirs.tensor_type)
    np.testing.assert_array_equal(dequantize(ours.format, ours.rows()), expected)


def test_a_file_written_by_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "w.gguf")
    assert checkpoint.config["tokenizer.ggml.tokens"] == ["a", "b"]
    for name in ("plain", "half"):
        tensor = checkpoint.tensors[name]
        np.testing.assert_array_equal(dequantize(tensor.format, tensor.rows()), values)


def test_views_outlive_release_and_close(stored: Store) -> None:
    checkpoint = open_checkpoint(stored(VALID))
    tensor = checkpoint.tensors["blk.0.attn_q.weight"]
    before = tensor.data.tobytes()
    checkpoint.release(tensor)
    assert tensor.data.tobytes() == before
    checkpoint.close()
    assert tensor.data.tobytes() == before and not checkpoint.tensors


def test_release_gives_memory_back(stored: Store) -> None:
    size = 32 << 20
    path = stored(gguf_bytes([], [Described("w", (size // 4,), 0, bytes(size))]))
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.tensors["w"]
    tensor.data.max()
    before = _mapped_resident()
    checkpoint.release(tensor)
    assert before - _mapped_resident() > size * 0.9


def _mapped_resident() -> int:
    """Bytes of file mappings in memory (Linux)."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("/proc/self/status is where resident memory is read, and this system has none")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_the_fingerprint_tells_models_apart_and_no_more(stored: Store) -> None:
    same = [open_checkpoint(stored(VALID, name)).fingerprint for name in ("a.gguf", "b.gguf")]
    assert same[0] == same[1] and len(same[0]) == 64
    tuned = [*plain_tensors()[:-1], described("blk.0.ffn_up.weight", (3, 5, 32), FORMATS["q4_1"], 99)]
    assert open_checkpoint(stored(gguf_bytes(plain_pairs(), tuned), "c.gguf")).fingerprint != same[0]
    named = [*plain_pairs(), ("general.name", STRING, "x")]
    assert open_checkpoint(stored(gguf_bytes(named, plain_tensors()), "d.gguf")).fingerprint != same[0]


def test_a_vocabulary_of_150000_opens_in_a_fifth_of_a_second(qwen_coder: Path) -> None:
    def opened() -> float:
        start = time.thread_time()  # of the processor: other programs on the machine do not count
        checkpoint = open_checkpoint(qwen_coder)
        taken = time.thread_time() - start
        assert len(checkpoint.config["tokenizer.ggml.tokens"]) == 151936
        return taken

    assert min(opened() for _ in range(3)) < 0.2


def test_a_real_file_reads_as_the_gguf_package_reads_it(smollm2: Path) -> None:
    ours, theirs = open_checkpoint(smollm2), gguf.GGUFReader(smollm2)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert mine.data.nbytes == tensor.n_bytes and bytes(mine.data[:64]) == np.asarray(tensor.data).tobytes()[:64]
    for key in ("llama.rope.freq_base", "tokenizer.ggml.merges", "tokenizer.chat_template"):
        assert ours.config[key] == theirs.fields[key].contents()


# --- split sets -----------------------------------------------------------------------------------------------------


def split_set(stored: Store, parts: int = 2, **overrides: object) -> list[Path]:
    """One tensor a part; overrides of the metadata of the last part, by key with "." written "__"."""
    tensors = plain_tensors()
    paths = []
    for number in range(parts):
        keys = {"split.no": (UINT16, number), "split.count": (UINT16, parts), "split.tensors.count": (INT32, parts)}
        if number == parts - 1:
            keys |= {key.replace("__", "."): value for key, value in overrides.items()}  # type: ignore[misc]
        pairs = [*(plain_pairs() if number == 0 else []), *((key, *value) for key, value in keys.items())]
        name = f"m-{number + 1:05}-of-{parts:05}.gguf"
        paths.append(stored(gguf_bytes(pairs, tensors[number : number + 1]), name))
    return paths


def test_a_split_set_is_one_checkpoint(stored: Store) -> None:
    paths = split_set(stored, 3)
    checkpoint = open_checkpoint(paths[0])
    assert checkpoint.path == paths[0] and checkpoint.config["general.architecture"] == "llama"
    assert [tensor.file for tensor in checkpoint.tensors.values()] == paths
    assert [t.data.tobytes() for t in checkpoint.tensors.values()] == [t.data for t in plain_tensors()[:3]]
    assert open_checkpoint(paths[0].parent).path == paths[0]


def test_a_part_that_is_not_there(stored: Store) -> None:
    paths = split_set(stored, 3)
    paths[1].unlink()
    refused(paths[0], paths[1].name)


def test_a_part_that_is_not_the_first(stored: Store) -> None:
    paths = split_set(stored)
    refused(paths[1], paths[0].name)


def test_a_part_under_another_name(stored: Store) -> None:
    refused(split_set(stored)[0].rename(stored(b"").parent / "renamed.gguf"), "is one of 2 parts")


@pytest.mark.parametrize("key", ["split__no", "split__count"])
def test_parts_that_do_not_belong_together(stored: Store, key: str) -> None:
    paths = split_set(stored, **{key: (UINT16, 7)})
    with pytest.raises(BadModelFile, match=key.replace("__", ".")) as caught:
        open_checkpoint(paths[0])
    assert caught.value.file == str(paths[1])


def test_a_part_with_tensors_missing(stored: Store) -> None:
    paths = split_set(stored)
    stored(gguf_bytes([("split.no", UINT16, 1), ("split.count", UINT16, 2)], []), paths[1].name)
    refused(paths[0], "split.tensors.count is 2, the parts hold 1")


def test_a_tensor_in_two_parts(stored: Store) -> None:
    paths = split_set(stored)
    pairs = [("split.no", UINT16, 1), ("split.count", UINT16, 2)]
    stored(gguf_bytes(pairs, plain_tensors()[:1]), paths[1].name)
    with pytest.raises(BadModelFile, match="is also in") as caught:
        open_checkpoint(paths[0])
    assert caught.value.tensor == "token_embd.weight"


# --- what is wrong --------------------------------------------------------------------------------------------------


def test_what_is_no_gguf(stored: Store) -> None:
    refused(stored(b""), "empty")
    refused(stored(b"GGUF"), "ends at 4")
    refused(stored(b"PK" + bytes(100)), "not a GGUF file")
    refused(stored(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "big-endian")
    refused(stored(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "version 1 is not supported")
    refused(stored(b"GGUF" + struct.pack("<IQQ", 4, 0, 0)), "version 4 is not supported")
    with pytest.raises(ModelNotFound, match=r"nowhere\.gguf"):
        open_checkpoint(Path("nowhere.gguf"))


@pytest.mark.parametrize("counts", [(2**62, 0), (0, 2**62), (2**64 - 1, 2**64 - 1), (10**6, 3)])
def test_counts_that_the_file_cannot_hold(stored: Store, counts: tuple[int, int]) -> None:
    refused(stored(gguf_bytes(plain_pairs(), plain_tensors(), counts=counts)), "more than")


@pytest.mark.parametrize("cut", [1, 100, 0.5, 0.1])
def test_a_file_cut_short(stored: Store, cut: float) -> None:
    kept = len(VALID) - cut if cut >= 1 else int(len(VALID) * cut)
    with pytest.raises(BadModelFile, match="ends at"):
        open_checkpoint(stored(VALID[: int(kept)]))


@pytest.mark.parametrize("alignment", [0, 1, 3, 24, 2**17, 2**30])
def test_an_alignment_that_cannot_be(stored: Store, alignment: int) -> None:
    path = stored(gguf_bytes([("general.alignment", UINT32, alignment)], plain_tensors()))
    refused(path, f"general.alignment is {alignment}")


def test_an_alignment_of_another_type(stored: Store) -> None:
    refused(stored(gguf_bytes([("general.alignment", STRING, "32")], plain_tensors())), "general.alignment")


def changed(**changes: object) -> bytes:
    """The plain file with its second tensor changed."""
    tensors = plain_tensors()
    tensors[1] = dataclasses.replace(tensors[1], **changes)  # type: ignore[arg-type]
    return gguf_bytes(plain_pairs(), tensors)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"offset": 2**63}, f"{2**63}.*ends at"),
        ({"offset": 2**64 - 32}, "ends at"),
        ({"offset": 8}, "offset 8 is no multiple of 32"),
        ({"dims": ()}, "0 dimensions"),
        ({"dims": (256, 1, 1, 1, 1)}, "5 dimensions"),
        ({"dims": (0, 4)}, "a dimension is 0"),
        ({"dims": (256, 0)}, "a dimension is 0"),
        ({"dims": (2**62, 2**62, 2**62, 2**62)}, "ends at"),
        ({"dims": (256, 2**56)}, "ends at"),
        ({"dims": (896, 4)}, "896 values are no whole number of blocks of 256"),
        ({"kind": 10}, r"type Q2_K \(10\) is not supported"),
        ({"kind": 23}, "IQ4_XS"),
        ({"kind": 4_000_000_000}, "unknown"),
    ],
)
def test_a_tensor_that_cannot_be(stored: Store, changes: dict[str, object], match: str) -> None:
    refused(stored(changed(**changes)), match, "blk.0.attn_q.weight")


def test_a_tensor_beyond_the_end(stored: Store) -> None:
    offset = (len(VALID) - 8) // 32 * 32
    refused(stored(changed(offset=offset)), str(offset), "blk.0.attn_q.weight")


def test_tensors_that_overlap(stored: Store) -> None:
    with pytest.raises(BadModelFile, match="lies inside") as caught:
        open_checkpoint(stored(changed(offset=32)))
    assert caught.value.tensor == "blk.0.attn_q.weight"


def test_names_that_occur_twice(stored: Store) -> None:
    refused(stored(changed(name="token_embd.weight")), "occurs twice", "token_embd.weight")
    refused(stored(gguf_bytes([("k", UINT32, 1), ("k", UINT32, 2)], plain_tensors())), "'k' occurs twice")


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        (("k", STRING, b"\xff"), "not UTF-8"),
        (("k", ARRAY, (STRING, ["ok", b"\xc3"])), "element 1 .*not UTF-8"),
        (("k", BOOL, 2), "boolean is 2"),
        (("k", ARRAY, (BOOL, [0, 7])), "booleans holds 7"),
        (("k" * 70000, UINT32, 1), "70000 bytes long"),
        (("k", ARRAY, (ARRAY, [(ARRAY, [(ARRAY, [(ARRAY, [(UINT32, [])])])])])), "more than 4 deep"),
    ],
)
def test_metadata_that_cannot_be(stored: Store, pair: tuple[str, int, object], match: str) -> None:
    refused(stored(gguf_bytes([pair], plain_tensors())), match)


@pytest.mark.parametrize("element", [0, FLOAT, BOOL, STRING, ARRAY, 13, 99])
@pytest.mark.parametrize("count", [2**20, 2**40, 2**63, 2**64 - 1])
def test_an_array_longer_than_the_file(stored: Store, element: int, count: int) -> None:
    lying = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", ARRAY, element, count)
    refused(stored(lying + bytes(64)), "k")


def test_the_last_string_of_an_array_ends_in_the_file(stored: Store) -> None:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", ARRAY, STRING, 2)
    refused(stored(head + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 5) + b"abcd"), "element 1 of 2 would end at")
    assert open_checkpoint(stored(head + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 4) + b"abcd")).tensors == {}


def test_arrays_that_would_fill_the_memory(stored: Store) -> None:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", ARRAY, 0, 2**24 + 1)
    refused(stored(head + bytes(2**24 + 64)), "all arrays together may have")


def test_a_type_of_metadata_that_nobody_knows(stored: Store) -> None:
    lying = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 13)
    refused(stored(lying + bytes(64)), "unknown type 13")


def test_a_folder_with_more_than_one_model(stored: Store) -> None:
    folder = stored(VALID, "a.gguf").parent
    assert open_checkpoint(folder).path.name == "a.gguf"
    stored(VALID, "b.gguf")
    refused(folder, r"a\.gguf, b\.gguf")


# --- any bytes ------------------------------------------------------------------------------------------------------


def in_bounds(checkpoint: Checkpoint, size: int) -> None:
    for tensor in checkpoint.tensors.values():
        assert tensor.data.nbytes == math.prod(tensor.shape) // tensor.format.block * tensor.format.bytes
        assert 0 < tensor.data.nbytes <= size
        tensor.rows().max()
    assert len(checkpoint.fingerprint) == 64


def survives(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.gguf"
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(path)
        except HeadraceError as error:
            assert isinstance(error, BadModelFile)
        else:
            in_bounds(checkpoint, len(content))


HEADER = len(VALID) - sum(len(t.data) for t in plain_tensors())
NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 1]
INTERESTING = st.sampled_from(NUMBERS)


@given(st.lists(st.tuples(st.integers(4, HEADER), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_changed_bytes_are_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    content = bytearray(VALID)
    for at, byte in changes:
        content[at] = byte
    survives(bytes(content))


@given(st.integers(4, HEADER), INTERESTING, st.sampled_from(["<I", "<Q"]))
@settings(max_examples=400, deadline=None)
def test_changed_numbers_are_refused_or_harmless(at: int, number: int, kind: str) -> None:
    content = bytearray(VALID)
    width = struct.calcsize(kind)
    content[at : at + width] = struct.pack(kind, number % 256**width)
    survives(bytes(content))


@given(st.integers(0, len(VALID)), st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_truncation_and_other_ends_are_refused_or_harmless(kept: int, end: bytes) -> None:
    survives(VALID[:kept] + end)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_after_the_magic_is_refused_or_harmless(noise: bytes) -> None:
    survives(b"GGUF" + struct.pack("<I", 3) + noise)
