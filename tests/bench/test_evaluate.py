"""Models are evaluated as they are served, on tokens counted right, against a reference that speaks as they do."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny as checkpoints
from headrace import LLM, SamplingParams
from headrace.base.errors import CapacityError, SettingError
from headrace.bench import quality
from headrace.bench.quality import Asked, Variant, evaluate, windows
from headrace.runtime.texts import manual
from headrace.text import Tokenizer
from headrace.weights import open_checkpoint
from real import golden
from tiny_model import FLOATS, write_tiny

TEXT = "The assert statement. " * 40
ASKED = Asked(TEXT, tokens=100, context=40, speed=False)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("eval") / "floats.gguf", FLOATS)


def variant(path: Path, *settings: str, context: int = 40) -> Variant:
    return Variant.of(",".join([str(path), "threads=1", *settings]), context)


def prompt_nll(path: Path, text: list[list[int]], context: int = 1024) -> np.ndarray:
    """As requests get it."""
    with LLM(str(path), threads=1, max_model_len=context, max_num_seqs=8) as llm:
        outs = llm.generate(
            [{"prompt_token_ids": ids} for ids in text], SamplingParams(max_tokens=0, prompt_logprobs=0)
        )
    nats = []
    for ids, out in zip(text, outs, strict=True):
        assert out.prompt_logprobs is not None
        for entry, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True):
            assert entry is not None
            nats.append(-entry[token].logprob)
    return np.array(nats)


def test_the_figures_are_those_that_requests_get(tiny: Path) -> None:
    text = windows(Tokenizer.from_gguf(open_checkpoint(tiny).config), ASKED)
    assert [len(ids) for ids in text] == [40, 40, 20]
    (row,) = evaluate([variant(tiny)], None, ASKED)["rows"]
    nats = prompt_nll(tiny, text)
    assert row["tokens"] == len(nats) == 97
    assert row["nll"] == pytest.approx(nats.mean(), rel=1e-6)
    assert row["nll_se"] == pytest.approx(nats.std(ddof=1) / 97**0.5, rel=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert "kl_mean" not in row and "decode_tokens_per_s" not in row


@pytest.mark.parametrize("kind", ["gemma3", "mistral-sliding"])
@pytest.mark.parametrize("steps", [{}, {"kv_cache_memory_bytes": 1}])
def test_layers_with_windows_see_what_they_see_in_requests(kind: str, steps: dict[str, int], tmp_path: Path) -> None:
    """Also where these have just the slots that they need, and give up what they no longer see."""
    folder = checkpoints.with_tokenizer(tmp_path / kind, kind)
    asked = Asked(TEXT, tokens=360, context=180, speed=False)
    text = windows(Tokenizer.from_folder(folder), asked)
    if "kv_cache_memory_bytes" in steps:
        with pytest.raises(CapacityError, match="needs") as refused:
            evaluate([variant(folder, "kv_cache_memory_bytes=1", "max_model_len=180")], None, asked)
        mib = float(str(refused.value).split("needs ")[1].split(" MiB")[0])
        steps = {**steps, "kv_cache_memory_bytes": int((mib + 0.01) * 2**20), "max_model_len": 180}
    with LLM(str(folder), threads=1, max_num_seqs=1, **steps) as llm:
        assert 0 < llm.info.slots < (7 if steps else 20) and llm.info.window == 16
    given = [f"{name}={value}" for name, value in steps.items()]
    (row,) = evaluate([variant(folder, *given)], None, asked)["rows"]
    assert row["nll"] == pytest.approx(prompt_nll(folder, text, 256).mean(), rel=1e-6)


def test_however_a_window_is_cut_the_figures_are_the_same(
    tiny: Path, floats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate([variant(tiny)], variant(floats), ASKED)
    monkeypatch.setattr(quality, "LOGITS_BYTES", 7 * 4 * 320)
    steps: list[int] = []
    assert evaluate([variant(tiny)], variant(floats), ASKED, lambda _, n: steps.append(n)) == whole
    assert max(steps) == 7 and sum(steps) == 97


def test_a_model_is_compared_with_its_reference(tiny: Path, floats: Path) -> None:
    """tiny's weights are others at some places (random K formats), so it is far away; the floats in int8 are near."""
    found = evaluate([variant(floats), variant(floats, "kv_cache_dtype=int8"), variant(tiny)], variant(floats), ASKED)[
        "rows"
    ]
    reference, same, near, far = found
    assert "kl_mean" not in reference and reference["nll"] == same["nll"]
    assert (same["kl_mean"], same["kl_max"], same["top1"], same["nll_delta"], same["nll_delta_se"]) == (0, 0, 1, 0, 0)
    assert 0 < near["kl_mean"] < near["kl_p99"] <= near["kl_max"] < far["kl_mean"]
    assert near["nll_delta"] == pytest.approx(near["nll"] - reference["nll"], abs=1e-12)
    assert far["top1"] < near["top1"] <= 1
    assert near["top1_se"] == pytest.approx((near["top1"] * (1 - near["top1"]) / 96) ** 0.5)
    assert near["name"] == "floats.gguf,threads=1,kv_cache_dtype=int8"
    assert near["settings"] == {"threads": 1, "kv_cache_dtype": "int8"}
    assert near["kv_bytes_a_token"] < 0.6 * same["kv_bytes_a_token"]
    assert far["bits"] < 9 < reference["bits"] == pytest.approx(32, rel=0.1)


def test_speeds_are_measured_where_they_can_be(tiny: Path) -> None:
    asked = Asked(TEXT, tokens=40, context=40)
    fast, slow = evaluate([variant(tiny), variant(tiny, "backend=reference")], None, asked)["rows"]
    assert fast["prefill_tokens_per_s"] > 0 and fast["decode_tokens_per_s"] > 0
    assert "decode_tokens_per_s" not in slow
    assert fast["nll"] == pytest.approx(slow["nll"], abs=0.1)


def test_each_window_begins_as_a_prompt_does() -> None:
    class Tokens:
        prefix = (7,)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(word) for word in text.split()]

    def of(text: str, tokens: int, context: int) -> list[list[int]]:
        return windows(Tokens(), Asked(text, tokens, context))  # type: ignore[arg-type]

    assert of("10 11 12 13 14 15", 100, 3) == [[7, 10, 11], [7, 12, 13], [7, 14, 15]]
    assert of("10 11 12 13 14 15", 5, 3) == [[7, 10, 11], [7, 12]]
    assert of("10 11 12 13 14 15", 4, 3) == [[7, 10, 11]]  # one token alone predicts nothing
    with pytest.raises(SettingError, match="context"):
        of("10 11", 5, 1 + 1 - 1)
    with pytest.raises(SettingError, match="too short"):
        of("", 5, 3)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("m", {}),
        ("a/b:Q4,c.gguf,kv_cache_dtype=int8", {"kv_cache_dtype": "int8"}),
        ("m,threads=2,isa=avx2", {"threads": 2, "isa": "avx2"}),
        ('m,override_generation_config={"a":1,"top_p":0.5},threads=1', {
            "override_generation_config": {"a": 1, "top_p": 0.5}, "threads": 1,
        }),
        ("m,tokenizer=null", {"tokenizer": None}),
        ("m,tokenizer=a=b", {"tokenizer": "a=b"}),
    ],
)  # fmt: skip
def test_settings_are_read(text: str, settings: dict[str, Any]) -> None:
    read = Variant.of(text, 512)
    assert read.given == settings
    assert all(getattr(read.settings, name) == value for name, value in settings.items())
    assert read.settings.model == ("a/b:Q4,c.gguf" if text.startswith("a/b") else "m")
    assert Variant.of(text, 9000).settings.max_model_len == 9000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m,max_num_seqs=4", "max_num_seqs has no part"),
        ('m,speculative_config={"method":"suffix"}', "speculative_config has no part"),
        ("m,model=other", "model has no part"),
        ("m,kv_cache_type=int8", "unknown setting 'kv_cache_type'; did you mean 'kv_cache_dtype'"),
        ("m,colour=red", "unknown setting 'colour'; known: backend, "),
        ("m,kv_cache_dtype=int3", "kv_cache_dtype must be"),
        ("m,threads=[[[[", "threads must be"),
        (",threads=1", "model must be"),
    ],
)
def test_settings_that_cannot_be_are_named(text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Variant.of(text, 512)


def test_models_of_other_words_are_refused(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other.gguf")
    data = other.read_bytes()
    assert data.count(b"<|im_end|>") > 1
    at = data.index(b"<|im_end|>")  # in the list of tokens
    other.write_bytes(data[:at] + b"<|im_END|>" + data[at + 10 :])
    with pytest.raises(SettingError, match=r"other\.gguf.* and tiny\.gguf.* different vocabularies"):
        evaluate([variant(other)], variant(tiny), ASKED)
    with pytest.raises(SettingError, match=r"other\.gguf.* different vocabularies"):
        evaluate([variant(tiny), variant(other)], None, ASKED)


def test_padding_of_a_vocabulary_is_left_out(tiny: Path, tmp_path: Path) -> None:
    """Folders may name ids that nobody uses, and files of the same model not: what both know is compared."""
    unused, normal = ((kind).to_bytes(4, "little") * 27 for kind in (5, 1))
    data = tiny.read_bytes()
    assert data.count(unused) == 1
    (tmp_path / "longer.gguf").write_bytes(data.replace(unused, normal))
    longer = variant(tmp_path / "longer.gguf")
    reference, row = evaluate([variant(tiny)], longer, ASKED)["rows"]
    assert (row["kl_max"], row["top1"], row["nll"]) == (0, 1, reference["nll"])
    (alone,) = evaluate([longer], None, ASKED)["rows"]
    assert alone["nll"] > row["nll"]


def test_a_window_longer_than_a_context_is_refused(tiny: Path) -> None:
    with pytest.raises(SettingError, match="context is 40"):
        evaluate([variant(tiny, "max_model_len=32")], None, ASKED)


@pytest.mark.real
@pytest.mark.parametrize(("name", "bound"), [("smollm2", 0.0035), ("qwen_coder", 0.002), ("gemma3", 0.0065)])
def test_real_models_are_as_good_as_the_golden_values_say(
    name: str, bound: float, request: pytest.FixtureRequest
) -> None:
    """The very tokens that tests/golden scores: the beginning of Python's manual, whose words vary with Python."""
    path: Path = request.getfixturevalue(name)
    reference = golden(name)["nll"]
    tokenizer = Tokenizer.from_gguf(open_checkpoint(path).config)
    text = tokenizer.decode(reference["prompt_ids"], skip_special_tokens=True)
    asked = Asked(text, tokens=768, context=768, speed=False)
    assert windows(tokenizer, asked) == [reference["prompt_ids"]]
    if reference["python"] == platform.python_version():
        assert windows(tokenizer, Asked(manual(), 768, 768)) == [reference["prompt_ids"]]
    (row,) = evaluate([Variant.of(str(path), 768)], None, asked)["rows"]
    assert row["nll"] == pytest.approx(reference["mean_nll"], abs=bound)
    assert row["nll"] == pytest.approx(prompt_nll(path, [reference["prompt_ids"]]).mean(), abs=1e-6)
