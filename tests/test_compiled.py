"""Compiled operators give the eager ones' numbers, for families, windows and any number of rows; what cannot be compiled is refused, and a broken file heals."""
import os
import subprocess
import sys
import threading

import pytest
import torch
from test_packed import FAMILIES, logits

import pico_vllm.compiled as compiled
from pico_vllm.blocks import KVCache
from pico_vllm.compiled import DecodeAttention, Norm, RotateAndWrite, compile_ahead, compile_decoder, find_compiler
from pico_vllm.engine import LLM, EngineConfig, LLMEngine
from pico_vllm.packed import can_pack, pack_decoder
from pico_vllm.sampling import SamplingParams
from pico_vllm.testing import byte_tokenizer, hard_tiny_model, ours_from_hf, save_tiny_checkpoint

works = pytest.mark.skipif(find_compiler() is None or not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="no C++ compiler, or no packed weights here")
ANY_ROWS = ({0: torch.export.Dim("rows", min=2)}, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("compiled")


def errors(architecture, folder, lengths, break_it=lambda model: None):
    "How far eager and compiled packed layers are from float32, root mean square in units of the spread."
    hf = hard_tiny_model(architecture, **FAMILIES[architecture])
    exact = logits(ours_from_hf(hf), lengths)
    model = ours_from_hf(hf.to(torch.bfloat16))
    pack_decoder(model)
    def off(): return ((logits(model, lengths) - exact).pow(2).mean().sqrt() / exact.std()).item()
    eager = off()
    compile_decoder(model, folder)
    break_it(model)
    return eager, off()


@works
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])  # bias, head norms, window; Llama has none of them
@pytest.mark.parametrize("lengths", [(9, 3, 14), (6,), (2, 8, 8, 1, 5), (1, 1, 1)])
def test_compiled_operators_are_as_exact_as_eager_ones(architecture, lengths, folder):
    eager, fast = errors(architecture, folder, lengths)
    assert fast < 1.3 * eager, (eager, fast)


def other_eps(model): model.layers[0].operators._norm = lambda args: [args[0] * args[1]]
def cosine_twice(model):
    rotate = model.layers[0].operators._rotate
    model.layers[0].operators._rotate = lambda args: rotate([args[0], args[1], args[1], *args[3:]])
def one_token_short(model):
    attention = model.layers[0].operators._attention
    attention.update({w: (lambda args, f=f: f([args[0], args[1], args[2] - 1, *args[3:]])) for w, f in attention.items()})


@works
@pytest.mark.parametrize("bug", [other_eps, cosine_twice, one_token_short])
def test_the_check_sees_a_planted_bug(bug, folder):
    eager, broken = errors("Qwen2ForCausalLM", folder, (9, 3, 14), bug)
    assert broken > 2 * eager, (eager, broken)


@works
def test_a_sick_neighbour_harms_nobody(folder):
    model = ours_from_hf(hard_tiny_model("Qwen2ForCausalLM").to(torch.bfloat16))
    pack_decoder(model)
    compile_decoder(model, folder)
    assert torch.equal(logits(model), logits(model, poison=True))  # every slot that is not ours holds NaN


def rounded_scores(self, q, slots, kv_lens, k_cache, v_cache):
    "A planted bug: scores in bfloat16."
    def fetch(cache): return cache[slots].transpose(1, 2).flatten(0, 1)
    scores = torch.bmm(q.unflatten(1, (k_cache.shape[1], -1)).flatten(0, 1), fetch(k_cache).transpose(1, 2)).float() * self.scale
    seen = (torch.arange(slots.shape[1]) < kv_lens[:, None]).repeat_interleave(k_cache.shape[1], 0)[:, None]
    return torch.bmm(scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype), fetch(v_cache)).unflatten(0, (len(q), -1)).flatten(1, 2)


@works
def test_large_scores_keep_their_differences(folder):
    "Real models have scores in the hundreds, far apart from nought and near each other: softmax sees only how they differ."
    torch.manual_seed(0)
    n, length, heads, kv_heads, d = 5, 40, 6, 2, 16
    q, k, v = torch.randn(n, heads, d), torch.randn(n * length, kv_heads, d), torch.randn(n * length, kv_heads, d)
    q[..., 0], k[..., 0] = 30, 40  # the same large number in every score: it must cancel
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    slots, kv_lens = torch.randperm(n * length).view(n, length), torch.tensor([40, 7, 1, 39, 20])
    rows, function = torch.tensor([6, 0, 2, 5, 3]), DecodeAttention(d ** -.5, None)  # of a batch of seven: 1 and 4 are not decodes
    def attend(work, q, slots, kv_lens, k, v):
        batch = torch.full((7, heads, d), 9., dtype=q.dtype)
        batch[rows] = q
        out = torch.full_like(batch, 7)
        work([batch, rows, slots, kv_lens, k.unflatten(0, (-1, 8)), v.unflatten(0, (-1, 8)), out])
        assert (out[[1, 4]] == 7).all()  # rows of others are left alone
        return out[rows].float()
    def plain(args): return function(*args)
    example = [torch.zeros(7, heads, d), rows, slots, kv_lens, torch.zeros(25, 8, kv_heads, d), torch.zeros(25, 8, kv_heads, d), torch.zeros(7, heads, d)]
    num_tokens, num_rows, num_blocks, tokens, block_size = (torch.export.Dim(name, min=2) for name in ("num_tokens", "num_rows", "num_blocks", "tokens", "block_size"))
    shapes = ({0: num_tokens}, {0: num_rows}, {0: num_rows, 1: tokens}, {0: num_rows}, {0: num_blocks, 1: block_size}, {0: num_blocks, 1: block_size}, {0: num_tokens})
    fast = compile_ahead("attention", function, tuple(x.bfloat16() if x.is_floating_point() else x for x in example), shapes, folder)
    exact = attend(plain, q.float(), slots, kv_lens, k.float(), v.float())
    def off(result): return (result.float() - exact).abs().max().item()
    assert off(attend(fast, q, slots, kv_lens, k, v)) < .02 < .1 < off(rounded_scores(function, q, slots, kv_lens, k, v))
    for length in (1, 2, 513, 3000):  # one library for any length
        where, lens = torch.randint(0, len(k), (n, length)), torch.randint(1, length + 1, (n,))
        exact = attend(plain, q.float(), where, lens, k.float(), v.float())
        assert off(attend(fast, q, where, lens, k, v)) < .02


@works
def test_wrong_shapes_are_told_and_nothing_is_read(folder):
    model = ours_from_hf(hard_tiny_model("Qwen2ForCausalLM").to(torch.bfloat16))
    pack_decoder(model)
    compile_decoder(model, folder)
    c, attn, operators = model.config, model.layers[0].attn[0], model.layers[0].operators
    qkv, angle = torch.zeros(3, attn.q_size + 2 * attn.kv_size, dtype=torch.bfloat16), torch.zeros(3, 1, c.head_dim, dtype=torch.bfloat16)
    good = KVCache(c.num_hidden_layers, 4, 4, c.num_key_value_heads, c.head_dim, torch.bfloat16)
    with pytest.raises(ValueError, match="compiled for"):
        operators.rotate_and_write(attn, qkv, angle, angle, KVCache(c.num_hidden_layers, 4, 4, c.num_key_value_heads, c.head_dim, torch.float32), torch.arange(3))
    with pytest.raises(ValueError, match="3 rows, 3 positions, 2 slots"): operators.rotate_and_write(attn, qkv, angle, angle, good, torch.arange(2))
    operators.rotate_and_write(attn, qkv, angle, angle, good, torch.arange(3))


@works
def test_a_file_is_made_once_and_made_again_when_damaged(tmp_path, caplog, monkeypatch):
    args, x = ("norm", Norm(1e-6), (torch.zeros(3, 8), torch.zeros(8)), ANY_ROWS, tmp_path), torch.randn(7, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
    def check(): assert torch.allclose(compile_ahead(*args)([x, torch.ones(8)])[0], expected, atol=1e-6)
    check()
    [path] = tmp_path.iterdir()  # no scratch folder is left
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)  # found on disk, it needs no compiler
    check()
    monkeypatch.undo()
    for damage in (b"", path.read_bytes()[: len(path.read_bytes()) // 2], b"not a library"):
        path.write_bytes(damage)
        check()
        assert "damaged" in caplog.text
        caplog.clear()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@works
def test_two_at_a_time(tmp_path):
    results = []
    def work(): results.append(compile_ahead("norm", Norm(1e-5), (torch.zeros(3, 8), torch.zeros(8)), ANY_ROWS, tmp_path))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(results) == 2 and len(list(tmp_path.iterdir())) == 1
    assert all(run([torch.ones(5, 8), torch.ones(8)])[0].shape == (5, 8) for run in results)


def key(function=None, args=(torch.zeros(3, 8), torch.zeros(8)), dynamic_shapes=ANY_ROWS):
    return compiled._key("norm", torch.export.export(function or Norm(1e-6), args, dynamic_shapes=dynamic_shapes), args)


def test_whatever_the_code_depends_on_is_in_the_name(monkeypatch):
    rotate_args = tuple(torch.zeros(s) for s in ((3, 32), (3, 1, 8), (3, 1, 8))) + (torch.zeros(3, dtype=torch.int64), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8), torch.zeros(8), torch.zeros(8))
    def rotate(): return key(RotateAndWrite(2, 1, 1e-6), rotate_args, None)
    keys = [key(), key(args=(torch.zeros(64, 8), torch.zeros(8))), key(Norm(1e-5)), key(args=(torch.zeros(3, 8).bfloat16(), torch.zeros(8).bfloat16())), key(args=(torch.zeros(3, 9), torch.zeros(9))), key(dynamic_shapes=None), rotate()]
    assert key(args=(torch.ones(3, 8), torch.ones(8))) == keys[0]  # numbers do not matter; how many rows the example has does: by it loops are shared among threads
    with monkeypatch.context() as m:
        m.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(key())
    with monkeypatch.context() as m:
        m.setattr(Norm, "forward", lambda self, x, weight: x * weight)  # a helper of rotate's
        keys.append(rotate())
    assert len(set(keys)) == len(keys) and rotate() == keys[6]


def test_another_process_finds_the_same_name():
    code = "import torch, pico_vllm.compiled as c; torch.set_num_threads(1); args = (torch.zeros(3, 8), torch.zeros(8)); print(c._key('norm', torch.export.export(c.Norm(1e-6), args, dynamic_shapes=({0: torch.export.Dim('rows', min=2)}, None)), args))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}, check=True)
    assert torch.get_num_threads() == 1 and done.stdout.strip() == key()


@works
def test_compiling_changes_no_later_name(tmp_path):
    "Inductor writes into the options that it is given, and they are part of a library's name."
    before = key()
    compile_ahead("norm", Norm(1e-6), (torch.zeros(3, 8), torch.zeros(8)), ANY_ROWS, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [before] == [key()]


@works
def test_a_static_and_a_dynamic_library_do_not_meet(tmp_path):
    example, x = (torch.zeros(3, 8), torch.zeros(8)), torch.randn(5, 8)
    assert len(compile_ahead("norm", Norm(1e-6), example, (None, None), tmp_path)([x, torch.ones(8)])[0]) == 3
    assert len(compile_ahead("norm", Norm(1e-6), example, ANY_ROWS, tmp_path)([x, torch.ones(8)])[0]) == 5


def test_the_same_tensor_twice_in_an_example_is_refused(tmp_path):
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="twice"): compile_ahead("norm", Norm(1e-6), (x, x), (None, None), tmp_path)


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "find_compiler", lambda: None)
    with pytest.raises(ValueError, match="install g"): compile_ahead("norm", Norm(1e-6), (torch.zeros(3, 8), torch.zeros(8)), ANY_ROWS, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="C\\+\\+ compiler"): LLMEngine(EngineConfig(compile=True, device="cpu"))


def test_a_compiler_that_fails_is_told(tmp_path, monkeypatch):
    def broken(*args, **kwargs): raise OSError("no space left")
    monkeypatch.setattr(compiled, "find_compiler", lambda: "g++")
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", broken)
    with pytest.raises(ValueError, match="norm could not be compiled with g\\+\\+ \\(OSError\\)"): compile_ahead("norm", Norm(1e-6), (torch.zeros(3, 8), torch.zeros(8)), ANY_ROWS, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1, "yes", None])
def test_compile_is_true_or_false(value):
    with pytest.raises(ValueError, match="True or False"): EngineConfig(compile=value)


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(ValueError, match="quantization='int8'"): EngineConfig(compile=True, quantization="int8")
    model = ours_from_hf(hard_tiny_model("Qwen2ForCausalLM"))
    with pytest.raises(ValueError, match="float32 on cpu"): compile_decoder(model)
    with pytest.raises(ValueError, match="compile_decoder"): LLMEngine.from_parts(model, byte_tokenizer(), compile=True, num_blocks=8)


@works
def test_llm_compiles_and_answers(tmp_path, monkeypatch, folder):
    save_tiny_checkpoint(tmp_path / "model")
    monkeypatch.setenv("PICO_VLLM_CACHE", str(tmp_path / "cache"))
    llm = LLM(tmp_path / "model", dtype="bfloat16", compile=True, device="cpu", num_blocks=32, block_size=4, max_model_len=64)
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == 3
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["abc", "some longer text", "x"], params, use_tqdm=False)] == [6, 6, 6]
    llm.engine.check()
    with pytest.raises(ValueError, match="float32 on cpu"): LLM(tmp_path / "model", dtype="float32", compile=True, device="cpu")
