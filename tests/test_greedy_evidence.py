"""The saved evidence of equality with Hugging Face must be what *today's* code gives, not what it once gave."""
import json, os
from pathlib import Path

import pytest
import torch
from conftest import assert_baseline, watch_preemptions

SAVED = json.loads((Path(__file__).resolve().parents[1] / "benchmarks" / "greedy_equality.json").read_text())["results"]


@pytest.fixture(scope="module")
def model():
    "The real weights in float32 and their tokenizer, where they are those that the evidence was made with."
    from transformers import AutoTokenizer

    from pico_vllm.checkpoints import resolve_model
    from pico_vllm.model import load_model
    folder, threads = resolve_model(), torch.get_num_threads()
    model = load_model(folder, torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    tied, values = model.config.tie_word_embeddings, sum(p.numel() for p in model.parameters())
    if (tied, values) != (SAVED["weights"]["tied"], SAVED["weights"]["values"]): pytest.skip("other weights than the evidence was made with")
    torch.set_num_threads(os.cpu_count() if "OMP_NUM_THREADS" not in os.environ else threads)
    yield model, AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks, forced", [(256, False), (64, True)], ids=["all at once", "pool that forces preemption"])
def test_all_prompts_together_give_the_saved_ids(model, num_blocks, forced):
    from pico_vllm import LLM, SamplingParams
    from pico_vllm.chat import render_chat
    from pico_vllm.engine import LLMEngine
    llm = LLM.from_engine(LLMEngine.from_parts(*model, num_blocks=num_blocks, max_model_len=384))
    preempted, running = watch_preemptions(llm.engine), []
    llm.engine.observers.append(lambda scheduled, finished: running.append(len(scheduled.num_scheduled_tokens)))
    cases = SAVED["prompts"]
    prompts = [p["prompt"] if isinstance(p["prompt"], str) else render_chat(llm.engine.tokenizer, p["prompt"]) for p in cases.values()]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=SAVED["new_tokens"], ignore_eos=True), use_tqdm=False)
    wrong = [name for (name, p), out in zip(cases.items(), outs) if out.outputs[0].token_ids != p["ids"] or len(out.prompt_token_ids) != p["prompt_tokens"]]
    assert len(cases) == 20 and wrong == []
    assert (len(preempted) >= 5 and max(running) >= 15) if forced else (not preempted and max(running) == 20), (preempted, max(running))
    assert_baseline(llm.engine)
