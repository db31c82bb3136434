"""Run the notebooks' own tests, one `nbdev_test` process per notebook, and print what each took.

`nbdev_test` alone shares worker processes between notebooks, so one notebook's 2.5 GB of weights would stay beside the next one's.
With --in-place the notebooks are executed and saved instead (figures and numbers made anew).
"""
import argparse, os, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_SECONDS, MAX_GB = 120, 3.5  # promised for a notebook on a laptop; told here, not asserted, for a busy machine is no bug


def run(command: list[str]) -> tuple[int, str, float, float]:
    "Exit code, output, seconds and peak memory (GB) of a command and its children."
    start = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)  # its own usage and that of the children it waited for: Linux counts the largest of them
    return os.waitstatus_to_exitcode(status), output, time.perf_counter() - start, usage.ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb; default: all")
    parser.add_argument("--in-place", action="store_true")
    args = parser.parse_args()
    paths = [ROOT / "nbs" / f"{n}.ipynb" for n in args.names] or sorted((ROOT / "nbs").glob("*.ipynb"))
    if not paths: print("no notebooks found", file=sys.stderr); return 1
    failed = []
    for path in paths:
        if not path.exists(): print(f"no notebook {path.stem}", file=sys.stderr); return 1
        bin = Path(sys.executable).parent
        if args.in_place: command = [bin / "jupyter", "nbconvert", "--log-level=ERROR", "--to", "notebook", "--execute", "--inplace", path]
        else: command = [bin / "nbdev_test", "--path", path, "--n_workers", "0", "--do_print"]
        code, output, seconds, gb = run([str(c) for c in command])
        # nbdev_test exits 0 when it found nothing to run; only its "Success." says that something passed
        ok = code == 0 and (args.in_place or "Success." in output)
        marks = "".join(f", over {limit}" for over, limit in ((seconds > MAX_SECONDS, f"{MAX_SECONDS} s"), (gb > MAX_GB, f"{MAX_GB} GB")) if over)
        print(f"{'ok    ' if ok else 'FAILED'} {path.name:28} {seconds:6.1f} s  {gb:5.2f} GB{marks}", flush=True)
        if not ok:
            failed.append(path.name)
            print(output[-6000:], flush=True)
    print(f"{len(paths) - len(failed)} notebooks passed, {len(failed)} failed" + (": " + ", ".join(failed) if failed else ""), flush=True)
    return 1 if failed else 0


if __name__ == "__main__": sys.exit(main())
