"""README.md and its images from nbs/index.ipynb, as committed (not executed here). With --check: exit 1 where they are not in step."""
import re, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def convert(folder: Path) -> None:
    "README.md and images/README_*.png, in `folder`."
    subprocess.run([Path(sys.executable).parent / "jupyter", "nbconvert", "--log-level=ERROR", "--to", "markdown", ROOT / "nbs" / "index.ipynb", "--output-dir", folder, "--output", "README",
                    "--NbConvertApp.output_files_dir=images", "--TagRemovePreprocessor.enabled=True", "--TagRemovePreprocessor.remove_cell_tags=hide"], check=True)
    text = (folder / "README.md").read_text()
    text = re.sub(r"```python\n#\| hide\n.*?```\n+", "", text, flags=re.S)  # plumbing cells
    text = re.sub(r"\]\((\w+\.ipynb)", r"](nbs/\1", text)                   # links are seen from the top level
    text = re.sub(r"\]\(\.\./", "](", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    (folder / "README.md").write_text("<!-- Made from nbs/index.ipynb by `make readme`; edit the notebook. -->\n\n" + text)


def main() -> int:
    with tempfile.TemporaryDirectory() as tmp:
        convert(Path(tmp))
        made = {p.relative_to(tmp): p.read_bytes() for p in Path(tmp).rglob("*") if p.is_file()}
        have = {p.relative_to(ROOT): p.read_bytes() for p in (ROOT / "README.md", *(ROOT / "images").glob("README_*")) if p.exists()}
        if "--check" in sys.argv:
            wrong = sorted(str(p) for p in made.keys() | have.keys() if made.get(p) != have.get(p))
            if wrong: print("not in step with nbs/index.ipynb, run `make readme`:", ", ".join(wrong))
            return bool(wrong)
        for p in (ROOT / "images").glob("README_*"): p.unlink()
        for p, data in made.items():
            (ROOT / p).parent.mkdir(exist_ok=True)
            (ROOT / p).write_bytes(data)
    return 0


if __name__ == "__main__": sys.exit(main())
