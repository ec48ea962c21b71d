"""What goes over the wire, field by field, as OpenAI's API reference has it.

Ours are `seed` and `timings`, after OpenRouter `cost`, and after vLLM `stop_reason` and the lists of ids.

UNSET fields are left out of the JSON.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType

from headrace.serve.watch.accounts import CostDetails, Timings
from headrace.weights.report import Quality


class PromptDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True, kw_only=True):
    """*_prediction_tokens: guessed ahead of the model; the rejected ones are not among completion_tokens."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    cost_details: CostDetails | UnsetType = UNSET


class Alternative(Struct, frozen=True, kw_only=True):
    """bytes: the token's own, whether or not they are whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative, frozen=True, kw_only=True):
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[ChatToken]
    refusal: None = None


class FunctionCall(Struct, frozen=True, kw_only=True):
    """arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class Message(Struct, frozen=True, kw_only=True):
    """content: null when there are calls only. Reasoning has the name that the server's settings give it."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """arguments: more of the JSON text."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """id, type and name come once, first."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """text_offset: characters of the text before the token. The first token of an echoed prompt has null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Struct, frozen=True, kw_only=True):
    """seed: with which this choice comes again, when its prompt is asked alone."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


_ChoiceT = TypeVar("_ChoiceT")


class Answer(Struct, Generic[_ChoiceT], frozen=True, kw_only=True):
    """A whole answer or a chunk of one. seed: given or drawn; with several prompts that of the first."""

    id: str
    object: str
    created: int
    model: str
    choices: list[_ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    seed: int
    system_fingerprint: str
    service_tier: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Permission(Struct, frozen=True, kw_only=True):
    """As OpenAI once had it, and vLLM has it still."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelMeta(Struct, frozen=True, kw_only=True):
    """llama.cpp's names. n_ctx_train: the model's own context. n_params: numbers in its file. size: weights' bytes."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class ModelCard(Struct, frozen=True, kw_only=True):
    """quality: as `headrace eval --save` measured it, of the very bits that are served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Permission]
    meta: ModelMeta
    quality: Quality | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class VersionAnswer(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    """server_load: open requests, those that wait too."""

    server_load: int


class Health(Struct, frozen=True):
    status: str = "ok"


class TraceAnswer(Struct, frozen=True):
    """steps: the engine's records, oldest first."""

    steps: list[dict[str, Any]]
