"""Schemathesis against our own OpenAPI document: no request gives a 5xx, and what comes back is what the document promises."""
import json
from copy import deepcopy

import pytest
import schemathesis
from conftest import Fake
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import content_type_conformance, not_a_server_error, response_schema_conformance, status_code_conformance
from serving import Server, engine_of

from pico_vllm.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATHS = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}"), ("GET", "/health"), ("GET", "/version")]


@pytest.fixture(scope="module")
def server():
    with Server(engine_of(Fake().model), max_queue=1000) as s: yield s


IDS = {"type": "array", "items": {"enum": [*range(2, 256)]}, "minItems": 1, "maxItems": 9}  # no "integer": for a JSON schema 70.0 is one, and we refuse it
TEXT = {"type": "string", "minLength": 1, "maxLength": 9}
NARROW = {"model": {"enum": ["tiny"]}, "n": {"enum": [1, 3]}, "max_tokens": {"enum": [5, None]}, "max_completion_tokens": {"enum": [None, 5]}, "min_tokens": {"enum": [0, 1]}, "tokens": IDS, "stop_token_ids": IDS,
          "prompt": {"anyOf": [TEXT, IDS, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}]}, "stream_options": {"enum": [None]}, "top_logprobs": {"enum": [None]}, "logit_bias": {"enum": [None, {"70": -100}, {}]},
          "messages": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "object", "required": ["role", "content"], "additionalProperties": False, "properties": {"role": {"enum": ["user", "system"]}, "content": TEXT}}}}

def narrowed(document):
    "The document, but requests name a model that there is and ask for little, so that most of them run."
    document = deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"): schema["properties"].update({field: narrow for field, narrow in NARROW.items() if field in schema["properties"]})
    one = document["components"]["schemas"]["TokenizeRequest"]["properties"]
    one["prompt"] = TEXT
    one["messages"] = {"enum": [None]}
    document["components"]["schemas"]["TokenizeRequest"]["required"] = ["prompt"]
    return document


def fuzz(server, method, path, examples, narrow):
    document = server.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(narrowed(document) if narrow else document)
    statuses = {}
    @given(case=schema[path][method].as_strategy())
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    def run(case):
        response = case.call(base_url=server.url)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400: assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    run()
    server.baseline(30)
    print(method, path, statuses)
    return statuses


@pytest.mark.parametrize("method,path", PATHS)
def test_own_openapi(server, method, path): fuzz(server, method, path, 20, False)


@pytest.mark.parametrize("method,path", PATHS[:4])
def test_requests_that_run(server, method, path):
    statuses = fuzz(server, method, path, 60, True)
    assert statuses.get(200, 0) >= 30, f"too few ran: {statuses}"


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("method,path", PATHS[:4])
def test_long(server, method, path, narrow): fuzz(server, method, path, 400, narrow)


def test_any_json(server):
    "Not only what the document allows: any JSON in any field."
    text = st.text(st.characters(exclude_categories=()), max_size=9)  # half surrogate pairs too, which JSON can say
    values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | text, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
    kinds = {"/v1/chat/completions": (ChatCompletionRequest, {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}), "/v1/completions": (CompletionRequest, {"model": "tiny", "prompt": "x", "max_tokens": 3}),
             "/tokenize": (TokenizeRequest, {"prompt": "x"}), "/detokenize": (DetokenizeRequest, {"tokens": [70]})}
    @given(st.data())
    @settings(max_examples=250, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def run(data):
        path = data.draw(st.sampled_from(sorted(kinds)))
        kind, base = kinds[path]
        body = {**base, **data.draw(st.dictionaries(st.sampled_from(sorted(kind.model_fields)), values, min_size=1, max_size=3))}
        raw = json.dumps(body).encode()
        response = server.http.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert response.status_code < 500, (path, body, response.text)
        if response.status_code != 200: assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    run()
    server.baseline(30)
