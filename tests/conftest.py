"""What the engine's tests share: the tiny model and its Hugging Face twin, a fake model, one request computed alone, and a driver that checks every step."""
import zlib
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch

from pico_vllm.engine import LLMEngine
from pico_vllm.sampling import RowState, Sampler, SeedSource
from pico_vllm.testing import byte_tokenizer, hard_tiny_model, hf_forward, ours_from_hf, save_tiny_checkpoint

torch.set_num_threads(1)  # tiny matrices: a second thread only waits, and on busy cores it waits long

NUM_TEXT_IDS, VOCAB_SIZE = 256, 260  # the last four rows of the vocabulary are padding


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes minutes or the real weights")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"): return
    for item in items:
        if "slow" in item.keywords: item.add_marker(pytest.mark.skip(reason="needs --slow"))


# One request alone: no scheduler, no blocks, no batch

def alone(logits_of, eos_token_ids, tokenizer, prompt, params, max_tokens=None):
    "What a request must give: per output its ids, finish reason and text. `logits_of` maps all known tokens to the last one's logits."
    max_tokens, results = max_tokens or params.max_tokens, []
    sampler = Sampler(NUM_TEXT_IDS, eos_token_ids)
    for seed in SeedSource(0)(params):
        tokens, reason = list(prompt), None
        row = RowState(params, seed, tokens, len(prompt))
        while reason is None:
            tokens.append(int(sampler(logits_of(tuple(tokens))[None], [row]).token_ids[0]))
            ids = tokens[len(prompt):]
            ended = (ids[-1] in eos_token_ids and not params.ignore_eos) or ids[-1] in params.stop_token_ids
            text = tokenizer.decode(ids[:-1] if ended else ids)
            found = [] if ended or text.endswith("\ufffd") else [(text.find(s), s) for s in params.stop if s in text]
            if found: text = text[:min(found)[0] + len(min(found)[1]) * params.include_stop_str_in_output]
            reason = "stop" if ended or found else "length" if len(ids) == max_tokens else None
        results.append((ids, reason, text))
    return results


class Tiny:
    "The hard tiny model as ours, and Hugging Face's own beside it."
    def __init__(self, architecture="Qwen2ForCausalLM", **overrides):
        self.hf = hard_tiny_model(architecture, vocab_size=VOCAB_SIZE, **overrides)
        self.model, self.tokenizer = ours_from_hf(self.hf), byte_tokenizer()
        self.logits_of = lru_cache(None)(lambda tokens: hf_forward(self.hf, tokens)[0][-1])

    def engine(self, **config): return LLMEngine.from_parts(self.model, self.tokenizer, **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, **config})
    def alone(self, prompt, params, max_tokens=None): return alone(self.logits_of, self.model.config.eos_token_ids, self.tokenizer, prompt, params, max_tokens)


class FakeModel:
    "Fast and exact: it writes ids and positions into the real cache, reads its context back through the block tables, and hashes it into logits."
    def __init__(self, eos_token_ids=(0, 1)):
        self.config = SimpleNamespace(architecture="Fake", num_hidden_layers=1, num_key_value_heads=1, head_dim=1, max_position_embeddings=512,
                                      vocab_size=VOCAB_SIZE, eos_token_ids=tuple(eos_token_ids))
        self.embed_tokens = SimpleNamespace(weight=torch.zeros(1))
        self.table = torch.randn(1009, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        self.table[:, :66] -= 3
        self.table[:, 76:] -= 3  # mostly ten ids, so that texts meet their stop strings
        self.table[:, list(eos_token_ids)] += 2
        self.table[:, NUM_TEXT_IDS:] += 20

    def row(self, tokens): return self.table[zlib.crc32(bytes(tokens)) % len(self.table)]

    def __call__(self, token_ids, positions, kv_cache, metadata, logits_indices):
        kv_cache.write(0, metadata.slot_mapping, token_ids.float().view(-1, 1, 1), positions.float().view(-1, 1, 1))
        last = (metadata.query_start_loc[1:] - 1).tolist()
        rows = []
        for i in map(last.index, logits_indices.tolist()):
            ids, places = (x[0][metadata.block_tables[i]].flatten()[:metadata.kv_lens[i]].long().tolist() for x in (kv_cache.k, kv_cache.v))
            assert places == list(range(len(places))), f"sequence {i} of the batch reads positions {places}"
            rows.append(self.row(ids))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


class Fake:
    "The fake model as `Tiny`: an engine of it, and a request alone."
    def __init__(self, **kwargs): self.model, self.tokenizer = FakeModel(**kwargs), byte_tokenizer()
    def engine(self, **config): return LLMEngine.from_parts(self.model, self.tokenizer, **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, **config})
    def alone(self, prompt, params, max_tokens=None): return alone(self.model.row, self.model.config.eos_token_ids, self.tokenizer, prompt, params, max_tokens)


class ScriptedModel(FakeModel):
    "Says the same ids to every prompt of `num_prompt_tokens`, whatever they are."
    def __init__(self, script, num_prompt_tokens=1, **kwargs):
        super().__init__(**kwargs)
        self.script, self.num_prompt_tokens = script, num_prompt_tokens

    def row(self, tokens):
        logits = torch.zeros(VOCAB_SIZE)
        logits[self.script[len(tokens) - self.num_prompt_tokens]] = 50
        return logits


def scripted_engine(script, tokenizer=None, num_prompt_tokens=1, eos_token_ids=(0, 1), **config):
    return LLMEngine.from_parts(ScriptedModel(script, num_prompt_tokens, eos_token_ids=eos_token_ids), tokenizer or byte_tokenizer(), **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, **config})


# Driving an engine

def assert_baseline(engine):
    "Every block free; nothing running, waiting or remembered."
    engine.check()
    manager, scheduler = engine.block_manager, engine.scheduler
    assert manager.num_free_blocks == manager.num_blocks, f"{manager.num_used_blocks} blocks are not free"
    assert not scheduler.running and not len(scheduler.waiting) and not scheduler.sequences and not scheduler._limits
    assert not engine.requests and not engine._owner and not engine.has_unfinished_requests()
    assert engine.step() == []


def watch_preemptions(engine):
    "A list that grows with each preempted sequence."
    preempted = []
    engine.observers.append(lambda scheduled, finished: preempted.extend(scheduled.preempted))
    return preempted


def assert_grows(before, now):
    "Nothing that was shown is taken back or shown twice: each output has at most one more token, and its text goes on where it was."
    for a, b in zip(before.outputs if before else [], now.outputs):
        assert b.token_ids[:len(a.token_ids)] == a.token_ids and len(b.token_ids) - len(a.token_ids) in (0, 1), f"{now.request_id}: {a.token_ids}, then {b.token_ids}"
        assert b.text.startswith(a.text), f"{now.request_id}: {a.text!r}, then {b.text!r}"


def drive(engine, jobs, at=None, aborts=None, limit=1000):
    "Run jobs {id: (prompt, params)} to the end: `at` gives steps of arrival, `aborts` {step: ids}. Checks every step; the finished outputs by id."
    seen, done, todo = {}, {}, sorted(jobs, key=lambda i: (at or {}).get(i, 0))
    for step in range(limit):
        while todo and (at or {}).get(todo[0], 0) <= step: engine.add_request(todo[0], *jobs[todo.pop(0)])
        for i in (aborts or {}).get(step, ()): engine.abort_request(i)
        if not todo and not engine.has_unfinished_requests(): break
        for out in engine.step():
            assert_grows(seen.get(out.request_id), out)
            assert out.request_id not in done, f"{out.request_id} goes on after it finished"
            seen[out.request_id] = out
            if out.finished: done[out.request_id] = out
        engine.check()
    else: raise AssertionError(f"not done after {limit} steps: {engine.scheduler.sequences}")
    assert_baseline(engine)
    return done


@pytest.fixture(scope="session")
def tiny(): return Tiny()

@pytest.fixture(scope="session")
def fake(): return Fake()

@pytest.fixture(scope="session")
def tokenizer(): return byte_tokenizer()

@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory): return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")

@pytest.fixture(scope="session")
def real_tokenizer():
    from transformers import AutoTokenizer
    from pico_vllm.checkpoints import resolve_model
    return AutoTokenizer.from_pretrained(resolve_model())
