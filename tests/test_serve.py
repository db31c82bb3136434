"""`pico-vllm serve`, `chat` and `load` as users meet them: processes, signals, exit codes. A tiny model, so that only the plumbing is tested."""
import json, os, pty, select, signal, socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pico_vllm.serve import bind, is_loopback, served

COMMAND = [sys.executable, "-c", "from pico_vllm.serve import main; main()"]
QUIET = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
KEY = "open-sesame"


def cli(*args, input=None, **env):
    return subprocess.run([*COMMAND, *map(str, args)], input=input, capture_output=True, text=True, env={**os.environ, **QUIET, **env}, timeout=120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A checkpoint that can talk for long: 8,192 positions, and a chat template."
    from transformers import AutoTokenizer
    from pico_vllm.testing import save_tiny_checkpoint
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    tokenizer.save_pretrained(folder)
    return str(folder)


def started(tiny, *args, **env): return served(tiny, "--num-blocks", "1024", *args, env={**QUIET, **env})


@pytest.fixture(scope="module")
def server(tiny):
    "One server with a key, for everything that leaves it alone."
    with started(tiny, "--served-model-name", "one", "--served-model-name", "two", "--max-body-mb", "0.01", "--metrics-prefix", "vllm", PICO_VLLM_API_KEY=KEY) as (url, process):
        yield url, process
    assert process.returncode == 0 and "Traceback" not in process.said() and KEY not in process.said()


class Answer:
    "A streamed answer, read in a thread."
    def __init__(self, url, max_tokens=2000):
        self.events, self.code, self.error = [], None, None
        self.body = {"model": "tiny", "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        self.pool = ThreadPoolExecutor(1)
        self.done = self.pool.submit(self._read, url)

    def _read(self, url):
        try:
            with httpx.stream("POST", url + "/v1/completions", json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "): self.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        except httpx.HTTPError as e: self.error = e

    def wait_for(self, n):
        deadline = time.time() + 30
        while len(self.events) < n and not self.done.done() and time.time() < deadline: time.sleep(.01)
        assert len(self.events) >= n, (self.events, self.error)
        return self

    def whole(self):
        self.done.result(60)
        return self.error is None and self.events[-1] == "[DONE]" and "error" not in self.events[-2] and self.events[-2]["usage"]["completion_tokens"] == self.body["max_tokens"]


def until(fact, seconds=30):
    deadline = time.time() + seconds
    while not fact(): assert time.time() < deadline; time.sleep(.02)


def gauge(url, name, **headers):
    return next(float(line.split()[-1]) for line in httpx.get(url + "/metrics", headers=headers).text.splitlines() if line.startswith(name))


# Serving

def test_serves_and_checks_the_key(server):
    url, _ = server
    body = {"model": "two", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=url) as client:
        for key in (None, "wrong", KEY + "x", KEY[:-1]):
            assert client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"} if key else {}).status_code == 401
        assert client.get("/metrics").status_code == client.get("/live").status_code == client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == client.get("/version").status_code == 200
        client.headers["Authorization"] = f"Bearer {KEY}"
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.json()["model"] == "two" and answer.json()["usage"]["completion_tokens"] == 4
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert client.post("/v1/chat/completions", json={**body, "model": "tiny"}).status_code == 404
        assert client.post("/v1/completions", json={"model": "one", "prompt": "x" * 11_000}).status_code == 413
        assert "vllm:generation_tokens_total" in client.get("/metrics").text


def test_chat_through_the_server_and_load_against_it(server):
    url, _ = server
    done = cli("chat", "--url", url, "--temperature", "0", "--max-tokens", "8", "--system", "Be short.", input="Hello\n/reset\nHello\n\n/quit\nnever asked\n", PICO_VLLM_API_KEY=KEY)
    half = len(done.stdout) // 2
    assert done.returncode == 0 and done.stderr == "" and done.stdout[:half] == done.stdout[half:] and done.stdout.endswith("\n"), done
    load = ("load", url, "--rate", "20", "--rate", "inf", "--requests", "6", "--prompt-tokens", "4:9", "--max-tokens", "5:9", "--vocab-size", "256", "--json")
    done = cli(*load, PICO_VLLM_API_KEY=KEY)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [r["ok"] for r in rows] == [6, 6] and [r["rate_asked"] for r in rows] == [20, None], done
    assert all(30 <= r["output_tokens"] <= 54 and 24 <= r["prompt_tokens"] <= 54 and r["ttft_s"]["n"] == 6 and r["ttft_s"]["p50"] > 0 and r["errors"] == {} for r in rows)
    assert rows[0]["output_tokens"] == rows[1]["output_tokens"] and rows[1]["peak_concurrency"] == 6
    done = cli(*load)  # no key
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "API key" in done.stderr and len(done.stderr.splitlines()) == 1


def test_load_takes_a_file_and_counts_what_fails(server, tmp_path):
    url, _ = server
    (path := tmp_path / "jobs.json").write_text(json.dumps({"about": "…", "requests": [{"prompt_token_ids": [1, 2], "max_tokens": 3}, {"prompt": "hello", "max_tokens": 3}, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, {"prompt_token_ids": [9999], "max_tokens": 3}]}))
    done = cli("load", url, "--workload", path, "--rate", "inf", "--json", PICO_VLLM_API_KEY=KEY)
    row = json.loads(done.stdout)
    assert done.returncode == 0 and row["ok"] == 3 and row["output_tokens"] == 9 and sum(row["errors"].values()) == 1 and "9999" in done.stderr
    done = cli("load", url, "--workload", path, "--vocab-size", "9")
    assert done.returncode == 2 and "--workload" in done.stderr


# Ending

def test_sigterm_lets_a_stream_finish_and_refuses_new_work(tiny):
    with started(tiny, "--drain-timeout", "120") as (url, process):
        answer = Answer(url).wait_for(5)
        process.send_signal(signal.SIGTERM)
        time.sleep(.2)
        newcomer = httpx.post(url + "/v1/completions", json={"model": "tiny", "prompt": "Me too", "max_tokens": 1})
        health = httpx.get(url + "/health")
        process.send_signal(signal.SIGTERM)  # supervisors do that
        assert not answer.done.done(), "the drain was over before it was looked at"
        assert newcomer.status_code == health.status_code == 503 and newcomer.json()["error"]["code"] == "shutting_down"
        assert answer.whole(), (answer.events[-3:], answer.error)
        assert process.wait(30) == 0
    assert "Traceback" not in process.said() and "those that run (1)" in process.said()


def test_drain_timeout_tells_everybody_and_who_does_not_read_cannot_hold_it_up(tiny):
    with started(tiny, "--drain-timeout", "0.3", "--max-num-seqs", "2") as (url, process), httpx.stream("GET", url + "/live", timeout=60) as live, socket.socket() as sleeper:
        host, port = url.removeprefix("http://").split(":")
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sleeper.connect((host, int(port)))
        answer, pool = Answer(url, 8000).wait_for(5), ThreadPoolExecutor(1)
        body = json.dumps({**answer.body, "logprobs": 20}).encode()  # much to read, by somebody who sleeps
        sleeper.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        queued = Answer(url, 8000)
        whole = pool.submit(httpx.post, url + "/v1/completions", json={**answer.body, "stream": False, "stream_options": None}, timeout=60)
        until(lambda: gauge(url, "pico_vllm:num_requests_running") == 2 and gauge(url, "pico_vllm:num_requests_waiting") == 2)
        process.send_signal(signal.SIGINT)
        for stream in (answer, queued):
            stream.done.result(30)
            assert stream.error is None and stream.events[-2]["error"]["code"] == "shutting_down" and stream.events[-1] == "[DONE]"
        assert whole.result(30).status_code == 503
        for _ in live.iter_raw(): pass  # the page's endless stream ends too
        assert process.wait(30) == 0
    assert "Traceback" not in process.said()


def test_a_second_ctrl_c_leaves_at_once(tiny):
    with started(tiny) as (url, process):
        answer = Answer(url, 8000).wait_for(5)
        process.send_signal(signal.SIGINT); time.sleep(.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130 and "Traceback" not in process.said()
        answer.done.result(30)


# Mistakes

@pytest.mark.parametrize("args, words", [
    (["--port", "70000"], ["70000", "65535"]),
    (["--host", "nowhere.invalid"], ["nowhere.invalid", "127.0.0.1"]),
    (["--max-queue", "-1"], ["--max-queue", "-1"]),
    (["--drain-timeout", "nan"], ["--drain-timeout", "nan"]),
    (["--max-body-mb", "0"], ["--max-body-mb", "0"]),
    (["--log-level", "loud"], ["loud", "warning"]),
    (["--metrics-prefix", "a b"], ["a b", "underscores"]),
    (["--served-model-name", ""], ["--served-model-name"]),
    (["--api-key", "secret word"], ["API key", "spaces"]),
    (["--api-key", ""], ["API key"]),
], ids=lambda v: " ".join(v)[:40])
def test_a_mistake_is_one_line_and_early(args, words):
    from typer.testing import CliRunner
    from pico_vllm.cli import app
    handler = signal.getsignal(signal.SIGINT)
    try: done = CliRunner().invoke(app, ["serve", "no/such/model", "--port", "0", *args])  # in this process: nothing heavy may be reached
    finally: signal.signal(signal.SIGINT, handler)
    assert done.exit_code == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.output
    assert all(word in done.stderr for word in words) and "secret" not in done.stderr


def test_port_in_use_unknown_model_and_open_door(caplog):
    from typer.testing import CliRunner
    from pico_vllm.cli import app
    handler = signal.getsignal(signal.SIGINT)
    try:
        with bind("127.0.0.1", 0) as busy:
            busy.listen(); port = busy.getsockname()[1]
            def serve(*args): return CliRunner().invoke(app, ["serve", *map(str, args)])
            taken, unknown = serve("--port", port), serve("no/such/model", "--port", 0)
            assert taken.exit_code == unknown.exit_code == 2 and "no API key" not in caplog.text
            wide = serve("--host", "0.0.0.0", "--port", 0, "--dtype", "int9")
            assert wide.exit_code == 2 and "int9" in wide.stderr and "0.0.0.0" in caplog.text and "no API key is set" in caplog.text
    finally: signal.signal(signal.SIGINT, handler)
    assert all(len(done.stderr.splitlines()) == 1 and done.stdout == "" for done in (taken, unknown, wide))
    assert str(port) in taken.stderr and "--port" in taken.stderr and "no/such/model" in unknown.stderr
    done = cli("serve", "--port", 70000)  # and as a process
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert is_loopback("::1") and not is_loopback("0.0.0.0")


def test_a_port_is_taken_from_the_start():
    with bind("127.0.0.1", 0) as first, pytest.raises(ValueError, match="is in use"): bind("127.0.0.1", first.getsockname()[1])  # though nobody serves there yet


def test_a_key_that_did_not_arrive_is_no_open_server(tiny):
    done = cli("serve", tiny, "--port", "0", PICO_VLLM_API_KEY="")
    assert done.returncode == 2 and "not empty" in done.stderr


def test_a_web_page_with_a_name_of_its_own_is_refused(tiny):
    with started(tiny) as (url, _): assert [httpx.get(url + path, headers={"Host": host}).status_code for path in ("/v1/models", "/live") for host in ("evil.example",)] == [403, 403]


def test_help_is_quick_and_shows_no_key():
    code = "import sys; from pico_vllm import serve\ntry: serve.main()\nfinally: print([m for m in ('torch', 'transformers', 'fastapi', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, "serve", "--help"], capture_output=True, text=True, env={**os.environ, "PICO_VLLM_API_KEY": KEY})
    assert done.returncode == 0 and done.stdout.strip().endswith("[]") and KEY not in done.stdout and "--drain-timeout" in done.stdout


# Chat

def test_chat_in_the_process_through_a_pipe(tiny):
    done = cli("chat", tiny, "--temperature", "0", "--max-tokens", "6", input="Hello\n/reset\nHello")
    half = len(done.stdout) // 2
    assert done.returncode == 0 and done.stdout and done.stdout[:half] == done.stdout[half:], done
    for args, word in ((("--url", "localhost:1"), "http://"), (("--url", "http://127.0.0.1:9"), "no server"), (("--url", "http://127.0.0.1:9", "--dtype", "float32"), "--dtype")):
        done = cli("chat", *args, input="Hello\n")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and word in done.stderr, done


def test_chat_in_a_terminal_ctrl_c_stops_the_answer(server, tiny):
    url, _ = server
    screen, terminal = pty.openpty()
    process = subprocess.Popen([*COMMAND, "chat", "--url", url, "--temperature", "0"], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, env={**os.environ, **QUIET, "PICO_VLLM_API_KEY": KEY, "TERM": "dumb"},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a terminal's child; what a shell starts with & inherits that SIGINT is ignored
    os.close(terminal)
    seen, position = b"", 0
    def shows(words, seconds=20):
        nonlocal seen, position
        deadline = time.time() + seconds
        while words not in seen[position:] and time.time() < deadline:
            if select.select([screen], [], [], .1)[0]:
                try: seen += os.read(screen, 4096)
                except OSError: break
        assert words in seen[position:], seen[-500:]
        position = seen.index(words, position) + len(words)
    shows(b"> ")
    os.write(screen, b"Hello\n"); until(lambda: gauge(url, "vllm:num_requests_running", Authorization=f"Bearer {KEY}")); time.sleep(.2)
    process.send_signal(signal.SIGINT); shows(b"(stopped)"); shows(b"> ")
    until(lambda: not gauge(url, "vllm:num_requests_running", Authorization=f"Bearer {KEY}"))  # who stopped left nothing behind
    process.send_signal(signal.SIGINT); shows(b"Ctrl-D leaves")
    os.write(screen, b"/reset\n"); shows(b"a new conversation"); shows(b"> ")
    os.write(screen, b"\x04"); shows(b"bye")
    assert process.wait(10) == 0
    os.close(screen)
