"""`pico-vllm bench`: engines in turns, each counted; what fails is named and stops nobody; nothing saved names a folder."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

from pico_vllm import bench_worker
from pico_vllm.peers import COLUMNS, EngineError, Work, Workload, Worker, achieved, agreement, bench_engines, check_counts, parse_engine, parse_engines, plan_workloads, rate_rows, roofs_of, run_workload, take_turns, without_paths

COMMAND = Path(sys.executable).parent / "pico-vllm"


def bench(*args, cwd=None):
    return subprocess.run([COMMAND, "bench", *args], capture_output=True, text=True, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)


# Turns

def test_turns_alternate_and_a_failure_leaves():
    order = []

    def player(name, fails_at=None):
        def run():
            order.append(name)
            if order.count(name) == fails_at: raise EngineError("broke")
            return name
        return run
    given, failed = take_turns({"a": player("a"), "b": player("b", 2), "c": player("c")}, 3)
    assert "".join(order) == "abccbaac" and given == {"a": ["a"] * 3, "c": ["c"] * 3} and failed == {"b": "broke"}


def test_a_bug_of_ours_is_no_engines_failure():
    with pytest.raises(ZeroDivisionError): take_turns({"a": lambda: 1 / 0}, 1)


# Counting

@pytest.mark.parametrize("counts, words", [([3, 5], ["request 1", "asked for 4", "got 5"]), ([3, 3], ["got 3"]), ([3], ["2 requests", "1 answered"]), ([0, 4], ["request 0", "got 0"])])
def test_only_the_tokens_asked_for_are_a_number(counts, words):
    jobs = [{"prompt": [1], "max_tokens": 3}, {"prompt": [2], "max_tokens": 4}]
    check_counts(jobs, {"counts": [3, 4]})
    with pytest.raises(EngineError) as e: check_counts(jobs, {"counts": counts})
    assert all(w in str(e.value) for w in words), e.value


@pytest.mark.parametrize("short", [33, 1])
def test_a_decode_rate_counts_both_runs(short):
    workload = plan_workloads([], [4], [], 32, 200, 0)[0]
    def ask(jobs): return {"seconds": 1. + jobs[0]["max_tokens"] / 32, "counts": [j["max_tokens"] - (j["max_tokens"] == short) for j in jobs], "token_ids": None}
    with pytest.raises(EngineError, match="did not get the tokens"): run_workload(ask, workload)


def test_a_decode_rate_is_the_difference():
    workload = plan_workloads([], [4], [], 32, 200, 0)[0]
    def ask(jobs): return {"seconds": 5. + .25 * jobs[0]["max_tokens"], "counts": [j["max_tokens"] for j in jobs], "token_ids": None}
    assert run_workload(ask, workload)["tokens_per_s"] == 4 * 32 / 8
    with pytest.raises(EngineError, match="--decode-tokens"): run_workload(lambda jobs: {**ask(jobs), "seconds": 1.}, workload)


def test_agreement():
    assert agreement([[1], [2]], [[1], [3]]) == 1 and agreement(None, [[1]]) is None and agreement([[1]], None) is None


def test_bytes_and_operations_by_hand():
    work = Work(layer_params=100, head_params=20, kv_values=4, bytes_per_value=2)
    decode = Workload("d", [{"prompt": [7] * 9, "max_tokens": 5}] * 3, rows=3)
    got = achieved(decode, 6., work)
    assert got["gb_s"] * 1e9 == pytest.approx(2 * (240 + 3 * 12 * 8)) and got["gflops"] * 1e9 == pytest.approx(6 * 240)
    mixed = achieved(Workload("m", [{"prompt": [7] * 9, "max_tokens": 5}, {"prompt": [7], "max_tokens": 1}]), 6., work)  # 13 + 1 tokens computed, 6 given in 1 s
    assert mixed["gb_s"] is None and mixed["gflops"] * 1e9 == pytest.approx(2 * (100 * 14 + 20 * 6))


# What the workers are

def test_the_worker_needs_nothing_but_the_standard_library():
    orders = [{"do": "load", "engine": "fake", "options": {"greet": True}}, {"do": "run", "jobs": [{"prompt": [1], "max_tokens": 3}]}]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", "import runpy, sys; runpy.run_path(sys.argv[1])['worker_main']()", bench_worker.__file__],
                          input="".join(json.dumps(o) + "\n" for o in orders), capture_output=True, text=True)
    assert [sorted(json.loads(line)) for line in done.stdout.splitlines()] == [["seconds", "threads", "versions"], ["counts", "seconds", "token_ids"]]
    assert "a greeting" in done.stderr and done.returncode == 0


def test_a_silent_worker_is_given_up():
    worker = Worker(parse_engine("fake:pace=60"), timeout=20)
    try:
        worker.start({})
        worker.timeout = .2
        with pytest.raises(EngineError, match="no answer for 0.2 s"): worker.run([{"prompt": [1], "max_tokens": 3}])
        assert worker.process.poll() is not None
        with pytest.raises(EngineError, match="has ended"): worker.run([])
    finally: worker.close()


def test_names_of_engines():
    names = [s.name for s in parse_engines(["pico", "pico", "pico:max_num_seqs=8", "http://127.0.0.1:1/v1", "http://127.0.0.1:2", f"vllm={sys.executable}"])]
    assert names == ["pico", "pico#2", "pico:max_num_seqs=8", "server", "server#2", "vllm"]
    assert parse_engine("pico:max_num_seqs=8,block_size=32").options == {"max_num_seqs": 8, "block_size": 32}
    for key in ("dtype=float32", "model=/x/y", "max_model_len=9"):
        with pytest.raises(ValueError, match="the same for all"): parse_engine(f"pico:{key}")


def test_no_paths():
    assert without_paths("OSError: /opt/some venv/x, '/srv/models/tiny' at http://127.0.0.1:80/v1/models, 3/4") == "OSError: …/some venv/x, '…/tiny' at URL, 3/4"


def test_ids_that_are_not_what_was_counted():
    jobs = [{"prompt": [1], "max_tokens": 3}]
    check_counts(jobs, {"counts": [3], "token_ids": [[1, 2, 3]]})
    with pytest.raises(EngineError, match="other tokens"): check_counts(jobs, {"counts": [3], "token_ids": [[1, 2]]})


def test_a_step_of_more_rows_than_an_engine_takes(tiny_checkpoint):
    got = bench_engines(parse_engines(["fake", "fake:max_num_seqs=2"]), plan_workloads([], [3], [], 8, 200, seed=1), tiny_checkpoint, "float32", 1, "fake")
    assert [f["engine"] for f in got["failures"]] == ["fake:max_num_seqs=2"] and "2 sequences at a time" in got["failures"][0]["error"]


def test_a_worker_sees_nothing_of_the_folder_it_is_started_in(tmp_path, monkeypatch):
    "Another Python must not find our package in the working directory and report it as its own."
    (tmp_path / "json.py").write_text("raise RuntimeError('taken from the working directory')")
    monkeypatch.chdir(tmp_path)
    worker = Worker(parse_engine("fake"))
    try: worker.start({})
    finally: worker.close(), worker.close()  # twice does no harm


# The real ones

def test_three_ways_of_batching_give_the_same_ids(tiny_checkpoint):
    got = bench_engines(parse_engines(["pico", "hf-static", "hf-continuous"]), plan_workloads(["mixed:6"], [3], [], 8, 200, seed=1), tiny_checkpoint, "float32", 1, "pico")
    assert not got["failures"], got["failures"]
    for w in got["workloads"]: assert {name: e["same_ids"] for name, e in w["engines"].items()} == dict.fromkeys(("pico", "hf-static", "hf-continuous"), w["requests"])
    for about in got["engines"].values(): assert about["load_s"] > 0 and about["first_token_s"] > about["load_s"] and about["peak_gib"] > .05 and about["versions"]["torch"]
    assert min(roofs_of(got)) > 0 and all(len(row) == len(COLUMNS) for row in rate_rows(got))


def test_a_server_takes_part(tiny_checkpoint):
    from pico_vllm.serve import served
    with served(str(tiny_checkpoint), "--num-blocks", "256", "--dtype", "float32", env={"OMP_NUM_THREADS": "1"}) as (url, _):
        got = bench_engines(parse_engines(["fake", url]), plan_workloads(["mixed:4"], [], [], 8, 200, seed=1), tiny_checkpoint, "float32", 2, "fake")
    assert not got["failures"], got["failures"]
    server = got["workloads"][0]["engines"]["server"]
    assert server["same_ids"] is None and server["tokens_per_s"] > 0 and len(server["each_s"]) == 2 and "peak_gib" not in got["engines"]["server"] and "server" in [row[1] for row in rate_rows(got)]


# The command

@pytest.fixture(scope="module")
def saved(tiny_checkpoint, tmp_path_factory):
    "One run with an honest engine, a hasty one, one that dies, one that does not load, and a server that is not there."
    folder = tmp_path_factory.mktemp("bench")
    (folder / "two.json").write_text(json.dumps({"requests": [{"prompt_token_ids": [1, 2, 3], "max_tokens": 9}, {"prompt_token_ids": [4], "max_tokens": 7}]}))
    done = bench("-m", str(tiny_checkpoint), "--dtype", "float32", "--engine", "fake:stop_after=2", "--engine", "fake", "--engine", "fake:fail=die", "--engine", "fake:fail=load", "--engine", "http://127.0.0.1:9",
                 "--engine", f"vllm={sys.executable}", "--workload", str(folder / "two.json"), "--decode", "2", "--decode-tokens", "4", "--repeats", "2", "--baseline", "fake", "--save", "example", "--json", cwd=folder)
    return done, folder


def test_failures_are_named_and_the_others_go_on(saved):
    done, folder = saved
    assert done.returncode == 1, done.stderr
    got = json.loads(done.stdout)
    assert [list(w["engines"]) for w in got["workloads"]] == [["fake"], ["fake"]] and got["workloads"][0]["output_tokens"] == 16 and got["workloads"][1]["output_tokens"] == 8
    assert {(f["engine"], f["workload"]) for f in got["failures"]} == {("fake:fail=die", "start"), ("fake:fail=load", "start"), ("server", "start"), ("vllm", "start"), ("fake:stop_after=2", "two"), ("fake:stop_after=2", "decode, 2 rows")}
    reasons = {f["engine"]: f["error"] for f in got["failures"]}
    assert "a last word" in reasons["fake:fail=die"] and "exit code 7" in reasons["fake:fail=die"] and "no server" in reasons["server"]
    for name in reasons: assert f"failed: {name}" in done.stderr
    assert got["workloads"][0]["engines"]["fake"]["ratio"] == 1 and len(got["workloads"][0]["engines"]["fake"]["each_s"]) == 2


def test_what_is_saved_says_how_and_names_no_folder(saved, tiny_checkpoint):
    done, folder = saved
    text = (folder / "benchmarks" / "example.json").read_text()
    doc = json.loads(text)
    assert {"command", "machine", "results", "date", "seed", "name"} <= doc.keys() and doc["seed"] == 0
    for path in (str(folder), str(tiny_checkpoint), sys.executable, str(Path(sys.executable).parent), "/tmp", "127.0.0.1"): assert path not in text, path
    assert "--engine vllm=PYTHON" in doc["command"] and "--engine URL" in doc["command"] and "--workload two.json" in doc["command"]


@pytest.mark.parametrize("args, words", [
    (["--engine", "llama"], ["llama", "hf-static"]),
    (["--engine", "vllm"], ["vllm=/path"]),
    (["--engine", "vllm=/no/python"], ["/no/python"]),
    (["--engine", "pico:fast"], ["key=value", "fast"]),
    (["--engine", "http://"], ["URL"]),
    (["--baseline", "vllm"], ["vllm", "pico"]),
    (["--workload", "no/such.json"], ["no/such.json"]),
    (["--workload", "mixed:x"], ["mixed:x", "mixed:64"]),
    (["--decode", "1,x"], ["--decode", "1,x"]),
    (["--decode", "0"], ["--decode", "0"]),
    (["--context", "1024"], ["1057", "512"]),
    (["--repeats", "0"], ["--repeats", "0"]),
    (["--dtype", "int9"], ["int9", "bfloat16"]),
    (["--save", "../x"], ["../x"]),
], ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else v)
def test_a_mistake_is_one_line_and_exit_code_2(tiny_checkpoint, args, words):
    done = bench("-m", str(tiny_checkpoint), *args)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and lines[-1].startswith("error: ") and "Traceback" not in done.stderr and done.stdout == "", done.stderr
    assert all(w in lines[-1] for w in words), lines


@pytest.mark.parametrize("entry, words", [({"prompt": "text", "max_tokens": 3}, ["request 0", "prompt_token_ids"]), ({"prompt_token_ids": [1, 260], "max_tokens": 3}, ["260", "vocabulary"]), ({"prompt_token_ids": [1], "max_tokens": 0}, ["max_tokens", "0"])])
def test_a_workload_that_cannot_be_compared(tiny_checkpoint, tmp_path, entry, words):
    (tmp_path / "w.json").write_text(json.dumps([entry]))
    done = bench("-m", str(tiny_checkpoint), "--engine", "fake", "--workload", str(tmp_path / "w.json"))
    assert done.returncode == 2 and all(w in done.stderr for w in words), done.stderr


@pytest.mark.parametrize("number, code", [(2, 130), (15, 143)])
def test_no_worker_outlives_the_command(tiny_checkpoint, number, code):
    import psutil
    process = subprocess.Popen([COMMAND, "bench", "-m", str(tiny_checkpoint), "--engine", "fake:pace=0.5", "--decode", "1", "--dtype", "float32"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("starting fake"): break
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code and not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
