"""openai-python's parsed answers: a schema in, an object of it out, whole and streamed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from child_server import Server
from real import golden

FRANCE: Any = golden("smollm2")["chat"][0]["messages"]


class Place(BaseModel):
    city: str
    continent: Literal["Africa", "Asia", "Europe"]
    inhabitants: int


@pytest.fixture
def client(served: Server) -> OpenAI:
    return served.openai


def test_a_structured_answer_is_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=FRANCE, response_format=Place, max_tokens=200, temperature=0
    )
    place = answer.choices[0].message.parsed
    assert place is not None
    assert place.model_dump_json().replace(" ", "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_structured_stream_is_parsed(client: OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": FRANCE, "max_tokens": 200, "temperature": 0}
    with client.chat.completions.stream(**asked, response_format=Place) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(**asked, response_format=Place).choices[0].message.parsed
    assert streamed == whole
    assert isinstance(whole, Place)
