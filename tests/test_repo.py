"""The repository's own promises: the package is what the notebooks export, the notebooks are clean and executed, the README is in step."""
import ast, filecmp, json, os, re, shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of what nbdev reads, so that the check changes nothing here."
    folder = tmp_path_factory.mktemp("repo") / "pico-vllm"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".pytest_cache", "*.egg-info"))
    return folder


def differences(copy: Path, name: str) -> list[str]:
    "Files below `name` that differ between here and the copy, or are in one only."
    def files(root): return {p.relative_to(root) for p in (root / name).rglob("*") if p.suffix in (".py", ".ipynb") and not {"__pycache__", ".ipynb_checkpoints", ".hypothesis"} & set(p.parts)}
    here, there = files(ROOT), files(copy)
    return sorted(str(p) for p in here | there if p not in here or p not in there or not filecmp.cmp(ROOT / p, copy / p, shallow=False))


def test_package_is_what_the_notebooks_export(copy):
    for p in (copy / "pico_vllm").glob("*.py"):
        if p.name not in ("__init__.py", "_modidx.py"): p.unlink()  # a module without a notebook would stay unseen otherwise
    subprocess.run([BIN / "nbdev_export"], cwd=copy, check=True)
    assert differences(copy, "pico_vllm") == [], "run `make export`"


def test_notebooks_are_clean(copy):
    subprocess.run([BIN / "nbdev_clean"], cwd=copy, check=True)
    assert differences(copy, "nbs") == [], "run `make export`"


def test_readme_is_in_step():
    done = subprocess.run([sys.executable, ROOT / "docs" / "make_readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def source(cell: dict) -> str: return "".join(cell["source"])
def is_print(node: ast.expr) -> bool: return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_executed(path):
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"], "widget state is saved"
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    outputs = [o for c in cells for o in c["outputs"]]
    assert outputs, "never executed"
    showing = [c for c in cells if (last := ast.parse(source(c)).body[-1:]) and isinstance(last[0], ast.Expr) and is_print(last[0].value) and not source(c).startswith(("#| hide", "#| slow", "#| gpu"))]
    silent = ["".join(c["source"])[:60] for c in showing if not c["outputs"]]
    assert not silent, f"these cells print, and no output is saved: {silent}"
    assert not [o for o in outputs if o["output_type"] == "error"], "an output is an error"
    assert not [o for o in outputs if o.get("name") == "stderr"], "stderr in the outputs"


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split() if (ROOT / ".git").exists() else []
MACHINE = re.compile(r"/root/|/home/\w|/Users/\w|/tmp/\w|site-packages/|[A-Z]:\\\\Users")


@pytest.mark.skipif(not TRACKED, reason="not a git checkout")
def test_no_machine_path_is_committed():
    found = [f"{p}: {m.group()}" for p in TRACKED if p.endswith((".ipynb", ".py", ".md", ".json", ".toml", ".yml")) and p != "tests/test_repo.py"
             for m in [MACHINE.search((ROOT / p).read_text())] if m]
    assert found == []


def test_public_surface_imports_quickly_enough_to_name_it():
    done = subprocess.run([sys.executable, "-c", "import pico_vllm; print(pico_vllm.__all__); from pico_vllm import LLM, SamplingParams"], capture_output=True, text=True, cwd=os.sep)
    assert done.returncode == 0, done.stderr
    for name in ("LLM", "SamplingParams"): assert name in done.stdout
