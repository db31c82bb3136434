"""The saved evidence of equality with Hugging Face must be what *today's* code gives, not what it once gave."""
import json
from pathlib import Path

import pytest
import torch

SAVED = json.loads((Path(__file__).resolve().parents[1] / "benchmarks" / "greedy_equality.json").read_text())["results"]


@pytest.mark.slow
def test_one_batch_of_all_prompts_gives_the_saved_ids():
    from pico_vllm import LLM, SamplingParams
    from pico_vllm.chat import render_chat
    torch.set_num_threads(2)
    llm = LLM(dtype="float32", num_blocks=256, max_model_len=1024)
    tied, values = llm.engine.model.config.tie_word_embeddings, sum(p.numel() for p in llm.engine.model.parameters())
    if (tied, values) != (SAVED["weights"]["tied"], SAVED["weights"]["values"]): pytest.skip("other weights than the evidence was made with")
    cases = SAVED["prompts"]
    prompts = [p["prompt"] if isinstance(p["prompt"], str) else render_chat(llm.engine.tokenizer, p["prompt"]) for p in cases.values()]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=SAVED["new_tokens"], ignore_eos=True), use_tqdm=False)
    wrong = [name for (name, p), out in zip(cases.items(), outs) if out.outputs[0].token_ids != p["ids"] or len(out.prompt_token_ids) != p["prompt_tokens"]]
    assert len(cases) == 20 and wrong == []
