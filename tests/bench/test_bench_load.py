"""The load generator against a server that answers by a script: what it measures is what the script did."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from scripted import Handler, Scripted, scripted, speak

from headrace.base.errors import SettingError
from headrace.base.goals import parse_goals
from headrace.bench.client import Target
from headrace.bench.load import ENDPOINTS, Api, Seen, measured, results
from headrace.bench.work import Lengths, asks


def run(server: Scripted, count: int, *, rate: float = math.inf, endpoint: str = ENDPOINTS[0], **more: Any) -> Any:
    """more: `key`, the server's, and what `measured` takes."""
    work = asks(count, Lengths(5, 5), Lengths(3, 3), rate=rate, burstiness=math.inf)
    api = Api(target=Target.of(server.url), endpoint=endpoint, api_key=more.pop("key", None), extra={"top_k": 9})
    return measured(api, work, show=False, **more)


def test_times_and_tokens_are_those_of_the_script() -> None:
    with scripted(lambda to, _: speak(to, ["a", "b", "c", "d"], first=0.2, each=0.1)) as server:
        found = run(server, 3)
    assert (found["completed"], found["failed"], found["errors"]) == (3, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (21, 12)
    # The machine may be busy: each piece comes when it was sent or later, whatever the others did.
    assert 200 <= found["median_ttft_ms"] < found["median_e2el_ms"]
    after_the_first = found["mean_e2el_ms"] - found["mean_ttft_ms"]  # three pieces
    assert found["mean_itl_ms"] == pytest.approx(after_the_first / 3)
    assert found["mean_tpot_ms"] == pytest.approx(after_the_first / 3)
    assert 0 < found["median_itl_ms"] <= found["p99_itl_ms"]
    assert 500 <= found["median_e2el_ms"] <= 1e3 * found["duration"]
    assert found["output_throughput"] == pytest.approx(12 / found["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert found[f"p50_{name}_ms"] <= found[f"p90_{name}_ms"] <= found[f"p99_{name}_ms"]


def test_every_request_asks_for_what_was_drawn() -> None:
    with scripted(lambda to, _: speak(to, ["a"])) as server:
        run(server, 2, warmups=0)
        run(server, 1, warmups=2, endpoint=ENDPOINTS[1])
    bodies = [body for _, body in server.asked]
    assert len(bodies) == 5
    assert [len(body["prompt"].split()) for body in bodies[:2]] == [5, 5]
    assert len(bodies[4]["messages"][0]["content"].split()) == 5
    for body in bodies:
        assert body["top_k"] == 9
        assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("scripted", 3, True, True)


def test_requests_come_no_earlier_than_they_are_due() -> None:
    with scripted(lambda to, _: speak(to, ["a"])) as server:
        assert run(server, 4, rate=20, warmups=0)["duration"] >= 0.15
        whens = [when for when, _ in server.asked]
    assert whens[-1] - whens[0] >= 0.1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_open_than_allowed(concurrency: int) -> None:
    open_now: list[int] = []
    most = 0

    def answer(to: Handler, _: dict[str, Any]) -> None:
        nonlocal most
        open_now.append(1)
        most = max(most, len(open_now))
        time.sleep(0.05)
        open_now.pop()
        speak(to, ["a"])

    with scripted(answer) as server:
        assert run(server, 7, concurrency=concurrency, warmups=0)["completed"] == 7
        assert most == concurrency


def test_failures_are_counted_by_their_reason_and_leave_no_figures() -> None:
    def answer(to: Handler, _: dict[str, Any]) -> None:
        number = len(to.server.asked)
        if number == 1:
            to.plain(429, {"error": "busy"})
        elif number == 2:
            to.begin()
            to.event({"error": {"message": "broke"}})
            to.end()
        elif number == 3:
            to.begin()
            to.chunk(b"data: {")
            to.close_connection = True
        elif number == 4:
            speak(to, [])
        elif number == 5:
            to.begin()
            to.event({"choices": [{"text": "half"}]})
            to.chunk(b"")
        elif number == 6:
            to.begin()
            to.event({"choices": [{"text": "half", "finish_reason": "abort"}]})
            to.end()
        else:
            speak(to, ["a", "b"])

    with scripted(answer) as server:
        found = run(server, 8, concurrency=1, warmups=0)
    assert (found["completed"], found["failed"]) == (2, 6)
    assert sum(found["errors"].values()) == 6
    for says in ("status 429", "broke", "ended before", "without text", "breaks off", "'abort'"):
        assert any(says in error for error in found["errors"]), found["errors"]
    assert found["total_output_tokens"] == 4


@pytest.mark.parametrize(("goals", "good"), [(["e2el:1000000"], 4), (["e2el:1000000", "ttft:49"], 0)])
def test_goodput_counts_those_that_keep_to_every_goal(goals: list[str], good: int) -> None:
    with scripted(lambda to, _: speak(to, ["a", "b"], first=0.05)) as server:
        found = run(server, 4, goals=parse_goals(goals))
    assert found["request_goodput"] == pytest.approx(good / found["duration"])
    assert found["request_throughput"] == pytest.approx(4 / found["duration"])


def test_goodput_by_hand() -> None:
    seen = [
        Seen(sent=1.0, times=[1.1, 1.2, 1.3], output_tokens=3),  # 100 ms, 100 ms a token, 300 ms
        Seen(sent=1.0, times=[1.4], output_tokens=1),  # one token has no time between tokens
        Seen(sent=1.0, error="late"),
    ]

    def good(*goals: str) -> float:
        return float(results(seen, 2.0, parse_goals(goals))["request_goodput"])

    assert (good("ttft:101"), good("ttft:99"), good("ttft:500")) == (0.5, 0, 1)
    assert (good("tpot:99"), good("tpot:101"), good("e2el:301"), good("ttft:101", "tpot:99")) == (0.5, 1, 0.5, 0)
    assert "request_goodput" not in results(seen, 2.0, {})


@pytest.mark.parametrize("goal", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "itl:5"])
def test_what_is_no_goal(goal: str) -> None:
    with pytest.raises(SettingError, match="ttft:MILLISECONDS"):
        parse_goals([goal])


def test_a_server_that_is_not_there_or_does_not_answer_is_said() -> None:
    with scripted(lambda to, _: to.plain(500, {})) as server:
        with pytest.raises(SettingError, match="status 500"):
            run(server, 1)
        server.answer = lambda to, _: speak(to, ["a"])
        assert run(server, 1)["completed"] == 1
    with pytest.raises(SettingError, match="Connect"):
        run(server, 1)


def test_a_server_that_needs_a_key_is_given_it_or_said_to_need_it() -> None:
    with scripted(lambda to, _: speak(to, ["a"])) as server:
        server.key = "secret"
        with pytest.raises(SettingError, match="OPENAI_API_KEY"):
            run(server, 1)
        with pytest.raises(SettingError, match="OPENAI_API_KEY"):
            run(server, 1, key="wrong")
        assert run(server, 1, key="secret")["completed"] == 1


def test_connections_that_the_server_has_closed_are_replaced() -> None:
    def answer(to: Handler, _: dict[str, Any]) -> None:
        speak(to, ["a"])
        to.close_connection = True  # without having said so
        time.sleep(0.01)

    with scripted(answer) as server:
        assert run(server, 5, concurrency=1)["completed"] == 5
