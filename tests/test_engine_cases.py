"""The failures of CASES.md that an engine without a server can have, by their numbers. After each the engine is as new."""
import copy
import math

import pytest
import torch
from conftest import FakeModel, assert_baseline, assert_grows, drive, scripted_engine, watch_preemptions

from pico_vllm.detokenizer import Detokenizer
from pico_vllm.engine import LLM, LLMEngine
from pico_vllm.rope import RotaryEmbedding
from pico_vllm.sampling import SamplingParams
from pico_vllm.testing import assert_matches

GREEDY = SamplingParams(temperature=0, max_tokens=4)
MULTIBYTE = ("🫠", "龘", "㋿", "👩‍🚀", "a🫠b龘c", "é🙂")


def stream(engine, request_id, prompt, params):
    "One request alone, every output of every step."
    engine.add_request(request_id, prompt, params)
    outs = []
    while engine.has_unfinished_requests() and len(outs) < 200:
        outs += engine.step()
        engine.check()
    for a, b in zip([None, *outs], outs): assert_grows(a, b)
    assert_baseline(engine)
    return outs


def only(done): return done.outputs[0]


# Text and streaming

def feed(tokenizer, ids):
    "The detokenizer's text after each id, and at the end."
    d, texts = Detokenizer(tokenizer), []
    for i in ids:
        d.append(i)
        texts.append(d.text)
    texts.append(d.finish())
    for a, b in zip(texts, texts[1:]): assert b.startswith(a), f"{a!r} was taken back: {b!r}"
    return texts


@pytest.mark.parametrize("text", MULTIBYTE)
def test_case_1(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    texts = feed(tokenizer, ids)
    assert texts[-1] == text and not any("\ufffd" in t for t in texts)
    assert set(texts) <= {text[:n] for n in range(len(text) + 1)}, "more or less than whole characters"
    outs = stream(scripted_engine([*ids, 0]), "r", [65], SamplingParams(temperature=0, max_tokens=40))
    assert only(outs[-1]).text == text and not any("\ufffd" in only(o).text for o in outs)


def test_case_1_cut_in_the_middle(tokenizer):
    "Half a character at the end is shown as the tokenizer shows it, at the end only."
    ids = tokenizer.encode("a🫠")[:3]
    outs = stream(scripted_engine([*ids, 0, 0]), "r", [65], SamplingParams(temperature=0, max_tokens=3))
    assert [only(o).text for o in outs] == ["a", "a", tokenizer.decode(ids)]


@pytest.mark.slow
def test_case_1_real_tokenizer(real_tokenizer):
    ids = [9707, 9284, 104, 254, 0]
    texts = feed(real_tokenizer, ids)
    assert texts[:4] == ["Hello", "Hello", "Hello", "Hello🫠"] and texts[-1] == real_tokenizer.decode(ids)
    for text in ("龘", "㋿", "👩‍🚀"):
        assert len(real_tokenizer.encode(text)) > 1
        assert feed(real_tokenizer, real_tokenizer.encode(text))[-1] == text


@pytest.mark.parametrize("include", [False, True])
def test_case_2(tokenizer, include):
    script = tokenizer.encode("ABCDEFGHIJKLMN")
    outs = stream(scripted_engine(script), "r", [65], SamplingParams(temperature=0, max_tokens=14, stop=["DEFGHIJ"], include_stop_str_in_output=include))
    last = only(outs[-1])
    assert last.text == ("ABCDEFGHIJ" if include else "ABC") and last.finish_reason == "stop" and last.stop_reason == "DEFGHIJ" and len(last.token_ids) == 10
    assert all(only(o).text in ("A", "AB", "ABC") for o in outs[:-1]), "a part of the stop string was shown"


def test_case_2_match_fails(tokenizer):
    params = SamplingParams(temperature=0, max_tokens=8, stop=["DEFGHIJ"])
    texts = [only(o).text for o in stream(scripted_engine(tokenizer.encode("ABCDEFxy")), "r", [65], params)]
    assert texts == ["A", "AB", "ABC", "ABC", "ABC", "ABC", "ABCDEFx", "ABCDEFxy"]
    outs = stream(scripted_engine(tokenizer.encode("ABCDEFGH")), "r", [65], params)  # the stream ends within it
    assert only(outs[-2]).text == "ABC" and only(outs[-1]).text == "ABCDEFGH" and only(outs[-1]).finish_reason == "length"


@pytest.mark.slow
def test_case_2_real_tokenizer(real_tokenizer):
    script = real_tokenizer.encode("DEFGHIJ")
    assert len(script) == 4
    d, texts = Detokenizer(real_tokenizer, ["DEFGHIJ"]), []
    for i in [*real_tokenizer.encode("ABC"), *script]:
        stopped = d.append(i)
        texts.append(d.text)
    assert stopped == "DEFGHIJ" and d.text == "ABC" and all("ABC".startswith(t) for t in texts)


def test_case_5(tokenizer):
    ids = tokenizer.encode("hello")
    def end(script, **kwargs):
        outs = stream(scripted_engine(script), "r", [65], SamplingParams(temperature=0, **kwargs))
        assert [only(o).finish_reason for o in outs[:-1]] == [None] * (len(outs) - 1) and [o.finished for o in outs] == [False] * (len(outs) - 1) + [True]
        return only(outs[-1]).finish_reason, only(outs[-1]).text
    assert end([*ids, 0, 70], max_tokens=9) == ("stop", "hello")
    assert end([*ids, 70, 70], stop="lo", max_tokens=9) == ("stop", "hel")
    assert end(ids, max_tokens=1) == ("length", "h")
    assert end([*ids, 0], max_tokens=6) == ("stop", "hello")   # EOS exactly on the last allowed token
    assert end(ids, stop="lo", max_tokens=5) == ("stop", "hel")  # so with a stop string
    assert end([*ids, 77], stop_token_ids=[77], max_tokens=6) == ("stop", "hello")


# Limits

@pytest.mark.parametrize("empty", ["", {"prompt_token_ids": []}, {"prompt": ""}, []])
def test_case_7(tiny, empty):
    engine = tiny.engine()
    llm = LLM.from_engine(engine)
    with pytest.raises(ValueError, match="prompt 1.*0 tokens"): llm.generate(["good", empty, "good too"], GREEDY, use_tqdm=False)
    assert_baseline(engine)
    want = tiny.alone(tiny.tokenizer.encode("good"), GREEDY)[0][0]
    assert only(llm.generate("good", GREEDY, use_tqdm=False)[0]).token_ids == want
    engine.add_request("good", "good", GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="0 tokens"): engine.add_request("empty", empty, GREEDY)
    engine.check()
    assert only(finish(engine)["good"]).token_ids == want
    assert_baseline(engine)


@pytest.mark.parametrize("empty", [[""], [[]]])
def test_case_7_alone(tiny, empty):
    engine = tiny.engine()
    with pytest.raises(ValueError, match="0 tokens"): LLM.from_engine(engine).generate(empty, GREEDY, use_tqdm=False)
    assert_baseline(engine)


def finish(engine, limit=500):
    "Step to the end; the finished outputs by id."
    done = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests(): return done
        done.update({o.request_id: o for o in engine.step() if o.finished})
        engine.check()
    raise AssertionError(f"not done after {limit} steps")


def test_case_9(tiny):
    engine = tiny.engine(num_blocks=8, block_size=4, max_model_len=16)
    for n in (17, 16):
        with pytest.raises(ValueError, match=f"{n} tokens.*max_model_len=16"): engine.add_request("r", [7] * n, SamplingParams(temperature=0, max_tokens=1))
        with pytest.raises(ValueError, match=f"{n} tokens.*max_model_len=16"): engine.add_request("r", [7] * n, SamplingParams(temperature=0, max_tokens=None))
        assert_baseline(engine)
    for max_tokens in (1, None):
        out = only(drive(engine, {"r": ([7] * 15, SamplingParams(temperature=0, max_tokens=max_tokens))})["r"])
        assert len(out.token_ids) == 1 and out.finish_reason == "length"


def test_case_10(tiny):
    engine, prompt = tiny.engine(num_blocks=8, max_model_len=16), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    for max_tokens in (None, 6):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        out = only(drive(engine, {"r": (prompt, params)})["r"])
        assert out.token_ids == tiny.alone(prompt, params, 6)[0][0] and len(out.token_ids) == 6 and out.finish_reason == "length"
    for max_tokens in (7, 100):
        with pytest.raises(ValueError, match=f"10 tokens.*max_tokens={max_tokens}.*max_model_len=16"): engine.add_request("r", prompt, SamplingParams(max_tokens=max_tokens))
    for max_tokens in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens.*at least 1.*{max_tokens}"): SamplingParams(max_tokens=max_tokens)
    assert_baseline(engine)


@pytest.mark.parametrize("num_prompt, max_tokens", [(9, 1), (9, None), (8, 8), (8, 2)])
def test_case_11(tiny, num_prompt, max_tokens):
    engine, small = tiny.engine(num_blocks=2, block_size=4, max_model_len=64), SamplingParams(temperature=0, max_tokens=3)
    engine.add_request("before", [1, 2, 3], small)
    with pytest.raises(ValueError, match=f"{num_prompt} prompt.*8 slots"): engine.add_request("big", [7] * num_prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    engine.add_request("behind", [1, 2, 3], small)
    done = finish(engine, limit=20)
    assert only(done["before"]).token_ids == only(done["behind"]).token_ids == tiny.alone([1, 2, 3], small)[0][0]
    assert_baseline(engine)


def test_case_11_fills_the_pool(tiny):
    "What just fits does run: eight tokens and one whose K/V is never written."
    out = drive(tiny.engine(num_blocks=2, block_size=4, max_model_len=64), {"r": ([7] * 8, SamplingParams(temperature=0, max_tokens=None)), "s": ([1, 2, 3], GREEDY)}, limit=20)
    assert len(only(out["r"]).token_ids) == 1 and len(only(out["s"]).token_ids) == 4


# Sampling

class Constant(FakeModel):
    "The same logits at every step."
    def __init__(self, logits, **kwargs):
        super().__init__(**kwargs)
        self.logits = logits

    def row(self, tokens): return self.logits


def constant_engine(logits, tokenizer, eos_token_ids=(), **config):
    return LLMEngine.from_parts(Constant(logits, eos_token_ids=eos_token_ids), tokenizer, **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, **config})


def test_case_20(tokenizer):
    logits = torch.full((260,), -50.0)
    logits[:3] = torch.tensor([1.0, 1.0, 0.0])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, top_p=0.9), SamplingParams(temperature=0, top_k=2, seed=5)):
        for beside in (False, True):
            jobs = {"greedy": ([65], params), **({"random": ([66], SamplingParams(seed=1))} if beside else {})}
            for order in (jobs, dict(reversed(jobs.items()))):
                done = drive(constant_engine(logits, tokenizer), order)
                assert only(done["greedy"]).token_ids == [0] * 16
                if beside: assert {0, 1} <= set(only(done["random"]).token_ids) <= {0, 1, 2}


def test_case_21(tokenizer):
    logits = torch.linspace(4, -4, 260)
    draws = lambda **kwargs: only(drive(constant_engine(logits, tokenizer), {"r": ([65], SamplingParams(seed=3, max_tokens=40, **kwargs))})["r"]).token_ids
    for kwargs in (dict(top_p=1e-9), dict(top_k=1), dict(min_p=1), dict(temperature=1e-6), dict(temperature=1e-45), dict(top_p=1e-9, top_k=1, min_p=1, temperature=1e-6)):
        assert draws(**kwargs) == [0] * 40, kwargs
    everything = draws()
    assert len(set(everything)) > 10
    for kwargs in (dict(top_p=1), dict(top_k=-1), dict(top_k=0), dict(top_k=10**6), dict(min_p=0)): assert draws(**kwargs) == everything, kwargs
    flat = constant_engine(torch.zeros(260), tokenizer)  # ties everywhere
    assert len(only(drive(flat, {"r": ([65], SamplingParams(seed=3, top_p=1e-9, min_p=1))})["r"]).token_ids) == 16
    for wrong in (dict(top_p=0), dict(top_p=1.1), dict(top_p=-0.1), dict(top_k=-2), dict(top_k=1.5), dict(min_p=-0.1), dict(min_p=1.1), dict(temperature=-1), dict(temperature=math.nan),
                  dict(temperature=math.inf), dict(top_p=None), dict(temperature="hot"), dict(n=0), dict(logprobs=-1), dict(max_tokens=0)):
        with pytest.raises(ValueError, match=next(iter(wrong))): SamplingParams(**wrong)
    assert SamplingParams(seed=0).seed == 0 and SamplingParams().seed is None
    assert SamplingParams(logprobs=0).logprobs == 0 and SamplingParams().logprobs is None and SamplingParams(max_tokens=None).max_tokens is None


def test_case_22(tiny):
    seeded, unseeded = SamplingParams(seed=7, max_tokens=16), SamplingParams(max_tokens=16)
    prompt = [9, 8, 7, 6, 5]
    want = tiny.alone(prompt, seeded)[0][0]
    engine = tiny.engine()
    for _ in range(2): assert only(drive(engine, {"r": (prompt, seeded)})["r"]).token_ids == want
    for place in (0, 2, 3):
        order = [f"u{i}" for i in range(3)]
        order.insert(place, "r")
        done = drive(engine, {i: (prompt, seeded if i == "r" else unseeded) for i in order})
        assert only(done["r"]).token_ids == want
        others = [tuple(only(done[f"u{i}"]).token_ids) for i in range(3)]
        assert len({*others, tuple(want)}) == 4, "requests without a seed share one"
    engine = tiny.engine(num_blocks=6, block_size=4)
    preempted, owners = watch_preemptions(engine), []
    engine.observers.append(lambda scheduled, finished: owners.extend(engine._owner[i][0].request_id for i in scheduled.preempted if i in engine._owner))
    assert only(drive(engine, {"u": (prompt, unseeded), "r": (prompt, seeded)})["r"]).token_ids == want
    assert preempted and "r" in owners, "the seeded one was not preempted: this proves nothing"


# 23 in full is in 04a_sampling (against Hugging Face's processors) and in test_invariance (chunks, preemption): here what each penalty counts
def test_case_23(tokenizer):
    logits = torch.full((260,), -50.0)
    logits[10:13] = torch.tensor([4.0, 3.9, 1.0])
    first = lambda prompt, **kwargs: only(drive(constant_engine(logits, tokenizer), {"r": (prompt, SamplingParams(temperature=0, max_tokens=2, **kwargs))})["r"]).token_ids
    assert first([10, 10, 65]) == [10, 10]
    assert first([10, 10, 65], repetition_penalty=1.3) == [11, 10]   # the prompt's 10 counts
    assert first([10, 10, 65], presence_penalty=1.0) == [10, 11]     # it does not
    assert first([10, 10, 65], frequency_penalty=1.0) == [10, 11]


def test_case_24(tiny):
    prompt, engine = [5, 6, 7, 8, 9], tiny.engine()
    for params in (SamplingParams(n=3, seed=1, max_tokens=10), SamplingParams(n=3, temperature=0, max_tokens=10)):
        out = drive(engine, {"r": (prompt, params)})["r"]
        assert [o.index for o in out.outputs] == [0, 1, 2] and out.prompt_token_ids == prompt
        assert [(o.token_ids, o.finish_reason, o.text) for o in out.outputs] == tiny.alone(prompt, params)
        assert len({tuple(o.token_ids) for o in out.outputs}) == (3 if params.temperature else 1)
        for steps in (0, 1, 4):
            engine.add_request("r", prompt, params)
            for _ in range(steps): engine.step()
            assert len(engine.scheduler.sequences) == 3
            engine.abort_request("r")
            assert_baseline(engine)


def test_case_25(tiny):
    "`bytes` is the server's to add."
    prompt, params = [11, 22, 33, 44], SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    out = only(drive(tiny.engine(), {"r": (prompt, params), "other": ([1, 2], SamplingParams(seed=1, logprobs=5))})["r"])
    assert len(out.logprobs) == len(out.token_ids) == 4
    for i, (token_id, row) in enumerate(zip(out.token_ids, out.logprobs)):
        best = tiny.logits_of((*prompt, *out.token_ids[:i])).log_softmax(-1)[:256].topk(2)
        assert list(row) == best.indices.tolist() and next(iter(row)) == token_id and [lp.rank for lp in row.values()] == [1, 2]
        assert_matches(torch.tensor([lp.logprob for lp in row.values()]), best.values, f"log-probabilities of token {i}")
        assert [lp.decoded_token for lp in row.values()] == [tiny.tokenizer.decode([t]) for t in row]
    assert abs(out.cumulative_logprob - sum(row[t].logprob for t, row in zip(out.token_ids, out.logprobs))) < 1e-6


@pytest.mark.parametrize("eos", [200, 201])
def test_case_26(tokenizer, eos):
    script = [*tokenizer.encode("hi"), eos, *tokenizer.encode("there")]
    make = lambda: scripted_engine(script, eos_token_ids=(200, 201))
    out = only(stream(make(), "r", [65], SamplingParams(temperature=0, max_tokens=8))[-1])
    assert (out.text, out.finish_reason, out.stop_reason, out.token_ids) == ("hi", "stop", None, script[:3])
    out = only(stream(make(), "r", [65], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[-1])
    assert (out.token_ids, out.finish_reason) == (script, "length")
    out = only(stream(make(), "r", [65], SamplingParams(temperature=0, max_tokens=8, min_tokens=4))[-1])
    assert len(out.token_ids) >= 4 and eos not in out.token_ids[:4], "min_tokens let an EOS through"


def test_case_27(tokenizer):
    logits = torch.zeros(260)
    logits[256:], logits[42] = 90.0, 1.0
    jobs = {"greedy": ([65], SamplingParams(temperature=0, logprobs=3)), "random": ([65], SamplingParams(seed=1, max_tokens=40, logprobs=3)), "top": ([65], SamplingParams(seed=1, top_k=1)),
            "penalised": ([65], SamplingParams(seed=1, temperature=3.0, repetition_penalty=1.2))}
    done = drive(constant_engine(logits, tokenizer), jobs)
    for out in done.values():
        assert all(t < 256 for t in only(out).token_ids)
        assert all(t < 256 for row in only(out).logprobs or () for t in row), "a padding row is among the top log-probabilities"
    assert only(done["greedy"]).token_ids == only(done["top"]).token_ids == [42] * 16
    with pytest.raises(ValueError, match="logit_bias"): constant_engine(logits, tokenizer).add_request("r", [65], SamplingParams(logit_bias={257: 100}))


# Scheduling

def test_case_32(tiny):
    prompt, params = list(range(30)), SamplingParams(temperature=0, max_tokens=12)
    def at(state, **config):
        engine = tiny.engine(max_num_batched_tokens=8, **{"max_num_seqs": 2, **config})
        engine.add_request("r", prompt, params)
        for _ in range(300):
            seq = next(iter(engine.scheduler.sequences.values()), None)
            if state(engine, seq): break
            engine.step()
        else: raise AssertionError("the state never came")
        for _ in range(2): engine.abort_request("r")
        assert_baseline(engine)
        assert only(drive(engine, {"r": (prompt, params)})["r"]).token_ids == tiny.alone(prompt, params)[0][0]  # the id is free again
    at(lambda e, s: True)                                                        # waiting
    at(lambda e, s: 0 < s.num_computed_tokens < 30 and s.num_output_tokens == 0)  # mid-chunk
    at(lambda e, s: s.num_output_tokens == 5)                                    # running
    at(lambda e, s: s is None)                                                   # finished
    engine = tiny.engine()
    engine.abort_request("unknown")
    assert_baseline(engine)


def test_case_32_preempted(tiny):
    engine, params = tiny.engine(num_blocks=5, block_size=4), SamplingParams(temperature=0, max_tokens=12)
    preempted = watch_preemptions(engine)
    for i in "ab": engine.add_request(i, [1, 2, 3, 4], params)
    for _ in range(20):
        if preempted: break
        engine.step()
    assert preempted and engine._owner[preempted[0]][0].request_id == "b"
    for _ in range(2): engine.abort_request("b")
    engine.check()
    assert only(finish(engine)["a"]).token_ids == tiny.alone([1, 2, 3, 4], params)[0][0]
    assert_baseline(engine)


def test_case_32_between_schedule_and_update(tiny):
    "A client hangs up while the model runs."
    engine = tiny.engine()
    for i in "ab": engine.add_request(i, [1, 2, 3, 4], GREEDY)
    scheduled = engine.scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    engine.abort_request("a")
    engine.check()
    engine.scheduler.update_from_output(scheduled, dict.fromkeys(ids, 9))
    engine.check()
    engine.abort_request("b")
    assert_baseline(engine)


def test_case_33(tiny):
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    params = SamplingParams(temperature=0, max_tokens=12)
    engine = tiny.engine(num_blocks=5, block_size=4, max_model_len=64)
    preempted = watch_preemptions(engine)
    want = {f"r{i}": tiny.alone(p, params)[0] for i, p in enumerate(prompts)}
    for call in range(2):
        done = drive(engine, {f"r{i}": (p, params) for i, p in enumerate(prompts)})
        for i, (ids, reason, text) in want.items():
            out = only(done[i])
            assert (out.token_ids, out.finish_reason, out.text) == (ids, reason, text) and len(out.token_ids) == 12 and len(done[i].prompt_token_ids) == 4
        assert preempted, "nobody was preempted: this proves nothing"
        preempted.clear()
    big = drive(tiny.engine(), {f"r{i}": (p, params) for i, p in enumerate(prompts)})
    assert {i: only(o).token_ids for i, o in big.items()} == {i: ids for i, (ids, _, _) in want.items()}


@pytest.mark.parametrize("prompt_first", [False, True])
def test_case_34(tiny, prompt_first):
    engine = tiny.engine(max_model_len=256, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=16)
    streams = {f"s{i}": ([i, i + 1], SamplingParams(temperature=0, max_tokens=40)) for i in range(3)}
    if not prompt_first:
        for i, job in streams.items(): engine.add_request(i, *job)
        for _ in range(2): engine.step()
    engine.add_request("long", [k % 250 for k in range(200)], GREEDY)
    if prompt_first:
        for i, job in streams.items(): engine.add_request(i, *job)
    engine.add_request("small", [3, 3], GREEDY)
    steps = {}  # request -> the steps in which it got a token
    for step in range(100):
        if not engine.has_unfinished_requests(): break
        for out in engine.step(): steps.setdefault(out.request_id, []).append(step)
        engine.check()
    assert_baseline(engine)
    for i in streams: assert steps[i] == list(range(steps[i][0], steps[i][0] + (40 if prompt_first else 38))), f"{i} starved: {steps[i]}"
    assert steps["small"][0] <= 200 // 13 + 2, f"the small request waited {steps['small'][0]} steps"
    assert steps["long"][0] >= 12, "the long prompt was not cut"


@pytest.mark.parametrize("block_size", [4, 7])
def test_case_35(tiny, block_size):
    for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size):
        prompt, params = [(37 * k + n) % 256 for k in range(n)], SamplingParams(temperature=0, max_tokens=block_size + 2)
        want = tiny.alone(prompt, params)[0][0]
        for chunk in (1, 2, 3, 4, 5, 64):
            engine, logits = tiny.engine(block_size=block_size, max_num_seqs=1, max_num_batched_tokens=chunk), []
            execute = engine.runner.execute_model
            def keep(model_input):
                logits.append(execute(model_input))
                return logits[-1]
            engine.runner.execute_model = keep
            assert only(drive(engine, {"r": (prompt, params)})["r"]).token_ids == want, (n, chunk)
            assert len(logits) == -(-n // chunk) + len(want) - 1, "not cut into these chunks"
            ref = torch.stack([tiny.logits_of((*prompt, *want[:k])) for k in range(len(want))])
            assert_matches(torch.cat(logits), ref, f"logits, prompt of {n}, chunks of {chunk}")


# The model

@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.half().float()], ids=["to bfloat16", "half", "bfloat16", "half and back"])
def test_a_converted_model_keeps_its_rotary_speeds(tiny, convert):
    "`.to` and `.half` convert buffers too; a speed of eight bits is wrong by a radian after a thousand tokens."
    model = convert(copy.deepcopy(tiny.model))
    was, now = ([m.inv_freq for m in x.modules() if isinstance(m, RotaryEmbedding)] for x in (tiny.model, model))
    assert was and len(was) == len(now)
    assert all(a.dtype == b.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(was, now))
    engine = LLMEngine.from_parts(model, tiny.tokenizer, num_blocks=16, block_size=4, max_model_len=64)
    assert len(only(drive(engine, {"r": ([1, 2, 3], GREEDY)})["r"]).token_ids) == 4
