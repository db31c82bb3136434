"""A request's ids depend on the request alone: not on batch, order, blocks, chunks, preemption or what becomes of its neighbours."""
import random
from itertools import permutations

import pytest
import torch
from conftest import Fake, Tiny, assert_baseline, assert_grows, drive, watch_preemptions
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from pico_vllm.sampling import SamplingParams

ARCHITECTURES = {"qwen2": ("Qwen2ForCausalLM", {}), "llama": ("LlamaForCausalLM", {}), "qwen3": ("Qwen3ForCausalLM", {}),
                 "mistral-window": ("MistralForCausalLM", {"sliding_window": 6})}
LENGTHS = (1, 3, 4, 7, 13, 21)
NUM_OUTPUT = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    "A model, six prompts, and Hugging Face's greedy ids, which are no near-ties."
    name, overrides = ARCHITECTURES[request.param]
    tiny, rng = Tiny(name, **overrides), random.Random(5)
    prompts = {f"p{n}": [rng.randrange(256) for _ in range(n)] for n in LENGTHS}
    want = {}
    for i, prompt in prompts.items():
        known = list(prompt)
        for _ in range(NUM_OUTPUT):
            best = tiny.logits_of(tuple(known))[:256].topk(2)
            gap = float(best.values[0] - best.values[1])
            assert gap > 1e-3, f"{request.param} {i}: a near-tie of {gap:.1g} proves nothing, take another prompt"
            known.append(int(best.indices[0]))
        want[i] = known[len(prompt):]
    assert len({tuple(ids) for ids in want.values()}) == len(want) and all(len(set(ids)) > 3 for ids in want.values()), "outputs too alike to tell requests apart"
    return tiny, prompts, want


def assert_ids(done, want):
    for i, ids in want.items(): assert done[i].outputs[0].token_ids == ids, f"{i}: {done[i].outputs[0].token_ids}, Hugging Face {ids}"


def jobs_of(prompts, params=GREEDY): return {i: (p, params) for i, p in prompts.items()}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 6])
def test_batch_size(case, max_num_seqs):
    tiny, prompts, want = case
    assert_ids(drive(tiny.engine(max_num_seqs=max_num_seqs), jobs_of(prompts)), want)


def test_batch_mates(case):
    "Each prompt alone, beside itself, and beside one other that samples."
    tiny, prompts, want = case
    mates = {"twin": lambda i: (prompts[i], GREEDY), "other": lambda i: (prompts["p13"], SamplingParams(seed=3, temperature=2.0, repetition_penalty=1.4, max_tokens=9))}
    for i in ("p1", "p4", "p21"):
        assert_ids(drive(tiny.engine(), {i: (prompts[i], GREEDY)}), {i: want[i]})
        for name, mate in mates.items():
            done = drive(tiny.engine(), {i: (prompts[i], GREEDY), name: mate(i)})
            assert_ids(done, {i: want[i]})
            if name == "twin": assert done["twin"].outputs[0].token_ids == want[i]


def test_order_of_arrival(case):
    "Shuffled, and with later ones coming while earlier ones run."
    tiny, prompts, want = case
    orders = random.Random(1).sample(list(permutations(prompts)), 3)
    for k, order in enumerate(orders):
        jobs = {i: (prompts[i], GREEDY) for i in order}
        assert_ids(drive(tiny.engine(max_num_seqs=4), jobs, at={i: place * k * 3 for place, i in enumerate(order)}), want)


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_block_size(case, block_size):
    tiny, prompts, want = case
    assert_ids(drive(tiny.engine(block_size=block_size, num_blocks=256), jobs_of(prompts)), want)


@pytest.mark.parametrize("seats, budget", [(1, 1), (1, 3), (2, 5), (4, 7), (6, 64)])
def test_chunk_size(case, seats, budget):
    tiny, prompts, want = case
    assert_ids(drive(tiny.engine(max_num_seqs=seats, max_num_batched_tokens=budget), jobs_of(prompts)), want)


@pytest.mark.parametrize("block_size, num_blocks, budget", [(1, 40, 2048), (4, 10, 2048), (4, 10, 7), (7, 6, 2048), (2, 20, 9)])
def test_forced_preemption(case, block_size, num_blocks, budget):
    tiny, prompts, want = case
    engine = tiny.engine(block_size=block_size, num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=budget)
    preempted = watch_preemptions(engine)
    assert_ids(drive(engine, jobs_of(prompts)), want)
    assert preempted, "nobody was preempted: this proves nothing"


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_abort_of_neighbours(case, num_blocks):
    "Neighbours are aborted while they wait, in the middle of a chunk, and while they run; their blocks go to others."
    tiny, prompts, want = case
    engine = tiny.engine(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=8)
    stay, leave = ("p3", "p13", "p21"), ("p1", "p4", "p7")
    jobs = {**jobs_of(prompts), **{f"{i}-2": (prompts[i], GREEDY) for i in stay}}
    done = drive(engine, jobs, at={f"{i}-2": 9 for i in stay}, aborts={1: [leave[0]], 3: [leave[1], leave[1]], 8: [leave[2], "nobody"], 14: ["p21-2"]})
    assert_ids(done, {i: want[i] for i in stay})
    assert_ids(done, {f"{i}-2": want[i] for i in stay[:2]})
    assert not done.keys() & {"p21-2", *leave}


SAMPLED = {"plain": dict(seed=7), "filters": dict(seed=8, temperature=1.5, top_k=40, top_p=0.9, min_p=0.01), "penalties": dict(seed=9, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
           "logprobs": dict(seed=10, logprobs=3, temperature=0.8), "three": dict(seed=11, n=3, temperature=1.2), "greedy, penalties": dict(temperature=0, repetition_penalty=1.3, logprobs=0),
           "bias, min_tokens": dict(seed=12, logit_bias={5: 4.0, 77: -100}, min_tokens=4, stop_token_ids=[5])}


@pytest.mark.parametrize("config", [dict(), dict(max_num_seqs=1), dict(block_size=1, num_blocks=256), dict(block_size=7, max_num_seqs=4, max_num_batched_tokens=5),
                                    dict(num_blocks=10, max_num_seqs=9), dict(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=6)], ids=str)
def test_seeded_sampling(tiny, config):
    "Ids, texts and log-probabilities of sampled outputs equal those over Hugging Face's logits, one request at a time."
    rng = random.Random(2)
    jobs = {name: ([rng.randrange(256) for _ in range(n)], SamplingParams(max_tokens=12, **kwargs)) for n, (name, kwargs) in zip((5, 9, 3, 14, 4, 7, 11), SAMPLED.items())}
    engine = tiny.engine(**config)
    preempted = watch_preemptions(engine)
    done = drive(engine, jobs)
    assert bool(preempted) == (config.get("num_blocks") == 10), f"{len(preempted)} preemptions"
    for name, (prompt, params) in jobs.items():
        want = tiny.alone(prompt, params)
        assert [(o.token_ids, o.finish_reason, o.text) for o in done[name].outputs] == want, name
        for o in done[name].outputs:
            if params.logprobs is None: assert o.logprobs is None and o.cumulative_logprob is None
            else:
                assert len(o.logprobs) == len(o.token_ids)
                for k, (token_id, row) in enumerate(zip(o.token_ids, o.logprobs)):
                    ref = tiny.logits_of((*prompt, *o.token_ids[:k])).log_softmax(-1)
                    assert token_id in row and params.logprobs <= len(row) <= params.logprobs + 1
                    for t, lp in row.items(): assert abs(lp.logprob - float(ref[t])) < 1e-4, (name, k, t)
    assert len({tuple(o.token_ids) for o in done["three"].outputs}) == 3


# Any schedule

STOPS = [None, None, "e", ("ab", "ba"), ("cde", "fg", "x")]
PARAMS = st.builds(
    lambda seed, max_tokens, kind, stop, n, include: SamplingParams(seed=seed, max_tokens=max_tokens, stop=stop, n=n, include_stop_str_in_output=include, **kind),
    st.integers(0, 5), st.sampled_from([1, 2, 3, 6, 6, 12, 20]),
    st.sampled_from([dict(temperature=0), dict(temperature=0, repetition_penalty=1.5, ignore_eos=True), dict(), dict(temperature=1.5, top_p=0.9, frequency_penalty=1.0), dict(top_k=3, ignore_eos=True, logprobs=1),
                     dict(ignore_eos=True), dict(stop_token_ids=[70, 71])]),
    st.sampled_from(STOPS), st.sampled_from([1, 1, 1, 2, 3]), st.booleans())
PROMPTS = st.one_of(st.lists(st.integers(0, 255), min_size=1, max_size=5), st.lists(st.integers(65, 75), min_size=6, max_size=18))


class Schedules(RuleBasedStateMachine):
    "Requests come, steps pass, requests are aborted, in pools that are too small; every promise is checked after every rule."
    parts, max_model_len = None, 30
    totals = dict.fromkeys(("schedules", "requests", "refused", "finished", "aborted", "preempted", "steps", "chunks"), 0)

    @initialize(block_size=st.sampled_from([1, 2, 3, 4, 7, 16]), slots=st.integers(12, 40), seats=st.integers(1, 6), spare=st.integers(0, 12))
    def start(self, block_size, slots, seats, spare):
        self.engine = self.parts.engine(block_size=block_size, num_blocks=max(1, slots // block_size), max_num_seqs=seats, max_num_batched_tokens=seats + spare, max_model_len=self.max_model_len)
        self.observed = []
        self.engine.observers.append(lambda *step: self.observed.append(step))
        self.jobs, self.seen, self.count, self.gone, self.oldest = {}, {}, 0, [], None
        self.totals["schedules"] += 1

    def judge(self, scheduled, finished):
        alive = self.engine.scheduler.sequences
        assert self.oldest in scheduled.num_scheduled_tokens and scheduled.num_scheduled_tokens[self.oldest] >= 1, f"the oldest, {self.oldest}, did not advance: {scheduled}"
        for seq in finished:
            overtaken = [i for i, s in alive.items() if i < seq.seq_id and not s.num_output_tokens]
            assert not overtaken, f"{seq.seq_id} finished before {overtaken} had a first token"
        self.totals["preempted"] += len(scheduled.preempted)
        self.totals["steps"] += 1
        self.totals["chunks"] += any(i in alive and not alive[i].num_output_tokens for i in scheduled.num_scheduled_tokens)

    @rule(prompt=PROMPTS, params=PARAMS)
    def add(self, prompt, params):
        request_id, self.count = f"r{self.count}", self.count + 1
        total, manager = len(prompt) + params.max_tokens, self.engine.block_manager
        fits = total <= self.max_model_len and total - 1 <= manager.num_blocks * manager.block_size
        try: self.engine.add_request(request_id, prompt, params)
        except ValueError:
            assert not fits, f"{total} tokens were refused"
            self.totals["refused"] += 1
        else:
            assert fits, f"{total} tokens were admitted"
            self.jobs[request_id] = prompt, params
            self.totals["requests"] += 1

    @rule(n=st.integers(1, 6))
    def steps(self, n):
        for _ in range(n): self.step()

    def step(self):
        self.oldest = next(iter(self.engine.scheduler.sequences), None)
        outs = self.engine.step()
        while self.observed: self.judge(*self.observed.pop())  # not in the observer: the engine would survive what it raises
        for out in outs:
            request_id = out.request_id
            assert_grows(self.seen.get(request_id), out)
            self.seen[request_id] = out
            if out.finished:
                want = self.parts.alone(*self.jobs.pop(request_id))
                assert [(o.token_ids, o.finish_reason, o.text) for o in out.outputs] == want, request_id
                self.gone.append(request_id)
                self.totals["finished"] += 1
        self.engine.check()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from([*self.jobs, *self.gone[-2:], "nobody"]))
        self.engine.abort_request(request_id)
        if self.jobs.pop(request_id, None):
            self.gone.append(request_id)
            self.totals["aborted"] += 1

    @invariant()
    def sound(self):
        if not hasattr(self, "engine"): return
        self.engine.check()
        assert self.engine.requests.keys() == self.jobs.keys()
        first = [s.num_output_tokens > 0 for s in self.engine.scheduler.sequences.values()]
        assert first == sorted(first, reverse=True), f"first tokens out of order of arrival: {first}"

    def teardown(self):
        if not hasattr(self, "engine"): return
        bound = sum(params.n * (len(prompt) + params.max_tokens) for prompt, params in self.jobs.values())  # the oldest computes a token at least each step
        for _ in range(bound):
            if not self.engine.has_unfinished_requests(): break
            self.step()
            self.sound()
        assert not self.jobs, f"unfinished after {bound} more steps: {list(self.jobs)}"
        assert_baseline(self.engine)


def run_schedules(parts, max_examples, step_count=25):
    machine = type("Schedules", (Schedules,), {"parts": parts, "totals": dict.fromkeys(Schedules.totals, 0)})
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=step_count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)))
    print(machine.totals)
    assert machine.totals["schedules"] >= max_examples, machine.totals
    assert all(machine.totals.values()), f"something never happened: {machine.totals}"
    return machine.totals


def test_schedules(fake): run_schedules(fake, 60)

@pytest.mark.slow
def test_schedules_many(fake): run_schedules(fake, 2500, step_count=40)

@pytest.mark.slow
def test_schedules_of_a_tiny_model(): run_schedules(Tiny(eos_token_id=[0, 1]), 100)


# The real model

@pytest.fixture(scope="module")
def real():
    from transformers import AutoTokenizer

    from pico_vllm.checkpoints import resolve_model
    from pico_vllm.model import load_model
    from pico_vllm.testing import hf_forward, hf_from_ours
    torch.set_num_threads(torch.get_num_interop_threads())
    folder, device = resolve_model(), "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(folder, torch.float32, device), AutoTokenizer.from_pretrained(folder)
    hf, size = hf_from_ours(model, folder), min(len(tokenizer), model.config.vocab_size)
    texts = ["def fibonacci(n):", "The capital of France is", "Write a haiku about memory:\n", "1, 1, 2, 3, 5, 8,"]
    prompts, want = {f"p{i}": tokenizer.encode(t) for i, t in enumerate(texts)}, {}
    for i, prompt in prompts.items():
        new, cache, out = prompt, None, []
        for _ in range(16):
            logits, cache = hf_forward(hf, new, cache)
            best = logits[-1, :size].topk(2)
            assert float(best.values[0] - best.values[1]) > 1e-3, f"{i}: a near-tie proves nothing, take another prompt"
            new = [int(best.indices[0])]
            out += new
        want[i] = out
    yield model, tokenizer, prompts, want
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("config", [dict(max_num_seqs=1), dict(), dict(block_size=1), dict(block_size=7), dict(max_num_seqs=3, max_num_batched_tokens=5),
                                    dict(block_size=4, num_blocks=13), dict(block_size=4, num_blocks=13, max_num_batched_tokens=7, max_num_seqs=4)], ids=str)
def test_real_model(real, config):
    from pico_vllm.engine import LLMEngine
    model, tokenizer, prompts, want = real
    engine = LLMEngine.from_parts(model, tokenizer, **{"num_blocks": 256, "max_model_len": 64, **config})
    preempted = watch_preemptions(engine)
    assert_ids(drive(engine, jobs_of(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))), want)
    assert bool(preempted) == ("num_blocks" in config), f"{len(preempted)} preemptions"
