"""The command as a user meets it: another process, exit codes, one-line errors, a terminal."""
import fcntl, io, json, os, pty, re, signal, struct, subprocess, sys, termios
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


# Several prompts, too few seats, too small a pool

CROWD = ["0123456789", "abcd", "The quick brown fox jumps", "x", "to be or not to be"]
SMALL_POOL = ["--block-size", "4", "--num-blocks", "11", "--max-model-len", "44", "--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--max-tokens", "16"]


def on_a_terminal(*args, rows=30, columns=100):
    "The command with its standard error on a pseudo-terminal: exit code, standard output, and what the terminal was sent."
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")} | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen([COMMAND, *args], stdout=subprocess.PIPE, stderr=slave, env=env)
    os.close(slave)
    sent = b""
    while True:
        try: piece = os.read(master, 65536)
        except OSError: break  # Linux says so where the other end is closed
        if not piece: break
        sent += piece
    os.close(master)
    out = process.stdout.read().decode()
    process.stdout.close()
    return process.wait(timeout=60), out, sent.decode()


@pytest.fixture(scope="module")
def in_lines(tiny): return cli("generate", "--model", tiny, *SMALL_POOL, *CROWD)


def test_the_live_view_on_a_terminal(tiny, in_lines):
    code, out, sent = on_a_terminal("generate", "--model", tiny, *SMALL_POOL, *CROWD)
    assert code == 0, sent
    assert out == in_lines.stdout
    assert "\x1b[1A" in sent and "\x1b[?25l" in sent and "\x1b[?25h" in sent, "drawn over in place, the cursor hidden meanwhile and given back"
    last = sent[sent.rindex("running, "):]
    assert last.startswith("running, 0 waiting, 5 finished; 0 of 11 blocks held")
    assert last.count("length") >= 5 and last.count("\u25a0") == 5 and last.count("\u00b7") == 11, "five prompts that ended, and no block held"
    assert "\x1b[38;2;86;180;233m" in last, "prompt 1 has the first owner's colour"
    assert "5 prompts" in sent and "preempted 1" in sent


def test_the_view_shows_what_the_scheduler_does(tiny):
    from rich.console import Console

    from pico_vllm.cli import answer_all, live_view
    from pico_vllm.engine import EngineConfig, LLMEngine
    from pico_vllm.sampling import SamplingParams
    engine = LLMEngine(EngineConfig(model=tiny, block_size=4, num_blocks=11, max_model_len=44, max_num_seqs=3, max_num_batched_tokens=16))
    seen = set()

    def look(batch):
        console = Console(width=100, file=io.StringIO())
        console.print(live_view(batch, 100))
        head, pool, titles, *rows = console.file.getvalue().splitlines()
        states = [re.split(r" +", row)[2] for row in rows]
        waiting = [batch.progress[i].seq.seq_id for i, state in enumerate(states) if state in ("waiting", "preempted")]
        assert waiting == [s.seq_id for s in engine.scheduler.waiting] and states.count("running") == len(engine.scheduler.running)
        assert pool.count("\u25a0") == engine.block_manager.num_used_blocks and pool.count("\u00b7") == engine.block_manager.num_free_blocks
        assert len(rows) == 5 and max(map(len, [head, pool, titles, *rows])) <= 100
        assert f"{len(waiting)} waiting" in head and ("preempted" in head) == bool(batch.preempted)
        seen.update(states)

    done = answer_all(engine, CROWD, [engine.tokenizer.encode(p) for p in CROWD], SamplingParams(temperature=0, max_tokens=16), look)
    assert seen == {"waiting", "running", "preempted", "length"} and sum(p.num_preemptions for p in done) >= 1
    assert engine.observers == [] and engine.block_manager.num_used_blocks == 0


def test_without_a_terminal_the_same_is_told_in_lines(tiny, in_lines):
    story = [line for line in in_lines.stderr.splitlines() if line.startswith("step ")]
    assert "2 running, 3 waiting, 0 finished" in story[0] and story[-1].endswith("0 running, 0 waiting, 5 finished; 0 of 11 blocks held")
    assert any("preempted" in line for line in story) and len(story) < 20 and "\x1b" not in in_lines.stderr
    assert "step " not in cli("generate", "--model", tiny, "--max-tokens", "3", "alone").stderr


def test_a_large_pool_fits_the_screen():
    from types import SimpleNamespace

    from rich.console import Console

    from pico_vllm.cli import Batch, live_view
    console = Console(width=80, file=io.StringIO())
    console.print(live_view(Batch(SimpleNamespace(block_manager=SimpleNamespace(num_blocks=32768, num_used_blocks=0)), []), 80))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 8 and max(map(len, lines)) <= 80 and any("a square is 211 blocks" in line for line in lines), lines


def test_a_wide_answer_stays_in_its_column():
    from rich.cells import cell_len

    from pico_vllm.cli import tail_of
    assert tail_of("abc\n\ndef  g", 5) == "def g" and tail_of("\u4f60\u597d\u4f60\u597d", 5) == "\u4f60\u597d" and cell_len(tail_of("\u4f60\u597d" * 50, 41)) == 40 and tail_of("", 5) == ""
    assert "\x1b" not in tail_of("\x1b[2Jgone\x07", 40) and tail_of("\x1b[2Jgone\x07", 40).endswith("[2Jgone\ufffd")


def test_a_reader_who_leaves_early_ends_it_quietly(tiny):
    process = subprocess.Popen([COMMAND, "generate", "--model", tiny, "--max-tokens", "3", "one", "two", "three"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE and "Traceback" not in stderr and "Broken" not in stderr, stderr


def test_seats_and_budget_are_the_engines(tiny):
    done = cli("generate", "--model", tiny, "--max-num-seqs", "8", "--max-num-batched-tokens", "4", "x")
    assert done.returncode == 2 and "max_num_batched_tokens=4" in done.stderr and "max_num_seqs=8" in done.stderr
    assert cli("generate", "--model", tiny, "--dtype", "half", "--max-tokens", "2", "x").returncode == 0
