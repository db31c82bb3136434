"""The failures of CASES.md that clients of a server meet, by their numbers, through the unmodified `openai` client and as bytes."""
import asyncio, json, math, time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from conftest import FakeModel, ScriptedModel
from serving import GatedModel, Server, as_new, chat_tokenizer, engine_of, events, gated, pieces, server, wait_for  # as_new and server are fixtures

from pico_vllm.sampling import SamplingParams

MULTIBYTE = ("🫠", "龘", "㋿", "👩‍🚀", "a🫠b龘c", "é🙂")
HI = [{"role": "user", "content": "hi"}]


def scripted(text, *more, num_prompt_tokens=1, **config):
    "A server that says this text, whatever it is asked with so many tokens, and then these ids."
    script = [*chat_tokenizer().encode(text), *more]
    return Server(engine_of(ScriptedModel(script, num_prompt_tokens), **config))


def say(server, text=None, chat=False, **body):
    "The answer in one piece, and as a stream: (text, finish_reason), which must be the same."
    body = {"temperature": 0, "max_tokens": 40, **body}
    ask = server.chat if chat else server.complete
    whole = ask(**body).json()["choices"][0]
    streamed = pieces(events(ask(**body, stream=True)))
    answer = whole["message"]["content"] if chat else whole["text"], whole["finish_reason"]
    assert streamed == answer
    return answer


# Text and streaming

@pytest.mark.parametrize("text", MULTIBYTE)
def test_case_1(text):
    with scripted(text, 0) as server:
        assert say(server) == (text, "stop")
        chunks = list(server.client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=40, stream=True))
        said = [c.choices[0].text for c in chunks]
        assert "".join(said) == text and not any("\ufffd" in s for s in said)
        server.baseline()


def test_case_1_cut_in_the_middle():
    with scripted("a🫠") as server:
        assert say(server, max_tokens=3) == (chat_tokenizer().decode(chat_tokenizer().encode("a🫠")[:3]), "length")


def test_case_2():
    with scripted("ABCDEFGHIJKLMN" + "z" * 30) as server:
        assert say(server, stop=["DEFGHIJ"]) == ("ABC", "stop") == say(server, stop="DEFGHIJ")
        assert say(server, stop="DEFGHIJ", include_stop_str_in_output=True) == ("ABCDEFGHIJ", "stop")
        assert say(server, stop="DEFGHIJ", max_tokens=8) == ("ABCDEFGH", "length")  # the stream ends within it
        assert say(server, stop="DEFGX", max_tokens=14) == ("ABCDEFGHIJKLMN", "length")  # the match fails
        for chunk in events(server.complete(temperature=0, max_tokens=40, stop="DEFGHIJ", stream=True)): assert chunk["choices"][0]["text"] in ("", "A", "B", "C", "AB", "BC", "ABC")
        server.baseline()


@pytest.mark.parametrize("text", ["a\n\nb\n", "data: [DONE]\n\n", 'say "hi" \\ and 🫠', "\r\n\r\nid: 3\r\n", "event: error\ndata: {}\n\n", "\u2028\u2029\x85", "\0x"])
def test_case_3(text):
    script = [*chat_tokenizer().encode(text), 70]
    with Server(engine_of(ScriptedModel(script, eos_token_ids=()))) as server:
        n = len(text.encode())
        assert say(server, max_tokens=n) == (text, "length")
        chunks = server.client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=n, stream=True)
        assert "".join(c.choices[0].text for c in chunks) == text


def test_case_4(server):
    ask = dict(model="tiny", messages=HI, max_tokens=5, temperature=0, logprobs=True, n=2)
    whole = server.client.chat.completions.create(**ask)
    for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
        body = {**ask, "stream": True} | ({} if options is None else {"stream_options": options})
        chunks = events(server.post("/v1/chat/completions", body))
        if options == {"include_usage": True}:
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole.usage.model_dump(exclude_unset=True)
            assert all(c["choices"] and c["usage"] is None for c in chunks[:-1]) and chunks[-2]["choices"][0]["finish_reason"]
        else: assert not any(c.get("usage") for c in chunks) and all(c["choices"] for c in chunks)
        for choice in whole.choices: assert pieces(chunks, choice.index) == (choice.message.content, choice.finish_reason)
    last = list(server.client.completions.create(model="tiny", prompt=["x", "yz"], max_tokens=3, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.choices == [] and last.usage.prompt_tokens == 3 and last.usage.completion_tokens <= 6


def test_case_5():
    with scripted("hello", 0, *[70] * 30) as server:
        assert say(server, max_tokens=9) == ("hello", "stop")
        assert say(server, max_tokens=9, stop="lo") == ("hel", "stop")
        assert say(server, max_tokens=1) == ("h", "length")
        assert say(server, max_tokens=6) == ("hello", "stop")  # EOS exactly on the last allowed token
        assert say(server, max_tokens=5) == ("hello", "length")
        assert say(server, max_tokens=5, stop="lo") == ("hel", "stop")
        assert say(server, max_tokens=4, stop_token_ids=chat_tokenizer().encode("l")) == ("he", "stop")
        server.baseline()


def test_case_6(server):
    for stream in ({}, {"stream": False}, {"stream": None}):
        r = server.chat(max_tokens=3, **stream)
        assert r.status_code == 200 and r.headers["content-type"] == "application/json" and r.json()["object"] == "chat.completion" and r.json()["id"].startswith("chatcmpl-")
        r = server.complete(max_tokens=3, **stream)
        assert r.status_code == 200 and r.json()["object"] == "text_completion" and r.json()["id"].startswith("cmpl-")
    chunks = events(server.chat(max_tokens=3, stream=True))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == len({c["created"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""} and not any("role" in c["choices"][0]["delta"] for c in chunks[1:])
    assert {c["object"] for c in events(server.complete(max_tokens=3, stream=True))} == {"text_completion"}


def test_case_6_fields(server):
    plain = server.chat(max_tokens=4, temperature=0).json()["choices"]
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True}
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "n": 1, "presence_penalty": 0, "logit_bias": {}, "stop": None, "logprobs": False}
    assert server.chat(max_tokens=4, temperature=0, **harmless, **neutral).json()["choices"] == plain
    assert server.chat(max_completion_tokens=4, temperature=0).json()["choices"] == plain
    assert server.chat(max_completion_tokens=2, ignore_eos=True).json()["usage"]["completion_tokens"] == 2
    server.refused(server.chat(max_completion_tokens=2, max_tokens=3))
    for name, value in {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "functions": [{"name": "f"}], "response_format": {"type": "json_object"}, "reasoning_effort": "high",
                        "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "mp3"}, "prediction": {"type": "content", "content": "x"}, "web_search_options": {}, "verbosity": "low"}.items():
        assert server.refused(server.chat(**{name: value}), param=name)["code"] == "not_implemented"
    for name, value in {"echo": True, "best_of": 3, "suffix": "x"}.items(): server.refused(server.complete(**{name: value}), param=name)
    assert server.complete(max_tokens=2, temperature=0, skip_special_tokens=True, use_beam_search=False, length_penalty=1.0).status_code == 200  # what vLLM's clients send and mean nothing by
    for name, value in {"skip_special_tokens": False, "use_beam_search": True}.items(): assert server.refused(server.complete(**{name: value}), param=name)["code"] == "not_implemented"
    for name in ("max_token", "guided_json", "n_best", "temprature"): assert server.refused(server.complete(**{name: 1}), param=name)["code"] == "unknown_field"
    with pytest.raises(openai.BadRequestError) as e: server.client.chat.completions.create(model="tiny", messages=HI, response_format={"type": "json_object"})
    assert e.value.param == "response_format" and e.value.code == "not_implemented"


# Limits and input checks

def test_case_7(server, fake):
    good = dict(max_tokens=6, temperature=0)
    for empty in ("", [], [[]], ["good", ""], [[70], []]): server.refused(server.complete(empty, **good))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: server.complete(p, **good), ["good", "", "good", ""]))
    assert [a.status_code for a in answers] == [200, 400, 200, 400]
    want = fake.alone(fake.tokenizer.encode("good"), SamplingParams(**good))[0]
    for a in answers[::2]: assert (a.json()["choices"][0]["text"], a.json()["choices"][0]["finish_reason"]) == (want[2], want[1])


def test_case_8(server):
    server.refused(server.post("/v1/chat/completions", {"model": "tiny", "messages": []}), words=["messages"])
    with pytest.raises(openai.BadRequestError): server.client.chat.completions.create(model="tiny", messages=[])


def test_case_9(fake):
    with Server(engine_of(fake.model, num_blocks=8, block_size=4, max_model_len=16)) as server:
        for n in (17, 16): server.refused(server.complete("x" * n, max_tokens=1), words=[n, 16])
        assert server.complete("x" * 15, max_tokens=1).status_code == 200
        server.baseline()


@pytest.mark.parametrize("stream", [False, True])
def test_case_10(fake, stream):
    with Server(engine_of(fake.model, num_blocks=16, block_size=4, max_model_len=16)) as server:
        def tokens(**body):
            r = server.complete("x" * 10, ignore_eos=True, stream=stream, **body, **({"stream_options": {"include_usage": True}} if stream else {}))
            return (events(r)[-1] if stream else r.json())["usage"]["completion_tokens"] if r.status_code == 200 else server.refused(r)
        assert tokens(max_tokens=6) == 6
        for wrong in (7, 100): assert "16" in tokens(max_tokens=wrong)["message"] and "10" in tokens(max_tokens=wrong)["message"]
        for wrong in (0, -1): assert tokens(max_tokens=wrong)["param"] == "max_tokens"
        assert tokens() == 6 == tokens(max_tokens=None)  # the default of 16 was not asked for
        server.baseline()


def test_case_10_chat(fake):
    n = len("<user>hi\n<assistant>")
    with Server(engine_of(fake.model, num_blocks=32, block_size=4, max_model_len=n + 6)) as server:
        assert server.chat(ignore_eos=True).json()["usage"] == {"prompt_tokens": n, "completion_tokens": 6, "total_tokens": n + 6}
        assert server.chat(ignore_eos=True, max_completion_tokens=6).json()["usage"]["completion_tokens"] == 6
        for wrong in (7, 100): server.refused(server.chat(max_completion_tokens=wrong), words=[n, n + 6])
        for wrong in (0, -1): server.refused(server.chat(max_completion_tokens=wrong), param="max_completion_tokens")
        server.baseline()


def test_case_11(fake):
    with Server(engine_of(fake.model, num_blocks=2, block_size=4, max_model_len=64)) as server:
        with ThreadPoolExecutor(4) as pool:
            asks = [("x" * 9, 1), ("y", 4), ("x" * 8, 8), ("y", 4)]
            answers = list(pool.map(lambda a: server.complete(a[0], max_tokens=a[1], temperature=0, ignore_eos=True), asks))
        server.refused(answers[0], words=["2 blocks"]); server.refused(answers[2], words=["2 blocks"])
        assert answers[1].json()["choices"] == answers[3].json()["choices"] and answers[1].json()["usage"]["completion_tokens"] == 4
        server.baseline()


BAD_BODIES = [b"{bad", b"[]", b"", b"null", b'"hi"', b"\xff\xfe", b'{"model": "tiny"}', b"{" * 2000, b"[" * 100000, b'{"model": "tiny", "messages": "hi"}', b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
              b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
              b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}", b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}']

@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda b: repr(b[:40]))
def test_case_12_bodies(server, body):
    steps = []
    server.engine.observers.append(lambda *_: steps.append(1))
    response = server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    server.refused(response, 404 if b'"\\ud800", "m' in body else 400)
    server.engine.observers.pop()
    assert not steps, "the engine was touched"


def test_case_12(server):
    wrong = {"temperature": ["hot", True, "0.5", -1, [1]], "top_p": [2, 0, -0.1], "top_k": [-2, 1.5], "min_p": [2], "n": [0, 129, "1"], "max_tokens": ["9", 1.5, 0], "stop": [5, [""], [1]], "seed": [1.5, 2**64],
             "presence_penalty": [3], "frequency_penalty": [-3], "repetition_penalty": [0], "logit_bias": [{"a": 1}, {"1": 200}, {"999": 1}, []], "stop_token_ids": [[-1], [999], "1"], "stream": ["yes", 1], "min_tokens": [-1, 99]}
    for name, values in wrong.items():
        for value in values:
            for ask in (server.chat, server.complete): server.refused(ask(**{"max_tokens": 5, name: value}), param=name)
    for value in (["x"], 21, -1): server.refused(server.complete(logprobs=value), param="logprobs")
    for value in (21, -1, True): server.refused(server.chat(logprobs=True, top_logprobs=value), param="top_logprobs")
    for prompt in (None, 5, [1.5], [True], [[1], "x"], ["x", 1], {}, [-1], [260], [10**9], [10**30]): server.refused(server.complete(prompt))
    server.refused(server.http.get("/v1/nothing"), 404); server.refused(server.http.get("/v1/completions"), 405)
    server.refused(server.http.post("/v1/completions", content=b"model=tiny", headers={"Content-Type": "application/x-www-form-urlencoded"}), 415, words=["application/json"])


def test_case_12_size_and_depth(fake):
    with Server(engine_of(fake.model), max_body_bytes=10_000) as server:
        assert server.complete("x", user="u" * 9000, max_tokens=1).status_code == 200
        server.refused(server.complete("x", user="u" * 10_000), 413)
        def slowly(): yield from (b"x" * 1000 for _ in range(1000))  # chunked: no content-length
        server.refused(server.http.post("/v1/completions", content=slowly()), 413)
        deep = {}
        for _ in range(500): deep = {"a": deep}
        server.refused(server.complete("x", metadata=deep))
        assert server.complete("[" * 90, max_tokens=1).status_code == 200  # brackets in a text nest nothing
        server.baseline()


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 10**6, b"[" * 10**6, b'"' * 10**6, b"\\" * 10**6, b'{"a":' * 10**5, b'{"prompt": "' + b'\\"' * 10**6], ids=lambda b: repr(b[:16]))
def test_case_12_big_and_bad(server, body):
    "A body that is no JSON is refused quickly, however it is made: nobody else waits for it."
    start = time.monotonic()
    server.refused(server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}))
    assert time.monotonic() - start < 5


def test_case_13(fake):
    with Server(engine_of(fake.model), names=["tiny", "gpt-4o"]) as server:
        assert [m.id for m in server.client.models.list()] == ["tiny", "gpt-4o"] and server.client.models.retrieve("gpt-4o").id == "gpt-4o"
        for alias in ("tiny", "gpt-4o"):
            assert server.client.completions.create(model=alias, prompt="x", max_tokens=1).model == alias
            assert {c.model for c in server.client.chat.completions.create(model=alias, messages=HI, max_tokens=2, stream=True)} == {alias}
        for model in ("gpt-5", "", "Tiny"):
            for path in ("/v1/completions", "/v1/chat/completions"):
                body = {"model": model, "prompt": "x"} if "chat" not in path else {"model": model, "messages": HI}
                assert server.refused(server.post(path, body), 404, "model", ["tiny", "gpt-4o"])["code"] == "model_not_found"
        with pytest.raises(openai.NotFoundError): server.client.models.retrieve("gpt-5")
        assert server.post("/v1/completions", {"prompt": "x"}).json()["model"] == "tiny"  # who names none gets the one that is served
        server.baseline()


class DiesAtThree(GatedModel):
    def __call__(self, *args):
        out = super().__call__(*args)
        if self.steps == 3: raise RuntimeError("the model had a fault")
        return out


def test_case_14():
    model = DiesAtThree()
    with Server(engine_of(model)) as server:
        assert server.http.get("/health").status_code == 200
        ask = dict(max_tokens=20, temperature=0, ignore_eos=True)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(server.complete, "x", **ask, stream=stream) for stream in (False, True, False, True)]
            wait_for(lambda: server.service.num_unfinished == 4 and model.entered.is_set())
            start = time.monotonic()
            model.gate.set()
            try: answers = [w.result(10) for w in waiting]
            except TimeoutError:  # somebody hangs: end the server, or this test would hang with them
                server.uvicorn.should_exit = True
                raise
        assert time.monotonic() - start < 1
        for a in answers[::2]: assert server.refused(a, 503)["type"] == "server_error"
        for a in answers[1::2]: assert "error" in events(a)[-1] and not any(x.get("finish_reason") for c in events(a) for x in c.get("choices", ()))
        server.refused(server.http.get("/health"), 503)
        server.refused(server.complete("x"), 503)
        with pytest.raises(openai.InternalServerError): server.client.chat.completions.create(model="tiny", messages=HI)
        assert server.http.get("/version").status_code == 200 and server.http.get("/v1/models").status_code == 200


def test_case_14_own_fault(fake):
    "A tokenizer that raises for one request's ids ends that request alone."
    tokenizer = chat_tokenizer()
    engine = engine_of(ScriptedModel([70] * 60), tokenizer)
    decode = tokenizer.decode
    def raises(ids, **kw):
        ids = ids if isinstance(ids, list) else list(ids)
        if 200 in ids: raise RuntimeError("no text for 200")
        return decode(ids, **kw)
    tokenizer.decode = raises
    with Server(engine) as server:
        with ThreadPoolExecutor(4) as pool:
            bodies = [{}, {"logit_bias": {"200": 100}}, {"logit_bias": {"200": 100}, "stream": True}, {"stream": True}]
            good, bad, bad_stream, good_stream = pool.map(lambda b: server.complete("x", max_tokens=9, temperature=0, **b), bodies)
        server.refused(bad, 500)
        assert "error" in events(bad_stream)[-1] and not any(x["finish_reason"] for c in events(bad_stream)[:-1] for x in c["choices"])
        assert (good.json()["choices"][0]["text"], "length") == pieces(events(good_stream)) == (decode([70] * 9), "length")
        with pytest.raises(openai.APIError, match="fault of its own"): list(server.client.completions.create(model="tiny", prompt="x", temperature=0, stream=True, logit_bias={"200": 100}))
        assert server.http.get("/health").status_code == 200
        server.baseline()


@pytest.mark.parametrize("stream", [False, True])
def test_case_15(stream):
    with gated(max_queue=2, max_num_seqs=1) as server:
        with ThreadPoolExecutor(5) as pool:
            waiting = [pool.submit(server.complete, "x", max_tokens=3, stream=stream) for _ in range(5)]
            wait_for(lambda: sum(w.done() for w in waiting) == 2)  # at once: the gate is still closed
            for w in waiting:
                if w.done():
                    assert server.refused(w.result(), 429)["type"] == "rate_limit_error" and int(w.result().headers["retry-after"]) >= 1
            server.refused(server.complete("x", n=4), 400)   # could never be
            with pytest.raises(openai.RateLimitError): server.client.completions.create(model="tiny", prompt="x")
            server.refused(server.complete(["x", "y"]), 429)
            server.refused(server.complete(list("abcd")), 400)
            server.model.gate.set()
            assert sorted(w.result().status_code for w in waiting) == [200, 200, 200, 429, 429]
        assert server.complete("x", max_tokens=3).status_code == 200
        server.baseline()


# Chat format

def rendered(server, messages):
    "Text of the prompt that these messages give."
    r = server.post("/tokenize", {"messages": messages})
    return server.engine.tokenizer.decode(r.json()["tokens"]) if r.status_code == 200 else server.refused(r)


def test_case_16(server):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert rendered(server, [{"role": "user", "content": parts}]) == rendered(server, HI) == "<user>hi\n<assistant>"
    assert server.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 5}).json()["choices"] == server.chat(temperature=0, max_tokens=5).json()["choices"]
    for part in ({"type": "image_url", "image_url": {"url": "data:,x"}}, {"type": "input_audio"}, {"type": "text"}, {"text": "x"}, "x", 5):
        server.refused(server.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}), words=["messages[0]"])


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}

def test_case_17(server):
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    assert rendered(server, talk) == '<user>hi\n<assistant>[weather {"city": "Köln"}]\n<tool>rain\n<assistant>'
    assert server.client.chat.completions.create(model="tiny", messages=talk, max_tokens=2).usage.prompt_tokens == len(server.engine.tokenizer.encode(rendered(server, talk)))
    for messages in ([{"role": "user", "content": None}], [{"role": "wizard", "content": "x"}], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": "x", "tool_calls": [CALL]}],
                     ["hi"], [5], [None], [{"role": "tool", "content": "x"}], [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}],
                     [*HI, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{bad"}}]}], [{"role": ["user"], "content": "x"}], [{"role": "user", "content": {"a": 1}}]):
        server.refused(server.post("/v1/chat/completions", {"model": "tiny", "messages": messages}))
        server.refused(server.post("/tokenize", {"messages": messages}))


def test_case_18(server):
    for messages in (HI, [{"role": "system", "content": ""}, *HI], [{"role": "system", "content": "be brief"}, *HI]):
        ids = server.engine.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == ids
        assert server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.slow
def test_case_18_real_tokenizer(real_tokenizer):
    model = ScriptedModel([70] * 60)
    model.config.vocab_size = len(real_tokenizer)
    with Server(engine_of(model, real_tokenizer)) as server:
        for messages in (HI, [{"role": "system", "content": ""}, *HI], [{"role": "system", "content": "x"}, *HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]):
            ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
            parsed = [{**m, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Köln"}}}], "content": ""} if "tool_calls" in m else m for m in messages]
            assert ids == real_tokenizer.apply_chat_template(parsed, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert rendered(server, HI) != rendered(server, [{"role": "system", "content": ""}, *HI])
        server.refused(server.post("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}))


def test_case_19():
    from tokenizers import processors
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert tokenizer.encode("x").count(bos) == 1
    with Server(engine_of(ScriptedModel([70] * 60, num_prompt_tokens=21), tokenizer)) as server:
        ids = server.post("/tokenize", {"messages": HI}).json()["tokens"]
        assert ids[0] == bos and ids.count(bos) == 1 and len(ids) == 21
        assert server.chat(max_tokens=2).json()["usage"]["prompt_tokens"] == 21
        assert server.post("/tokenize", {"prompt": "x"}).json()["tokens"].count(bos) == 1
        server.baseline()


# Sampling

@pytest.mark.parametrize("temperature", [1, 0])
def test_case_24(server, fake, temperature):
    ask = dict(prompt="abc", n=3, seed=1, temperature=temperature, max_tokens=12)
    whole = server.client.completions.create(model="tiny", **ask)
    want = fake.alone(fake.tokenizer.encode("abc"), SamplingParams(n=3, seed=1, temperature=temperature, max_tokens=12))
    assert [c.index for c in whole.choices] == [0, 1, 2] and [(c.text, c.finish_reason) for c in whole.choices] == [(w[2], w[1]) for w in want]
    assert len({c.text for c in whole.choices}) == (3 if temperature else 1)
    assert whole.usage.prompt_tokens == 3 and whole.usage.completion_tokens == sum(len(w[0]) for w in want)
    chunks = events(server.complete(**ask, stream=True))
    assert [pieces(chunks, i) for i in range(3)] == [(w[2], w[1]) for w in want]
    two = server.client.completions.create(model="tiny", **{**ask, "prompt": ["abc", "abc"]})
    assert [c.index for c in two.choices] == list(range(6)) and two.usage.prompt_tokens == 6 and [c.text for c in two.choices] == 2 * [w[2] for w in want]


def test_case_24_abort():
    with gated() as server:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(server.hang_up, "/v1/completions", {"model": "tiny", "prompt": "abc", "n": 3, "max_tokens": 50, "ignore_eos": True, "stream": True}, b"data: ")
            wait_for(lambda: server.service.num_unfinished == 3)
            server.model.gate.set()
        server.baseline()


def test_case_25(tiny):
    tokenizer = chat_tokenizer()
    with Server(engine_of(tiny.model, tokenizer)) as server:
        ask = dict(model="tiny", temperature=0, max_tokens=4, extra_body={"ignore_eos": True})
        def check(known, entries):
            assert len(entries) == 4, "one entry a token"
            for e in entries:
                truth = tiny.logits_of(tuple(known)).log_softmax(-1)[:256]  # of the whole row; the padding ids are not shown
                values, best = (x.tolist() for x in truth.topk(2))
                assert [list(t.bytes) for t in e.top_logprobs] == [[b] for b in map(byte_of, best)] and list(e.bytes) == [byte_of(best[0])]
                for t, v in zip(e.top_logprobs, values): assert math.isfinite(t.logprob) and t.logprob == pytest.approx(v, abs=1e-4) and t.token == tokenizer.decode(best[values.index(v)])
                known.append(best[0])
        chat = server.client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **ask)
        check(tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False), chat.choices[0].logprobs.content)
        stream = server.client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, stream=True, **ask)
        streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert [e.model_dump() for e in streamed] == [e.model_dump() for e in chat.choices[0].logprobs.content]
        old = server.client.completions.create(prompt=tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False), logprobs=2, **ask).choices[0].logprobs
        assert old.token_logprobs == [e.logprob for e in chat.choices[0].logprobs.content] and [len(t) for t in old.top_logprobs] == [2] * 4 and len(old.text_offset) == len(old.tokens) == 4
        none = server.client.chat.completions.create(messages=HI, **ask).choices[0]
        assert none.logprobs is None and none.message.content == chat.choices[0].message.content
        server.baseline()


def byte_of(token_id):
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = sorted([(chr(b), b) for b in plain] + [(chr(256 + i), b) for i, b in enumerate(b for b in range(256) if b not in plain)])
    return order[token_id][1]


def test_case_26():
    script = [*chat_tokenizer().encode("ab"), 1, *chat_tokenizer().encode("cd"), 0, *chat_tokenizer().encode("ef")]
    with Server(engine_of(ScriptedModel(script, eos_token_ids=(0, 1)))) as server:
        assert say(server, max_tokens=8) == ("ab", "stop")
        text, reason = say(server, max_tokens=8, ignore_eos=True)
        assert text == chat_tokenizer().decode(script) and reason == "length"
        assert say(server, max_tokens=8, min_tokens=3)[0][:2] == "ab"
        server.baseline()


def test_case_27(server):
    "The fake model's padding rows have by far the largest logits."
    out = server.client.completions.create(model="tiny", prompt="x", max_tokens=40, temperature=1, n=4, logprobs=20, extra_body={"ignore_eos": True})
    assert out.usage.completion_tokens == 160
    assert server.engine.model.row([70])[256:].min() > server.engine.model.row([70])[:256].max()
    assert all(math.isfinite(v) for c in out.choices for t in c.logprobs.top_logprobs for v in t.values())
    server.refused(server.complete(logit_bias={"256": 100}), param="logit_bias")


# Cancelling

def client_that_leaves(server, stream, after=b"", until=lambda: True, **body):
    return server.hang_up("/v1/completions", {"model": "tiny", "prompt": "abcdefgh", "max_tokens": 60, "ignore_eos": True, "stream": stream, **body}, after, until)


@pytest.mark.parametrize("stream", [False, True])
def test_case_32_waiting(stream):
    "A client leaves while its request waits behind another one."
    with gated(max_num_seqs=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "x", max_tokens=4, temperature=0)
        wait_for(server.model.entered.is_set)
        client_that_leaves(server, stream, until=lambda: server.service.num_unfinished == 2)
        wait_for(lambda: server.service.num_unfinished == 1)
        server.model.gate.set()
        assert first.result().status_code == 200
        server.baseline()


@pytest.mark.parametrize("stream", [False, True])
def test_case_32_mid_chunk(stream):
    "A client leaves in the middle of its prompt, which takes several steps."
    with gated(max_num_batched_tokens=2, max_num_seqs=2) as server:
        client_that_leaves(server, stream, until=server.model.entered.is_set)
        wait_for(lambda: server.service.num_unfinished == 0)
        server.model.gate.set()
        server.baseline()
        assert server.model.steps <= 2, "it went on after the client had left"


@pytest.mark.parametrize("stream", [False, True])
def test_case_32_running(stream):
    class Slow(FakeModel):
        def __call__(self, *args):
            time.sleep(.02)
            return super().__call__(*args)
    with Server(engine_of(Slow())) as server, ThreadPoolExecutor(2) as pool:
        stays = pool.submit(server.complete, "stays", max_tokens=30, temperature=0, ignore_eos=True)
        if stream: client_that_leaves(server, True, b"data: ")
        else:
            with pytest.raises(httpx.ReadTimeout): server.post("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 100, "ignore_eos": True}, timeout=.2)
        wait_for(lambda: server.service.num_unfinished <= 1, 1, "the request of a client that has left goes on")
        assert stays.result().status_code == 200
        server.baseline()


@pytest.mark.parametrize("stream", [False, True])
def test_case_32_preempted(fake, stream):
    "A client leaves while its request is preempted: the pool is too small for two."
    model, preempted = GatedModel(), []
    engine = engine_of(model, num_blocks=6, max_model_len=24)
    def watch(scheduled, finished):
        if scheduled.preempted and not preempted: model.gate.clear()
        preempted.extend(scheduled.preempted)
    engine.observers.append(watch)
    with Server(engine) as server, ThreadPoolExecutor(2) as pool:
        try:
            stays = pool.submit(server.complete, "abcd", max_tokens=16, temperature=0, ignore_eos=True)
            wait_for(model.entered.is_set)
            leaves = pool.submit(client_that_leaves, server, stream, until=lambda: preempted, prompt="efgh", max_tokens=16)
            wait_for(lambda: not server.service._inbox.empty())  # the guest's is the engine's next
            model.gate.set()
            leaves.result()
            wait_for(lambda: server.service.num_unfinished == 1)
        finally: model.gate.set()
        assert stays.result().json()["choices"][0]["text"] == fake.alone(fake.tokenizer.encode("abcd"), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0][2]
        server.baseline()


def test_case_32_finished_unknown_twice(server):
    r = server.complete("x", max_tokens=3)
    for request_id in (r.json()["id"], "nobody", "nobody", ""): server.service.abort(request_id)
    for _ in range(2): client_that_leaves(server, True, b"[DONE]", max_tokens=2)


def test_case_32_official_clients(server):
    "Closing the stream of the openai client, sync and async, and cancelling a task that waits."
    with server.client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    wait_for(lambda: server.service.num_unfinished == 0, 3)
    async def main():
        async with server.async_client() as client:
            async with await client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body={"ignore_eos": True}) as stream:
                async for _ in stream: break
            task = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HI, extra_body={"ignore_eos": True}))
            await asyncio.sleep(.01)
            task.cancel()
            answers = await asyncio.gather(*(client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0) for _ in range(8)))
            return {a.choices[0].text for a in answers}
    assert len(asyncio.run(main())) == 1


# Server

def test_case_40():
    class Sleeps(FakeModel):
        def __call__(self, *args):
            time.sleep(.5)
            return super().__call__(*args)
    with Server(engine_of(Sleeps())) as server, ThreadPoolExecutor(1) as pool:
        server.http.get("/health")  # the connection is there
        asked = pool.submit(server.complete, "x", max_tokens=4, temperature=0, ignore_eos=True)
        wait_for(lambda: server.service.num_unfinished == 1)
        took = []
        while not asked.done():
            start = time.monotonic()
            assert server.http.get("/health").status_code == 200
            took.append(time.monotonic() - start)
            time.sleep(.02)
        assert asked.result().status_code == 200 and len(took) > 10
        assert sorted(took)[-2] < .1, f"a step holds the server up: {max(took):.2f} s"
        server.baseline()


# Beyond the numbers

def test_one_batch(server):
    "Sixteen clients at once take a fraction of the steps of sixteen in a row, and get the same."
    steps = []
    server.engine.observers.append(lambda *_: steps.append(1))
    ask = lambda i: server.complete(f"client {i}", max_tokens=20, temperature=0, ignore_eos=True).json()["choices"]
    alone = [ask(i) for i in range(16)]
    in_a_row = len(steps)
    steps.clear()
    with ThreadPoolExecutor(16) as pool: together = list(pool.map(ask, range(16)))
    server.engine.observers.pop()
    assert together == alone and in_a_row == 320 and len(steps) < 160


def test_api_key(fake):
    with Server(engine_of(fake.model), api_key="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cret2"}, {"Authorization": "Bearer"}, {"Authorization": b"Bearer \xff"}):
            for path in ("/v1/models", "/v1/nothing", "/metrics"): server.refused(server.http.get(path, headers=headers), 401)
            server.refused(server.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers=headers), 401)
        assert server.http.get("/health").status_code == server.http.get("/version").status_code == 200
        with pytest.raises(openai.AuthenticationError): server.client.models.list()
        assert server.client.with_options(api_key="s3cret").completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_tokenize_and_back(server):
    text = "a🫠 <user>\n"
    r = server.post("/tokenize", {"prompt": text}).json()
    assert r["tokens"] == server.engine.tokenizer.encode(text) and r["count"] == len(text.encode()) and r["max_model_len"] == 128
    assert server.post("/detokenize", {"tokens": r["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""} and server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    for tokens in (["a"], [1.5], [-1], [260], [10**30], "ab", None, [True]): server.refused(server.post("/detokenize", {"tokens": tokens}))
    for body in ({}, {"prompt": "x", "messages": HI}, {"prompt": 5}, {"prompt": "\ud800"}): server.refused(server.post("/tokenize", content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}))
    server.refused(server.post("/tokenize", {"prompt": "x", "model": "other"}), 404)
