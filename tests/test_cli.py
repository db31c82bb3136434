"""The command as a user meets it: another process, exit codes, one-line errors."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "pico-vllm"


def cli(*args, **env):
    return subprocess.run([COMMAND, *args], capture_output=True, text=True, env={**os.environ, **env}, timeout=300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A checkpoint folder of a tiny model with a tokenizer of bytes."
    from pico_vllm.testing import save_tiny_checkpoint
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_generate_answers_each_prompt(tiny):
    done = cli("generate", "--model", tiny, "--max-tokens", "5", "--json", "one", "two", "three")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["prompt"] for r in rows] == ["one", "two", "three"] and all(len(r["token_ids"]) == 5 for r in rows)


def test_text_to_stdout_and_the_rest_to_stderr(tiny):
    done = cli("generate", "--model", tiny, "--max-tokens", "20", "--block-size", "4", "--show-blocks", "0123456789")
    text = json.loads(cli("generate", "--model", tiny, "--max-tokens", "20", "--json", "0123456789").stdout)["text"]
    assert done.stdout.rstrip("\n") == text.rstrip("\n")
    assert "block_table=[0, 1, 2]\n" in done.stderr and "block_table=[0, 1, 2, 3]\n" in done.stderr and "blocks free again" in done.stderr


@pytest.mark.parametrize("args, words", [
    (["generate", ""], ["empty"]),
    (["generate", "fine", ""], ["prompt 1", "empty"]),
    (["generate", "x" * 600], ["600", "512"]),
    (["generate", "--max-model-len", "16", "--max-tokens", "1", "x" * 16], ["16", "15"]),
    (["generate", "--max-tokens", "600", "x"], ["600", "512"]),
    (["generate", "--max-tokens", "0", "x"], ["max_tokens", "0"]),
    (["generate", "--dtype", "int9", "x"], ["int9", "bfloat16"]),
    (["generate", "--device", "cuda:99", "x"], ["cuda:99", "CUDA"]),
    (["generate", "--device", "abacus", "x"], ["abacus"]),
    (["generate", "--block-size", "0", "x"], ["block_size", "0"]),
    (["generate", "--num-blocks", "1", "--block-size", "4", "--max-tokens", "8", "x"], ["8", "4"]),
    (["generate", "--temperature", "-1", "x"], ["temperature", "-1"]),
    (["generate", "--top-p", "2", "x"], ["top_p", "2"]),
    (["generate", "--chat", "x"], ["chat template"]),
], ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else v)
def test_a_mistake_is_one_line_and_exit_code_2(tiny, args, words):
    done = cli(args[0], "--model", tiny, *args[1:])
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in done.stderr, done.stderr
    assert all(word in errors[0] for word in words), errors
    assert done.stdout == ""


@pytest.mark.parametrize("model, words", [("no/such/folder", ["no/such/folder"]), ("nobody-here/nothing", ["nobody-here/nothing"])])
def test_an_unknown_model_is_named(model, words):
    done = cli("generate", "--model", model, "x")
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr, done.stderr
    assert all(word in done.stderr for word in words)


def test_a_seed_makes_chance_reproducible(tiny):
    a, b, c = (cli("generate", "--model", tiny, "--json", "--temperature", "1", "--seed", seed, "--max-tokens", "12", "hello").stdout for seed in ("7", "7", "8"))
    assert a == b != c


def test_unknown_architecture_is_refused(tiny, tmp_path):
    import shutil
    folder = Path(shutil.copytree(tiny, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    done = cli("generate", "--model", str(folder), "x")
    assert done.returncode == 2 and "MambaForCausalLM" in done.stderr and "Qwen2ForCausalLM" in done.stderr, done.stderr


def test_debug_shows_the_traceback(tiny):
    done = cli("generate", "--model", tiny, "--max-tokens", "0", "x", PICO_VLLM_DEBUG="1")
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_weights_says_which(tiny):
    done = cli("weights", tiny)
    assert done.returncode == 0 and "Qwen2ForCausalLM" in done.stdout, done.stdout + done.stderr
    assert cli("weights", "no/such/folder", "--no-fetch").returncode == 2
