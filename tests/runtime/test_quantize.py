"""A quantised copy is the same model: every architecture from safetensors and from GGUF, every format, every method."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tiny
from headrace import LLM
from headrace.backends.registry import backend_named
from headrace.base.errors import BadModelFile, SettingError
from headrace.quant.encode import CODINGS
from headrace.quant.recipes import Rule, recipe_named
from headrace.runtime import quantize
from headrace.runtime.calibrate import Calibration
from headrace.runtime.load import prepare
from headrace.runtime.quantize import METHODS, QuantizeSettings, quantize_model
from headrace.text import Tokenizer
from headrace.text.export import PROBE
from headrace.weights import Checkpoint
from steps import World
from tiny_model import FLOATS, TEMPLATE, write_tiny

WHOLE = [{0: 48, 1: 48}]
IN_FLOATS = (Rule("*", dict.fromkeys(CODINGS, "f32")),)


def error_of(path: Path, kind: str) -> float:
    ids, logits = tiny.expected(kind)
    return float(np.abs(np.stack(World(tiny.load(path).executor, ids, 8).feed(WHOLE)) - logits).max())


def bytes_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_architecture_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    """In float32, so that nothing but names, order and numbers of the model can differ; and once more from the copy."""
    prepared = prepare(tiny.with_tokenizer(tmp_path / kind, kind))
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    quantize.write(quantize.plan(prepared, "q8_0", IN_FLOATS), prepared, first, quantize._plain)
    assert error_of(first, kind) < 1e-4
    copied = prepare(first)
    quantize.write(quantize.plan(copied, "q8_0", IN_FLOATS), copied, second, quantize._plain)
    one, other = prepare(first).checkpoint, prepare(second).checkpoint
    assert one.config == other.config
    assert {n: t.data.tobytes() for n, t in one.tensors.items()} == {
        n: t.data.tobytes() for n, t in other.tensors.items()
    }


def test_a_tied_head_stays_tied_and_vectors_stay_floats(tmp_path: Path) -> None:
    kind = "llama-tied-llama3-rope"
    made = quantize_model(
        prepare(tiny.with_tokenizer(tmp_path / kind, kind)),
        tmp_path / "m.gguf",
        QuantizeSettings(to="q4_0", method="plain"),
    )
    tensors = prepare(tmp_path / "m.gguf").checkpoint.tensors
    assert "output.weight" not in tensors and "rope_freqs.weight" in tensors
    assert {t.format.name for t in tensors.values() if len(t.shape) == 1} == {"f32"}
    assert tensors["token_embd.weight"].format.name == "q8_0"  # q6_k, if its rows were whole blocks
    assert made.replaced


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("to", CODINGS)
def test_every_format_by_every_method_says_almost_the_same(to: str, method: str, tmp_path: Path) -> None:
    source, path = write_tiny(tmp_path / "tiny.gguf", FLOATS), tmp_path / "small.gguf"
    settings = QuantizeSettings(to=to, method=method, calibration_tokens=512, recipe="even")
    quantize_model(prepare(source), path, settings)
    tensors = prepare(path).checkpoint.tensors.values()
    assert {t.format.name for t in tensors if len(t.shape) == 2} == {to}
    assert path.stat().st_size < 0.4 * source.stat().st_size
    drift = np.abs(logits_of(path) - logits_of(source)).mean() / np.abs(logits_of(source)).mean()
    print(to, method, drift)
    assert drift < {"q8_0": 0.08, "q6_k": 0.2}.get(to, 0.7)  # random weights are hard to round; another model has 1.4


def logits_of(path: Path) -> np.ndarray:
    ids = np.random.default_rng(2).integers(3, 300, (2, 48)).tolist()
    return np.stack(World(tiny.load(path).executor, ids, 8).feed(WHOLE))


def test_the_copy_talks_like_the_model(tmp_path: Path) -> None:
    """Prompt, template and, with eight bits, greedy answers; the tokenizer is read out of the GGUF file."""
    folder, path = tiny.with_tokenizer(tmp_path / "qwen2", "qwen2"), tmp_path / "m.gguf"
    quantize_model(prepare(folder), path, QuantizeSettings())
    ours, theirs = Tokenizer.from_folder(folder), Tokenizer.from_gguf(prepare(path).checkpoint.config)
    assert ours.encode(PROBE) == theirs.encode(PROBE) and ours.stop_ids == theirs.stop_ids
    assert theirs.chat_template == TEMPLATE and theirs.encode("") == [theirs.bos_id]
    with LLM(str(path), max_model_len=128) as llm:
        assert llm.generate("hello")[0].outputs[0].token_ids


def test_calibration_sees_what_the_reference_sees(tmp_path: Path) -> None:
    """Moments of every input, within any bound on memory: a smaller one runs the text again, and gives the same."""
    prepared = prepare(write_tiny(tmp_path / "tiny.gguf", FLOATS))
    sequences = [list(range(3, 103)), list(range(50, 90))]
    runs: Counter[str] = Counter()

    def opened(backend: str, full: bool, bound: int) -> Calibration:
        done = lambda tokens: runs.update({f"{backend} {bound}": tokens})  # noqa: E731
        return Calibration(prepared, backend_named(backend, taps=True), sequences, full=full, bound=bound, done=done)

    large, small, diagonal = opened("cpu", True, 1 << 30), opened("cpu", True, 1 << 20), opened("cpu", False, 1 << 30)
    reference = opened("reference", True, 1 << 30)
    for weight in ("0.attn.qkv", "0.mlp.down", "1.attn.o", "1.mlp.gate_up", "head", "embed"):
        moments = [calibration.moments(weight) for calibration in (large, small, diagonal, reference)]
        assert all(m is not None for m in moments)
        np.testing.assert_array_equal(moments[0], moments[1])
        np.testing.assert_allclose(moments[0].diagonal(), moments[2], rtol=1e-4)
        np.testing.assert_allclose(moments[2], moments[3].diagonal(), rtol=0.05)
    assert large.moments("norm") is None
    assert runs[f"cpu {1 << 20}"] > runs[f"reference {1 << 30}"] == sum(map(len, sequences))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"to": "q3_k"}, "to"),
        ({"method": "magic"}, "method"),
        ({"calibration_tokens": 0}, "calibration_tokens"),
        ({"threads": -1}, "threads"),
        ({"calibration_bytes": 0}, "calibration_bytes"),
    ],
)
def test_settings_that_cannot_be(change: dict, param: str) -> None:
    with pytest.raises(SettingError) as raised:
        QuantizeSettings(**change)
    assert raised.value.param == param


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    quantised, path = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "m.gguf"
    with pytest.raises(SettingError, match="already") as raised:
        quantize_model(prepare(quantised), path, QuantizeSettings())
    assert raised.value.param == "src"
    floats = write_tiny(tmp_path / "floats.gguf", FLOATS)
    for calibration in (tmp_path / "none.txt", floats):
        with pytest.raises(SettingError) as raised:
            quantize_model(prepare(floats), path, QuantizeSettings(calibration=calibration))
        assert raised.value.param == "calibration"

    def huge(name: str, values: np.ndarray) -> None:
        if name == "blk.1.ffn_up.weight":
            values[3, 3] = 1e9  # more than a half can say as a step

    large = write_tiny(tmp_path / "large.gguf", FLOATS, edit=huge)
    with pytest.raises(BadModelFile, match=r"blk\.1\.ffn_up"):
        quantize_model(prepare(large), path, QuantizeSettings(to="q4_0", method="plain"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["floats.gguf", "large.gguf", "tiny.gguf"]
    quantize_model(prepare(quantised), path, QuantizeSettings(allow_requantize=True, method="plain"))
    assert path.is_file()


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    folder = tiny.with_tokenizer(tmp_path / "smollm3", "smollm3")
    config = json.loads((folder / "config.json").read_text())
    config["no_rope_layers"] = [0] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelFile, match="turns q and k"):
        quantize.plan(prepare(folder), "q8_0", recipe_named("even"))
