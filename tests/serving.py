"""What the tests over HTTP share: a server on a free port in a thread, the official clients for it, and what came back as bytes."""
import asyncio, json, socket, threading, time
from contextlib import contextmanager

import httpx
import openai
import pytest
import uvicorn
from conftest import FakeModel, assert_baseline

from pico_vllm.engine import LLMEngine
from pico_vllm.server import create_app
from pico_vllm.service import SchedulerService
from pico_vllm.testing import byte_tokenizer

TEMPLATE = ("{% for m in messages %}{% if m.role == 'tool' and not loop.previtem %}{{ raise_exception('a tool answers nobody') }}{% endif %}<{{ m.role }}>{{ m.content }}"
            "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{{ '\\n' }}{% endfor %}<assistant>")
SIZES = {"num_blocks": 128, "block_size": 4, "max_model_len": 128}


def chat_tokenizer():
    "The byte tokenizer with a chat template, which writes tool calls."
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def engine_of(model, tokenizer=None, **config): return LLMEngine.from_parts(model, tokenizer or chat_tokenizer(), **{**SIZES, **config})


class Server:
    "An app over an engine, served by uvicorn in a thread of its own while the context lasts."
    def __init__(self, engine, names=("tiny",), max_queue=256, build=create_app, **app):
        self.engine, self.service = engine, SchedulerService(engine, max_queue)
        self.app = build(self.service, list(names), **app)
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=5))
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            await self.uvicorn.serve()
        asyncio.run(main())

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.uvicorn.started or not self.thread.is_alive())
        assert self.uvicorn.started, "the server did not start"
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        return self

    def __exit__(self, *exc):
        self.http.close(); self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server does not stop"

    def async_client(self): return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def call(self, fn):
        "fn(engine), in the engine's thread between two steps."
        return asyncio.run_coroutine_threadsafe(self.service.call(fn), self.loop).result(20)

    def baseline(self, seconds=5):
        "Soon nothing is left: no stream, no request, every block free."
        wait_for(lambda: self.service.num_unfinished == 0 and not self.call(lambda engine: engine.has_unfinished_requests()), seconds, "requests are left")
        self.call(assert_baseline)

    def post(self, path, body=None, **kwargs):
        return self.http.post(path, **({"json": body} if body is not None else {}), **kwargs)

    def chat(self, text="hi", **body): return self.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": text}], **body})
    def complete(self, prompt="x", **body): return self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **body})

    def refused(self, response, status=400, param=None, words=()):
        "An error in OpenAI's shape, after which the engine is as it was."
        assert response.status_code == status, f"{response.status_code}: {response.text}"
        assert response.headers["content-type"].startswith("application/json")
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and isinstance(error["type"], str)
        if param is not None: assert error["param"] == param, error
        for word in words: assert str(word) in error["message"], error
        return error

    def hang_up(self, path, body, after=b"", until=lambda: True, wait=10):
        "Ask over a bare socket, read until `after` has come (b'': nothing) and something is so, and close the connection. What was read."
        got = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            raw = json.dumps(body).encode()
            s.sendall(f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            while after and after not in got:
                piece = s.recv(65536)
                assert piece, f"the server closed before {after!r} came: {got!r}"
                got += piece
            wait_for(until, wait)
        return got


def wait_for(condition, seconds=10, what="it takes too long"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def events(response):
    "The events of a stream, from its bytes: each is one line of JSON and a blank line, one [DONE] at the end. Comments are no events."
    assert response.status_code == 200 and response.headers["content-type"].split(";")[0] == "text/event-stream", response.text
    assert response.content.endswith(b"\n\n") and b"\r" not in response.content
    blocks = [b for b in response.content.decode().split("\n\n")[:-1] if not b.startswith(":")]
    assert all(b.startswith("data: ") and "\n" not in b for b in blocks), blocks
    assert blocks[-1] == "data: [DONE]" and blocks.count("data: [DONE]") == 1
    return [json.loads(b.removeprefix("data: ")) for b in blocks[:-1]]


def pieces(chunks, index=0):
    "What one choice of a stream says in the end: text and finish_reason, which comes once and last."
    mine = [x for c in chunks for x in c["choices"] if x["index"] == index]
    reasons = [x["finish_reason"] for x in mine]
    assert reasons[:-1] == [None] * (len(mine) - 1) and reasons[-1] is not None, reasons
    return "".join((x["delta"].get("content") or "") if "delta" in x else x["text"] for x in mine), reasons[-1]


class GatedModel(FakeModel):
    "The fake model, but each step waits until the gate is open; `steps` counts them, `entered` says that one has begun."
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate, self.entered, self.steps = threading.Event(), threading.Event(), 0

    def __call__(self, *args):
        self.entered.set()
        assert self.gate.wait(20), "the test forgot to open the gate"
        self.steps += 1
        return super().__call__(*args)


@contextmanager
def gated(max_queue=256, **config):
    "A server whose engine waits at a gate, which is opened at the end in any case."
    model = GatedModel()
    with Server(engine_of(model, **config), max_queue=max_queue) as server:
        server.model = model
        try: yield server
        finally: model.gate.set()


@pytest.fixture(scope="module")
def server(fake):
    "One server with the fake model for all tests of a module, which leave it as it was."
    with Server(engine_of(fake.model)) as s: yield s


@pytest.fixture(autouse=True)
def as_new(request):
    "After each test that shares the server, its engine is as new."
    yield
    if "server" in request.fixturenames: request.getfixturevalue("server").baseline()
