"""schemathesis against our own OpenAPI page: answers and refusals keep to what is documented, whatever is asked.

Between them a good request gets the answer that it got before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from child_server import Server, serving

pytestmark = pytest.mark.slow
GOOD: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
EXAMPLES = 20  # of each operation and mode
BEYOND = [positive_data_acceptance]  # a schema cannot say all that is refused: contexts, what fields mean together
QUIET: Any = {"suppress_health_check": list(HealthCheck)}
FLAGS = ("--served-model-name", "tiny", "--max-model-len", "128", "--backend", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with serving(tiny, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def good(server: Server) -> Iterator[Callable[[], str]]:
    """Asks the good request."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield lambda: _good(client)


def _good(client: httpx.Client) -> str:
    response = client.post("/v1/completions", json=GOOD)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_server_keeps_to_its_document(server: Server, good: Callable[[], str], mode: GenerationMode) -> None:
    expected = good()
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    wrong, session = [], requests.Session()
    for found in document.get_all_operations():
        operation = found.ok()

        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate], **QUIET)
        @given(case=operation.as_strategy(generation_mode=mode))
        def keeps(case: schemathesis.Case) -> None:
            case.validate_response(case.call(timeout=60, session=session), excluded_checks=BEYOND)
            assert good() == expected

        try:
            keeps()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # it takes nothing that could be wrong
        except (AssertionError, FailureGroup) as error:
            wrong.append(f"{operation.label}: {error}")
    assert not wrong, "\n".join(wrong)
