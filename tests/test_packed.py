"""Packed layers give the plain layers' numbers, for every family, and the padding rows of a small step are nobody's."""
import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import pico_vllm.packed as packed
from pico_vllm.blocks import BlockManager, KVCache
from pico_vllm.packed import PackedDecoderLayer, PackedLinear, can_pack, pack_decoder
from pico_vllm.runner import ModelRunner
from pico_vllm.sequence import Sequence
from pico_vllm.testing import hard_tiny_model, ours_from_hf

FAMILIES = {"Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {}, "LlamaForCausalLM": {}, "MistralForCausalLM": {"sliding_window": 5}}
needs_packing = pytest.mark.skipif(not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="this processor or build has no use for packed weights")
try: settles = ctypes.CDLL(None).mallopt is not None
except (AttributeError, OSError, TypeError): settles = False


def logits(model, lengths=(9, 3, 14), rounds=3, poison=False):
    "Prompts in one step, then decodes: the logits of each step, in float32."
    c, dtype = model.config, model.embed_tokens.weight.dtype
    manager = BlockManager(32, 4)
    cache = KVCache(c.num_hidden_layers, 32, 4, c.num_key_value_heads, c.head_dim, dtype)
    if poison: cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    runner, sequences, out = ModelRunner(model, cache), [Sequence(i, [(5 * i + 3 * j) % 60 for j in range(n)], 4) for i, n in enumerate(lengths)], []
    for _ in range(rounds):
        counts = [seq.num_tokens - seq.num_computed_tokens for seq in sequences]
        for seq, n in zip(sequences, counts): seq.append_blocks(manager.allocate(seq.num_missing_blocks(n)))
        out.append(runner.execute_model(runner.prepare(sequences, counts)).float())
        for seq, n in zip(sequences, counts):
            seq.mark_computed(n)
            seq.append_token(7 + seq.num_tokens)
    return torch.cat(out)


def errors(architecture, lengths=(9, 3, 14), break_it=lambda model: None):
    "How far plain and packed bfloat16 are from float32, root mean square in units of the spread."
    hf = hard_tiny_model(architecture, **FAMILIES[architecture])
    exact = logits(ours_from_hf(hf), lengths)
    plain = ours_from_hf(hf.to(torch.bfloat16))
    off = lambda model: ((logits(model, lengths) - exact).pow(2).mean().sqrt() / exact.std()).item()
    plain_error = off(plain)
    assert pack_decoder(plain) > 0 and all(isinstance(layer, PackedDecoderLayer) for layer in plain.layers)
    break_it(plain)
    return plain_error, off(plain)


@needs_packing
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("lengths", [(9, 3, 14), (6,), (2, 8, 8, 1, 5)])
def test_packed_layers_are_as_exact_as_plain_ones(architecture, lengths):
    plain, fast = errors(architecture, lengths)
    assert fast < 1.3 * plain, (plain, fast)


def forget_residual(model): model.layers[1].o_proj.combine = lambda x, other, how: model.layers[1].o_proj(x)
def forget_bias(model): model.layers[0].qkv_proj.bias = None
def swap_gate_and_up(model): model.layers[0].gate_proj, model.layers[0].up_proj = model.layers[0].up_proj, model.layers[0].gate_proj


@needs_packing
@pytest.mark.parametrize("bug", [forget_residual, forget_bias, swap_gate_and_up])
def test_the_check_sees_a_planted_bug(bug):
    plain, fast = errors("Qwen2ForCausalLM", break_it=bug)
    assert fast > 2 * plain, (plain, fast)


@needs_packing
def test_the_rows_that_fill_up_a_small_step_touch_nobody(monkeypatch):
    "One row, padded to four: the same logits as unpadded up to the last place, and nothing is read or written for the zeros, whatever lies in the pool."
    model = ours_from_hf(hard_tiny_model().to(torch.bfloat16))
    pack_decoder(model)
    padded, poisoned = logits(model, (6,)), logits(model, (6,), poison=True)
    assert torch.equal(padded, poisoned) and padded.shape[0] == 3
    monkeypatch.setattr(packed, "MIN_ROWS", 1)
    assert (padded - logits(model, (6,))).abs().max() < 0.1 * padded.std()


@needs_packing
def test_a_layer_that_cannot_be_packed_leaves_all_of_them_plain():
    "A padded step goes from layer to layer, so it is all or none."
    model = ours_from_hf(hard_tiny_model().to(torch.bfloat16))
    model.layers[1].mlp.down_proj.float()
    pack_decoder(model)
    assert not any(isinstance(layer, PackedDecoderLayer) for layer in model.layers)


def test_float32_is_left_alone():
    model = ours_from_hf(hard_tiny_model())
    assert pack_decoder(model) == 0 and type(model.lm_head) is nn.Linear and not any(isinstance(layer, PackedDecoderLayer) for layer in model.layers)



def in_new_process(code, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, check=True).stdout.split()


PAGES = """
import resource, torch, torch.nn.functional as F
from pico_vllm.packed import settle_memory
settled = {settle} and settle_memory()
gate, up, down = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((4864, 896), (4864, 896), (896, 4864)))
def pages(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step(x):  # a prompt's MLPs
    for _ in range(3): x = x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
with torch.inference_mode():
    for _ in range(3): before = pages(); step(torch.ones(2048, 896, dtype=torch.bfloat16))
print(settled, pages() - before)
"""


@pytest.mark.skipif(not settles, reason="not glibc")
def test_settled_memory_is_not_mapped_anew():
    (_, without), (settled, kept) = (in_new_process(PAGES.format(settle=settle)) for settle in (False, True))
    assert settled == "True" and int(kept) < int(without) / 10, (kept, without)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_has_set_malloc_is_left_alone(name):
    assert in_new_process("from pico_vllm.packed import settle_memory; print(settle_memory())", **{name: "glibc.malloc.trim_threshold=131072" if name[0] == "G" else "131072"}) == ["False"]


def test_a_c_library_without_mallopt_is_no_error(monkeypatch):
    for missing in (AttributeError("mallopt"), OSError("no library"), TypeError("Windows")):
        def cdll(_): raise missing
        monkeypatch.setattr(packed.ctypes, "CDLL", cdll)
        for name in list(os.environ):
            if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES": monkeypatch.delenv(name)
        assert packed.settle_memory() is False


@needs_packing
def test_the_head_is_packed_before_the_layers(monkeypatch):
    model, order = ours_from_hf(hard_tiny_model("Qwen2ForCausalLM", tie_word_embeddings=False).to(torch.bfloat16)), []
    original = PackedLinear.__init__
    monkeypatch.setattr(PackedLinear, "__init__", lambda self, linear: order.append(linear.out_features) or original(self, linear))
    pack_decoder(model)
    assert order[0] == model.config.vocab_size and len(model.layers) == model.config.num_hidden_layers and isinstance(model.lm_head, PackedLinear)
