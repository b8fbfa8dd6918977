"""docs/api.md documents every route, and every field of its body in its section."""

import re
from pathlib import Path

import pytest

from quire.server.api.anthropic import schema as anthropic
from quire.server.api.llama_cpp.routes import LlamaCppBody, TemplateRequestBody
from quire.server.api.native.programs import EndProgramBody
from quire.server.api.native.tokenize import DetokenizeBody, TokenizeBody
from quire.server.api.ollama import schema as ollama
from quire.server.api.openai.batches import BatchBody
from quire.server.api.openai.embeddings import EmbeddingBody
from quire.server.api.openai.responses_schema import (
    ReasoningOptions,
    ResponseBody,
    ResponseStreamOptions,
    TextFormat,
    TextOptions,
)
from quire.server.api.openai.schema import (
    ChatBatchBody,
    ChatBody,
    ChatMessage,
    CompletionBody,
    SamplingBody,
    StreamOptions,
)
from quire.server.api.sglang.schema import GenerateBody, GenerateParams
from quire.server.api.tgi.schema import Grammar, TgiBody, TgiParameters
from quire.server.api.vllm.adapters import LoadAdapterBody, UnloadAdapterBody
from quire.server.api.vllm.classify import ClassifyBody
from quire.server.api.vllm.score import DocumentBody, RerankBody, ScoreBody
from quire.server.request_params import JsonSchema, ProgramBody, ResponseFormat, RetentionBody, StructuredOutputs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")}
ANTHROPIC = ("MessagesBody", "CountTokensBody", "ContentBlock", "AnthropicMessage", "ToolBody", "ToolChoiceBody")
ANTHROPIC += ("ThinkingBody", "OutputConfig", "OutputFormatBody", "ContextManagement", "CacheControl")
OLLAMA = ("OllamaChatBody", "OllamaGenerateBody", "OllamaOptions", "OllamaMessage", "OllamaEmbedBody")
OLLAMA += ("OllamaEmbeddingsBody", "ShowBody", "PullBody")
COMMON = "`/v1/completions` and `/v1/chat/completions`"
BODIES = {
    SamplingBody: [COMMON],
    StreamOptions: [COMMON],
    ResponseFormat: [COMMON],
    JsonSchema: [COMMON],
    StructuredOutputs: [COMMON],
    CompletionBody: [COMMON, "`/v1/completions`"],
    ChatBody: [COMMON, "`/v1/chat/completions`"],
    ChatMessage: ["`/v1/chat/completions`"],
    ChatBatchBody: [COMMON, "`/v1/chat/completions`", "`/v1/chat/completions/batch`"],
    ResponseBody: ["`/v1/responses`"],
    ResponseStreamOptions: ["`/v1/responses`"],
    TextOptions: ["`/v1/responses`"],
    TextFormat: ["`/v1/responses`"],
    ReasoningOptions: ["`/v1/responses`"],
    BatchBody: ["`/v1/files` and `/v1/batches`"],
    EmbeddingBody: ["`/v1/embeddings`"],
    **{body: ["`/v1/score` and `/v1/rerank`"] for body in (ScoreBody, RerankBody, DocumentBody)},
    ClassifyBody: ["`/v1/classify`"],
    **{getattr(anthropic, name): ["`/v1/messages`"] for name in ANTHROPIC},
    **{getattr(ollama, name): ["Ollama's routes"] for name in OLLAMA},
    TokenizeBody: ["`/tokenize` and `/detokenize`"],
    DetokenizeBody: ["`/tokenize` and `/detokenize`"],
    GenerateBody: ["`/generate`"],
    GenerateParams: ["`/generate`"],
    **{body: ["TGI's routes"] for body in (TgiBody, TgiParameters, Grammar)},
    LlamaCppBody: [COMMON, "`/v1/completions`", "llama.cpp's routes"],
    TemplateRequestBody: ["`/v1/chat/completions`", "llama.cpp's routes"],
    RetentionBody: [COMMON],
    ProgramBody: [COMMON],
    EndProgramBody: ["`/v1/programs/end`"],
    **{body: ["Adapters"] for body in (LoadAdapterBody, UnloadAdapterBody)},
}


def missing(body, text):
    names = [field.alias or name for name, field in body.model_fields.items()]
    return [name for name in names if f"`{name}`" not in text]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_is_named_in_the_section_of_its_route(body):
    assert not missing(body, "".join(SECTIONS[name] for name in BODIES[body]))


def test_a_missing_field_would_be_seen():
    assert "suffix" in missing(CompletionBody, SECTIONS[COMMON])


def test_every_route_is_named_and_every_body_known(http):
    schema = http.get("/openapi.json").json()
    assert [path for path in schema["paths"] if f"`{path.replace(':path', '')}`" not in PAGE] == []
    bodies = {body.__name__ for body in BODIES}
    assert {name for name in schema["components"]["schemas"] if re.search(r"Body$|Params$|Options$", name)} <= bodies


def test_codes_and_types_of_errors_are_named():
    errors = (Path(__file__).resolve().parents[3] / "quire" / "server" / "errors.py").read_text()
    named = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', errors))
    words = {name for name in named if name.endswith(("_error", "_parameter", "_exceeded", "_found", "_unavailable"))}
    assert words
    assert {name for name in words if f"`{name}`" not in PAGE} == set()
