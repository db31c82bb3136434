"""Weights in fewer bits, from the option to the numbers: what a user asks for is what runs, here and on a machine without the operators."""
import pytest
import torch
from torch import nn

from pico_vllm import quantized
from pico_vllm.engine import LLM, EngineConfig
from pico_vllm.quantized import SCHEMES, Int4Linear, Int8Linear, QuantizedLinear, quantize_linears
from pico_vllm.sampling import SamplingParams
from pico_vllm.testing import save_tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6)
KINDS = [Int8Linear, Int4Linear]


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_operators(monkeypatch):
    for name in ("can_int8", "can_int4"): monkeypatch.setattr(quantized, name, lambda: False)


def linear_of(n_in=128, n_out=192, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(n_in + n_out)
    return nn.Linear(n_in, n_out, bias, dtype=dtype)


def without_operators(kind, linear, monkeypatch):
    with monkeypatch.context() as m:
        for name in ("can_int8", "can_int4"): m.setattr(quantized, name, lambda: False)
        return kind(linear)


def num_bytes(model):
    return sum(m.num_bytes for m in model.modules() if isinstance(m, QuantizedLinear)) + sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_runs_and_batch_changes_nothing(folder, scheme, dtype):
    llm = LLM(folder, dtype=dtype, quantization=scheme, device="cpu", num_blocks=32, block_size=4, max_model_len=64)
    layers = [m for m in llm.engine.model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 3 * 4 + 1 and not any(type(m) is nn.Linear for m in llm.engine.model.modules())
    assert type(llm.engine.model.lm_head) is Int8Linear
    outs = llm.generate(["abc", "some longer text"], GREEDY, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == 6 for o in outs)
    if dtype == "float32": assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == outs[0].outputs[0].token_ids


@pytest.mark.parametrize("scheme", SCHEMES)
def test_llm_without_operators(folder, scheme, no_operators):
    llm = LLM(folder, quantization=scheme, device="cpu", num_blocks=32, block_size=4, max_model_len=64)
    assert not any(m.native for m in llm.engine.model.modules() if isinstance(m, QuantizedLinear))
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fallback_equals_operator(kind, bias, dtype, monkeypatch):
    linear = linear_of(bias=bias, dtype=dtype)
    here, there = kind(linear), without_operators(kind, linear, monkeypatch)
    for rows in (0, 1, 8, 40, 128, 129):
        x = torch.randn(rows, 128).to(dtype)
        torch.testing.assert_close(here(x), there(x), atol=.03 if dtype == torch.bfloat16 else 2e-3, rtol=0)
    x = torch.randn(2, 3, 128).to(dtype)
    assert here(x).shape == (2, 3, 192) and here(x).dtype == dtype


@pytest.mark.parametrize("n_in, n_out", [(32, 64), (96, 7), (64, 260), (33, 5), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_shapes(kind, n_in, n_out):
    linear = linear_of(n_in, n_out)
    if not kind.fits(linear): return
    x = torch.randn(130, n_in, dtype=torch.bfloat16)
    error = (kind(linear)(x) - linear(x)).float().abs().max() / linear(x).float().abs().max()
    assert error < (.03 if kind is Int8Linear else .15)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_large_values(kind):
    linear = linear_of()
    with torch.no_grad(): linear.weight[0] = 0
    layer = kind(linear)
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), linear(x), atol=1e-2, rtol=0)
    assert layer(x + 1e30).isfinite().all() and layer(x + 1e-30).isfinite().all()


@pytest.mark.parametrize("scheme, share", [("int8", .55), ("int4", .36)])
def test_memory_is_smaller(scheme, share):
    model = nn.Sequential(*(linear_of(512, 512, False) for _ in range(3)))
    before = num_bytes(model)
    assert quantize_linears(model, scheme) == 3 and num_bytes(model) < share * before


def test_tied_head_keeps_the_embedding():
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "lm_head": nn.Linear(32, 64, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    before = model["embed"].weight.clone()
    assert quantize_linears(model, "int8") == 1 and torch.equal(model["embed"].weight, before)


@pytest.mark.parametrize("value", ["int3", "", "INT8", "awq"])
def test_unknown_value_names_the_known(value):
    with pytest.raises(ValueError, match="int8, int4"): EngineConfig(quantization=value)
    with pytest.raises(ValueError, match="int8, int4"): quantize_linears(nn.Sequential(), value)


def test_an_engine_over_a_model_that_is_there_refuses_the_option():
    "It would otherwise be accepted and ignored."
    from pico_vllm.engine import LLMEngine
    from pico_vllm.testing import byte_tokenizer, hard_tiny_model, ours_from_hf
    with pytest.raises(ValueError, match="quantize_linears"): LLMEngine.from_parts(ours_from_hf(hard_tiny_model()), byte_tokenizer(), quantization="int8")
