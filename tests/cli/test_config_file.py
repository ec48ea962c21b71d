"""Flags from a file, several values of one flag, and flags of other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import SettingError
from headrace.base.settings import EngineSettings
from headrace.cli import load
from headrace.cli.foreign import IGNORED
from headrace.serve.settings import ServeSettings


class Called(Exception):
    """Ends the command in the place of a server."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `headrace serve` would serve, given these arguments."""

    def run(*args: str) -> tuple[EngineSettings, ServeSettings]:
        def serve(engine: EngineSettings, settings: ServeSettings) -> int:
            raise Called(engine, settings)

        monkeypatch.setattr("headrace.cli.serve.serve", serve)
        with pytest.raises(Called) as called:
            load("serve", "").main(list(args), standalone_mode=False)
        engine, settings = called.value.args
        return engine, settings

    return run


def written(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def complaint(*args: str) -> str:
    """What `headrace serve` says of wrong usage, or of settings that cannot work."""
    with pytest.raises(Exception) as refused:
        load("serve", "").main(list(args), standalone_mode=False)
    error = refused.value
    assert isinstance(error, SettingError) or getattr(error, "exit_code", 0) == 2
    return error.format_message() if hasattr(error, "format_message") else str(error)


def test_a_file_of_flags(parsed: Any, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        # of ours
        model: file.gguf
        max_model_len: 4K
        max-num-seqs: 7
        max-inter-token-ms: 12.5
        enable-prefix-caching: false
        served-model-name: [a, b]
        allowed-origins: "*"
        port: 9
        tokenizer:
        api-keys:
          - sk-1
          - {name: ben, key: sk-2, weight: 2.5}
          - 12345
        gpu-memory-utilization: 0.9
        """,
    )
    engine, http = parsed("--config", path)
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("file.gguf", 4096, 7)
    assert (engine.max_inter_token_ms, engine.enable_prefix_caching, engine.tokenizer) == (12.5, False, None)
    assert (http.port, http.served_model_name, http.allowed_origins) == (9, ("a", "b"), ("*",))
    assert [key.secret for key in http.api_key] == ["sk-1", "sk-2", "12345"]
    assert (http.api_key[1].caller.name, http.api_key[1].caller.weight) == ("ben", 2.5)


def test_the_command_line_wins(parsed: Any, tmp_path: Path) -> None:
    path = written(
        tmp_path, "model: file.gguf\nport: 9\nenable-prefix-caching: false\nserved-model-name: a\nthreads: 2\n"
    )
    given = ["mine.gguf", f"--config={path}", "--port", "8", "--enable-prefix-caching", "--served-model-name", "b"]
    engine, http = parsed(*given)
    assert (engine.model, engine.enable_prefix_caching, engine.threads) == ("mine.gguf", True, 2)
    assert (http.port, http.served_model_name) == (8, ("b",))
    assert parsed("-m", "other.gguf", "--config", path)[0].model == "other.gguf"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len: 5", "did you mean 'max-model-len'"),
        ("max-modle-len: 5", "config.yaml': unknown entry"),
        ("config: x", "unknown entry 'config'"),
        ("port: 5\nport: 6", "'port' more than once"),
        ("max_num_seqs: 5\nmax-num-seqs: 6", "more than once"),
        ("port: true", "port"),
        ("port: {a: 1}", "config.yaml': port is one value"),
        ("host: [a, b]", "host"),
        ("enable-prefix-caching: 5", "true or false"),
        ("served-model-name: [null]", "quotes"),
        ("- a", "lines"),
        ("a: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("port: 70000", "65535"),
        ("port: many", "'--port'"),
        ("api-keys: [{nmae: x, key: y}]", "nmae"),
        ("allow-credentials: true\nallowed-origins: ['*']", "name the origins"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    assert says in complaint("m.gguf", "--config", written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no\.yaml"):
        load("serve", "").main(["--config", str(tmp_path / "no.yaml")], standalone_mode=False)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["m", "--served-model-name", "a", "b", "--port", "5"], ("a", "b")),
        (["m", "--served-model-name", "a", "--served-model-name=b"], ("a", "b")),
        (["--served-model-name", "a", "m"], ("a",)),
        (["m", "--served_model_name", '["a", "b"]'], ("a", "b")),
        (["m", "--served-model-name", "[a"], ("[a",)),
    ],
)
def test_several_values(parsed: Any, args: list[str], names: tuple[str, ...]) -> None:
    engine, http = parsed(*args)
    assert (engine.model, http.served_model_name) == ("m", names)


def test_flags_that_mean_nothing_here_are_said(parsed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "m",
        "--gpu-memory-utilization",
        "0.9",
        "--enable_chunked_prefill",
        "-tp",
        "2",
        "--swap-space=4",
        "--port",
        "5",
    ]
    engine, http = parsed(*args, "--no-async-scheduling", "-O3")
    assert (engine.model, http.port) == ("m", 5)
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == [
        "--gpu-memory-utilization",
        "--enable_chunked_prefill",
        "-tp",
        "--swap-space",
        "--no-async-scheduling",
        "-O3",
    ]
    assert all(" is ignored: " in line for line in said)


def test_no_flag_of_ours_is_called_foreign(parsed: Any) -> None:
    """The table would be wrong about it; the flag itself wins."""
    own = {name.removeprefix("--") for option in load("serve", "").params for name in option.opts}
    assert not own & set(IGNORED)


@pytest.mark.parametrize(("flag", "says"), [("--hf-token", "HF_TOKEN"), ("--max-modle-len", "--max-model-len")])
def test_what_is_not_known_is_refused_with_advice(flag: str, says: str) -> None:
    assert says in complaint("m", flag, "x")
