"""Mixed load for a given time: no wrong answer, no hung stream, and at the end nothing that is still held.

HEADRACE_SOAK_SECONDS is how long `make soak` lasts, an hour unless set. Each right request has a seed: its answer must
be the one that it got alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from child_server import Server, serving, until
from soak.crowd import Crowd
from soak.questions import Question, good, whole
from soak.vitals import Vitals, middle, now, vitals

CLIENTS = 32
GROWTH = 3 << 20  # bytes in the last part; in an hour a leak of 100 bytes a request is more
FLAGS = (
    "--backend", "cpu", "--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "16",
    "--max-num-queued-reqs", "24", "--kv-cache-memory-bytes", "1500k", "--threads", "1", "--engine-restarts", "100000",
)  # fmt: skip


def learn(server: Server, questions: list[Question]) -> None:
    """Each alone."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for question in questions:
            response = client.post(question.path, json=question.body)
            assert response.status_code == 200, (question.body, response.text)
            question.answer = whole(response.json())


class Watch:
    """Looks at both processes every half second, and kills the engine now and then in the first half."""

    def __init__(self, server: Server, seconds: float, kills: int) -> None:
        self.begin = now()
        self.end = self.begin + seconds
        self.kill_at = [self.begin + seconds / 2 * (i + 1) / (kills + 1) for i in range(kills)]
        self.seen: list[tuple[Vitals, Vitals]] = []  # of the second half
        self._server = server

    def over(self) -> bool:
        return now() > self.end

    async def run(self) -> None:
        while not self.over():
            await asyncio.sleep(0.5)
            engines = self._server.children()  # none while it is being started
            if engines and self.kill_at and now() > self.kill_at[0]:
                self.kill_at.pop(0)
                os.kill(engines[0], signal.SIGKILL)
            elif engines and now() > self.begin + (self.end - self.begin) * 0.6:
                self.seen.append((vitals(self._server.process.pid), vitals(engines[0])))

    def grown(self) -> list[int]:
        """Bytes that each process has grown by from the first third to the last of what was seen."""
        third = len(self.seen) // 3
        return [
            middle(one[i].memory for one in self.seen[-third:]) - middle(one[i].memory for one in self.seen[:third])
            for i in range(2)
        ]


async def soak(server: Server, seconds: float, kills: int) -> Counter[str]:
    """Everything that must hold."""
    questions = good(random.Random(1), 60)
    learn(server, questions)
    learn_again = [question.answer for question in questions]
    learn(server, questions)
    assert [question.answer for question in questions] == learn_again  # from the prefix cache
    idle = vitals(server.process.pid)
    crowd, watch = Crowd(server.url, questions, seed=2, kills=kills > 0), Watch(server, seconds, kills)
    try:
        await asyncio.gather(crowd.run(CLIENTS, watch.over), watch.run())
    finally:
        await crowd.close()
    told = "\n".join([f"{len(crowd.wrong)} wrong", *crowd.wrong[:20], str(crowd.counts), server.log[-5000:]])
    assert not crowd.wrong, told
    nothing_held(server, idle)
    crowd.counts.update({"bytes that the server grew by": watch.grown()[0], "the engine": watch.grown()[1]})
    assert max(watch.grown()) < GROWTH, crowd.counts
    learn(server, questions)
    assert [question.answer for question in questions] == learn_again
    assert "Traceback" not in server.log
    return crowd.counts


def nothing_held(server: Server, idle: Vitals) -> None:
    """Pages, places, descriptors and threads are back."""
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        until(lambda name=name: server.metric(name) == 0, 10)
    until(lambda: httpx.get(server.url + "/load").json() == {"server_load": 0}, 10)
    until(lambda: vitals(server.process.pid).files <= idle.files + 2, 10)
    assert vitals(server.process.pid).threads <= idle.threads + 2


@pytest.mark.slow
async def test_two_minutes(tiny: Path) -> None:
    await _soak(tiny, float(os.environ.get("HEADRACE_SHORT_SOAK_SECONDS", "120")))


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_an_hour(tiny: Path) -> None:
    await _soak(tiny, float(os.environ.get("HEADRACE_SOAK_SECONDS", "3600")))


async def _soak(tiny: Path, seconds: float) -> None:
    with serving(tiny, *FLAGS) as server:
        counts = await soak(server, seconds, kills=max(int(seconds // 40), 1))
        assert server.metric("vllm:num_preemptions") > 0
        assert server.stop() == 0
    print(counts)
