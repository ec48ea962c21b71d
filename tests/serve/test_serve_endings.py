"""How requests end early: clients that leave, engines that fail, servers that go. And that nothing is left running."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.base.errors import EngineError
from headrace.core.sequence import DEAD_ENDS
from headrace.engine.client import Stream
from headrace.engine.messages import Update
from headrace.serve.app import App
from headrace.serve.errors import GoingAway

pytest_plugins = ["serve_fixtures"]

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class Caller:
    """One raw ASGI request, whose client can leave at any moment."""

    def __init__(self, app: App, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.stuck = False  # takes nothing any more
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app.asgi(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        while self.stuck:
            await asyncio.sleep(0.01)
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, seen: Callable[[], bool]) -> None:
        async with asyncio.timeout(2):
            while not seen():
                await asyncio.sleep(0.005)


async def free(engine: FakeEngine, app: App) -> None:
    async with asyncio.timeout(1):
        while engine.running or app.desk.open:
            await asyncio.sleep(0.005)
        while any(not task.done() and task is not asyncio.current_task() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_client_that_leaves_is_aborted(engine: FakeEngine, app: App, path: str, stream: bool, n: int) -> None:
    engine.pace = 0.05
    body: dict[str, Any] = {"n": n} | ({"messages": HI} if path == CHAT else {"prompt": ["a", "b", "c"]})
    caller = Caller(app, path, {**body, "stream": stream})
    await caller.until(lambda: bool(engine.seen) and (not stream or '"index":0' in caller.text))
    caller.left.set()
    await asyncio.wait_for(caller.task, 1)
    await free(engine, app)
    assert len(engine.aborted) == len(engine.seen)
    assert "[DONE]" not in caller.text
    aborted = next(line for line in app.metrics.text().decode().splitlines() if 'finished_reason="abort"' in line)
    assert float(aborted.split()[-1]) == n * len(engine.seen)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "begun"),
    [
        ("/v1/responses", {"input": "hi"}, "response.output_text.delta"),
        ("/v1/messages", {"messages": HI, "max_tokens": 50}, "content_block_delta"),
    ],
)
async def test_of_other_apis_too(
    engine: FakeEngine, app: App, path: str, body: dict[str, Any], begun: str, stream: bool
) -> None:
    engine.pace = 0.05
    caller = Caller(app, path, {**body, "stream": stream})
    await caller.until(lambda: bool(engine.seen) and (not stream or begun in caller.text))
    caller.left.set()
    await asyncio.wait_for(caller.task, 1)
    await free(engine, app)
    assert len(engine.aborted) == len(engine.seen) == 1


@pytest.mark.parametrize("at", [0, 3])
async def test_a_failure_after_the_first_byte_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine, app: App, at: int
) -> None:
    def fail(stream: Stream, number: int) -> None:
        if number == at:
            stream.push(Update(stream.request_id, 0, [], reason="error", message="the logits are not finite"))

    engine.trouble = fail
    response = await client.post(CHAT, json={"messages": HI, "stream": True})
    assert response.status_code == 200
    frames = response.text.strip().split("\n\n")
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert error["message"] == "the logits are not finite"
    assert "[DONE]" not in response.text
    assert not any('"finish_reason":"' in frame for frame in frames)
    whole = await client.post(CHAT, json={"messages": HI})
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == "the logits are not finite"
    assert whole.headers["x-should-retry"] == "false"
    engine.trouble = None
    assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
    await free(engine, app)


@pytest.mark.parametrize("why", DEAD_ENDS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
async def test_what_a_request_forbids_itself_is_its_own_error(
    client: httpx.AsyncClient, engine: FakeEngine, app: App, path: str, body: dict[str, Any], why: str
) -> None:
    """Not a failure of the server: nobody is alarmed, and no client tries it again."""

    def fail(stream: Stream, number: int) -> None:
        if number == 3:
            stream.push(Update(stream.request_id, 0, [], reason="error", message=why))

    engine.trouble = fail
    whole = await client.post(path, json=body)
    assert whole.status_code == 400
    assert whole.json()["error"]["type"] == "invalid_request_error"
    assert why in whole.json()["error"]["message"]
    streamed = await client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 200
    last = json.loads(streamed.text.strip().split("data: ")[-1])
    assert last["error"]["type"] == "invalid_request_error"
    engine.trouble = None
    assert (await client.post(path, json=body)).status_code == 200
    await free(engine, app)


async def test_one_prompt_refused_aborts_its_sisters(client: httpx.AsyncClient, engine: FakeEngine, app: App) -> None:
    submit, engine.pace = engine.submit, 0.05

    def picky(ids: list[int], *args: Any, **kwargs: Any) -> Stream:
        if len(ids) == 2:
            raise EngineError("no more")
        return submit(ids, *args, **kwargs)

    engine.submit = picky  # type: ignore[method-assign]
    response = await client.post("/v1/completions", json={"prompt": ["a", "bb", "c"]})
    assert response.status_code == 503
    assert len(engine.aborted) == len(engine.seen) == 1
    await free(engine, app)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "code"), [(EngineError("the engine died"), "engine_dead"), (GoingAway("going"), "shutting_down")]
)
async def test_a_cut_ends_all_open_requests(
    engine: FakeEngine, app: App, stream: bool, reason: Exception, code: str
) -> None:
    engine.pace = 10
    callers = [Caller(app, CHAT, {"messages": HI, "stream": stream}) for _ in range(3)]
    await callers[-1].until(lambda: len(engine.seen) == 3)
    app.desk.cut(reason)  # type: ignore[arg-type]
    await asyncio.wait_for(asyncio.gather(*(caller.task for caller in callers)), 1)
    for caller in callers:
        assert f'"code":"{code}"' in caller.text
        assert "[DONE]" not in caller.text
        assert caller.sent[0]["status"] == (200 if stream else 503)
    assert len(engine.aborted) == 3
    await free(engine, app)


async def test_while_draining_new_ones_are_refused_and_old_ones_end(
    client: httpx.AsyncClient, engine: FakeEngine, app: App
) -> None:
    engine.pace = 0.02
    old = Caller(app, CHAT, {"messages": HI, "stream": True})
    await old.until(lambda: bool(engine.seen))
    app.desk.closing = True
    new = await client.post(CHAT, json={"messages": HI})
    assert new.status_code == 503
    assert new.headers["retry-after"]
    assert (await client.get("/health")).status_code == 503
    await asyncio.wait_for(old.task, 2)
    assert old.text.endswith("data: [DONE]\n\n")
    assert app.desk.idle.is_set()


async def test_health_of_a_dead_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stopped, code in ((False, "engine_restarting"), (True, "engine_dead")):
        engine.alive = False
        if stopped:
            engine.stopped.set()
        for path in ("/health", "/ready", "/ping", "/v1/health"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == code
            assert ("retry-after" in response.headers) != stopped
        assert (await client.get("/live")).status_code == 200


async def test_health_answers_while_a_long_prompt_is_read(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on long texts leaves the event loop."""
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *args, **kw: (time.sleep(1), encode(*args, **kw))[1])
    monkeypatch.setattr("headrace.serve.api.prompts.Prompts._check_size", lambda *args: None)
    slow = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "a" * 20_000}))
    start = time.monotonic()
    await asyncio.sleep(0.1)
    assert (await client.get("/health")).status_code == 200
    assert time.monotonic() - start < 0.6
    assert not slow.done()
    assert (await slow).status_code == 400


@pytest.mark.parametrize(
    ("slow_part", "body"),
    [
        ("api.completions.parse_completion", {"prompt": "a", "metadata": {"a": "b" * 80_000}}),
        ("api.prompts.Prompts._echo", {"prompt": [[65] * 10] * 900, "echo": True, "max_tokens": 0}),
    ],
)
async def test_health_answers_while_a_large_body_is_worked_on(
    client: httpx.AsyncClient, slow_part: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = iter([1])

    def slow(*args: Any) -> Any:
        time.sleep(next(delays, 0))
        return original(*args)

    original = pkgutil.resolve_name(f"headrace.serve.{slow_part}")
    monkeypatch.setattr(f"headrace.serve.{slow_part}", slow)
    work = asyncio.ensure_future(client.post("/v1/completions", json=body))
    start = time.monotonic()
    await asyncio.sleep(0.1)
    assert (await client.get("/health")).status_code == 200
    assert time.monotonic() - start < 0.6
    assert not work.done()
    assert (await work).status_code == 200


async def test_health_answers_while_many_prompts_are_handed_in(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    submit = engine.submit
    engine.submit = lambda *args, **kw: (time.sleep(0.01), submit(*args, **kw))[1]  # type: ignore[method-assign]
    work = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": ["a"] * 100, "max_tokens": 1}))
    start = time.monotonic()
    await asyncio.sleep(0.1)
    assert (await client.get("/health")).status_code == 200
    assert time.monotonic() - start < 0.6
    assert not work.done()
    assert (await work).status_code == 200


async def test_a_client_that_does_not_read_holds_up_no_shutdown(app: App, engine: FakeEngine) -> None:
    engine.pace = 0.01
    caller = Caller(app, CHAT, {"messages": HI, "stream": True})
    await caller.until(lambda: len(caller.sent) > 2)
    caller.stuck = True
    await asyncio.sleep(0.05)
    app.desk.cut(GoingAway("bye"))
    async with asyncio.timeout(2):
        await caller.task
        await app.desk.idle.wait()
