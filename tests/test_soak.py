"""Hundreds of clients with every bad habit at once, over a pool that is too small for them. Who stays gets what it would get alone; in the end nothing is left."""
import asyncio, json, random
from collections import Counter

import httpx
import pytest
from conftest import Fake
from serving import Server, chat_tokenizer, engine_of, events, pieces

from pico_vllm.sampling import SamplingParams

MAX_MODEL_LEN = 96
MALFORMED = [b"", b"{", b"[]", b'{"model": "tiny"}', b'{"model": "tiny", "prompt": "x", "temperature": "hot"}', b'{"model": "tiny", "prompt": "x", "tools": [1]}', b'{"model": "none", "prompt": "x"}',
             b'{"model": "tiny", "prompt": ""}', b'{"model": "tiny", "prompt": "x", "max_tokens": 999}', b'{"model": "tiny", "prompt": [1, 999]}', b"\xff" * 99, b"[" * 999]
HABITS = {"whole": 5, "stream": 5, "slow reader": 3, "leaves a stream": 4, "leaves a whole": 4, "malformed": 2, "half a body": 1}
LEAVERS = {4: "leaves a stream", 5: "leaves a whole"}  # by their n, which nobody else has


class Soak:
    def __init__(self, server, fake, seed): self.server, self.fake, self.seed, self.seen, self.left = server, fake, seed, Counter(), {}

    def request(self, rng):
        "A random request: path, body, and what it must give: [(text, finish_reason)] and usage."
        tokenizer, chat = self.server.engine.tokenizer, rng.random() < .3
        text = "".join(rng.choices("abc xyz", k=rng.randrange(1, 20)))
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False) if chat else tokenizer.encode(text)
        sampling = {"n": rng.choice([1, 1, 1, 2, 3]), "max_tokens": rng.randrange(1, min(40, MAX_MODEL_LEN - len(ids)) + 1), "temperature": rng.choice([0, 0, 1, .7]), "seed": rng.randrange(100), "ignore_eos": rng.random() < .6,
                    "top_p": rng.choice([1, 1, .8]), "repetition_penalty": rng.choice([1, 1, 1.3]), "stop": rng.choice([None, [tokenizer.decode([rng.randrange(66, 76), rng.randrange(66, 76)]) for _ in range(2)]])}
        try: sampling["stop"] and [s.encode() for s in sampling["stop"]]
        except UnicodeEncodeError: sampling["stop"] = None
        want = self.fake.alone(ids, SamplingParams(**sampling))
        prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": rng.choice([text, ids])}
        usage = {"prompt_tokens": len(ids), "completion_tokens": sum(len(w[0]) for w in want), "total_tokens": len(ids) + sum(len(w[0]) for w in want)}
        logprobs = ({"logprobs": True, "top_logprobs": 20} if chat else {"logprobs": 20}) if rng.random() < .3 else {}
        return f"/v1/{'chat/' * chat}completions", {"model": "tiny", **prompt, **sampling, **logprobs}, [(w[2], w[1]) for w in want], usage

    def long(self, body, n):
        "The same, but it would go on and on if nobody ended it; n says whose it was."
        return {k: v for k, v in body.items() if k != "stop"} | {"n": n, "max_tokens": MAX_MODEL_LEN - 40, "ignore_eos": True}

    def listen(self, event, request_id, n=None, **data):
        "In the engine's thread: what becomes of the requests of those who leave."
        if event == "added" and n in LEAVERS: self.left[request_id] = n
        if event in ("added", "aborted") and request_id in self.left: self.seen[f"{event}, {LEAVERS[self.left[request_id]]}"] += 1

    async def client(self, http, i):
        rng = random.Random(self.seed * 100_000 + i)
        habit = rng.choices(list(HABITS), HABITS.values())[0]
        self.seen[habit] += 1
        path, body, want, usage = self.request(rng)
        if habit == "whole":
            r = await http.post(path, json=body)
            assert r.status_code == 200, (i, r.text)
            assert r.json()["usage"] == usage and [(c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in r.json()["choices"]] == want, (i, body, r.json(), want)
        elif habit in ("stream", "slow reader"):
            got = b""
            async with http.stream("POST", path, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as r:
                async for piece in r.aiter_bytes(None if habit == "stream" else 700):
                    got += piece
                    if habit == "slow reader" and rng.random() < .3: await asyncio.sleep(rng.random() * .05)
            chunks = events(httpx.Response(r.status_code, headers={"content-type": r.headers["content-type"]}, content=got))
            assert chunks[-1]["usage"] == usage and [pieces(chunks, j) for j in range(body["n"])] == want, (i, body, want)
        elif habit == "leaves a stream":
            stay, body = rng.randrange(6), self.long(body, 4)
            async with http.stream("POST", path, json={**body, "stream": True}) as r:
                if stay:
                    async for _ in r.aiter_lines():
                        stay -= 1
                        if not stay: break
        elif habit == "leaves a whole":
            try: await asyncio.wait_for(http.post(path, json=self.long(body, 5)), rng.random() * .25)
            except TimeoutError: self.seen["left in time"] += 1
        elif habit == "malformed":
            r = await http.post(path, content=rng.choice(MALFORMED), headers={"Content-Type": "application/json"})
            assert r.status_code in (400, 404) and r.json()["error"]["message"], (i, r.status_code, r.text)
        else:  # says how much it sends, sends half of it, and is gone
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            raw = json.dumps(body).encode()
            writer.write(f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw[:len(raw) // 2])
            await writer.drain()
            await asyncio.sleep(rng.random() * .02)
            writer.close()

    async def run(self, num_requests, num_clients):
        limit = asyncio.Semaphore(num_clients)
        async def one(i):
            async with limit: await asyncio.wait_for(self.client(http, i), 60)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=httpx.Limits(max_connections=num_clients)) as http:
            await asyncio.gather(*map(one, range(num_requests)))


def soak(num_requests, num_clients, seed):
    fake = Fake()
    engine = engine_of(fake.model, chat_tokenizer(), num_blocks=48, max_model_len=MAX_MODEL_LEN, max_num_seqs=12, max_num_batched_tokens=24)
    steps = Counter()
    def watch(scheduled, finished):
        engine.check()  # after each step
        steps["steps"] += 1; steps["preempted"] += len(scheduled.preempted)
    with Server(engine, max_queue=200) as server:
        server.call(lambda engine: engine.observers.append(watch))
        run = Soak(server, fake, seed)
        server.call(lambda engine: server.service.listeners.append(run.listen))
        asyncio.run(run.run(num_requests, num_clients))
        server.baseline(20)
        assert server.http.get("/health").status_code == 200 and server.service.fault is None and watch in engine.observers
        assert not server.service._streams, "a stream is remembered"
    print(dict(run.seen), dict(steps))
    assert steps["preempted"] and run.seen["left in time"]
    for habit in LEAVERS.values():
        added, aborted = (run.seen[f"{event}, {habit}"] for event in ("added", "aborted"))
        assert added and aborted >= .6 * added, f"of {added} requests of a client that {habit}, {aborted} were ended; the others ran for nobody"
    assert all(run.seen[habit] for habit in HABITS)


def test_soak(): soak(150, 24, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_soak_long(seed): soak(1500, 40, seed)
