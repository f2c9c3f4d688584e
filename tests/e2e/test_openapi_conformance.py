"""schemathesis against /openapi.json: every answer has a promised status and shape, and none is a 5xx."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from llmbox.app.config.model_settings import MemorySettings
from llmbox.app.config.settings import Settings as Configured
from support.cli_box import PATIENCE
from support.fake_engine import write_model
from support.lanes import NIGHTLY
from support.openai_server import Server, serving
from support.tokenizers_zoo import LLAMA2, byte_level, drawn_ids, write_text_files

EXAMPLES = int(os.environ.get("LLMBOX_FUZZ_EXAMPLES", "12" if NIGHTLY else "4"))
READING = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/load"),
    ("GET", "/tokenizer_info"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/api/version"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("DELETE", "/v1/models/{model_id}"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions/{completion_id}"),
    ("DELETE", "/v1/chat/completions/{completion_id}"),
    ("GET", "/v1/chat/completions/{completion_id}/messages"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/conversations/{conversation_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}"),
    ("GET", "/v1/conversations/{conversation_id}/items"),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/v1/messages/batches"),
    ("GET", "/v1/messages/batches/{batch_id}"),
    ("DELETE", "/v1/messages/batches/{batch_id}"),
    ("POST", "/v1/messages/batches/{batch_id}/cancel"),
    ("GET", "/v1/messages/batches/{batch_id}/results"),
]
WRITING = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/{completion_id}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v1/score"),
    ("POST", "/classify"),
    ("POST", "/pooling"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/api/show"),
    ("POST", "/api/pull"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/copy"),
    ("POST", "/api/create"),
    ("POST", "/v1/load"),
    ("POST", "/v1/unload"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/conversations/{conversation_id}"),
    ("POST", "/v1/conversations/{conversation_id}/items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/messages/batches"),
    ("POST", "/v1/files"),
    ("POST", "/v1/batches"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("models") / "one"
    tokenizer = byte_level()
    write_model(write_text_files(directory, tokenizer, LLAMA2), **drawn_ids(tokenizer), context=64)
    alone = Configured(memory=MemorySettings(load_on_request=False))
    with serving(tmp_path_factory.mktemp("data"), controlled=True, settings=alone) as server:
        server.load(directory, "one")
        yield server


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=PATIENCE)


@pytest.mark.property
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*route, GenerationMode.POSITIVE) for route in READING + WRITING]
    + [(*route, GenerationMode.NEGATIVE) for route in WRITING],
)
def test_answers_are_as_promised(schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = schema[path][method]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def check(case: Case) -> None:
        answer = case.call(timeout=PATIENCE)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400 and not path.startswith("/api/"):
            assert set(answer.json()["error"]) - {"details"} == {"message", "type", "param", "code"}

    check()


def test_all_routes_are_tested(schema: Any) -> None:
    shown = {(method.upper(), path) for path in schema for method in schema[path]}
    assert shown == set(READING + WRITING)
