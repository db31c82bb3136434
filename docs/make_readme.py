"""README.md and its images from nbs/index.ipynb, as committed (not executed here). With --check: exit 1 where they are not in step."""
import re, sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]


def convert() -> dict[Path, bytes]:
    "README.md and images/README_*.png, by path from the top level."
    notebook = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}  # colours the code blocks
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("#| hide")]
    text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": "images", "unique_key": "README"})
    text = re.sub(r"\]\((\w+\.ipynb)", r"](nbs/\1", text)  # links are seen from the top level
    text = re.sub(r"\]\(\.\./", "](", text)
    text = re.sub(r"\n\s*\n(\s*\n)+", "\n\n", text).strip() + "\n"
    made = {Path(name): data for name, data in resources["outputs"].items()}
    return {Path("README.md"): ("<!-- Made from nbs/index.ipynb by `make readme`; edit the notebook. -->\n\n" + text).encode(), **made}


def main() -> int:
    made = convert()
    have = {p.relative_to(ROOT): p.read_bytes() for p in (ROOT / "README.md", *(ROOT / "images").glob("README_*")) if p.exists()}
    if "--check" in sys.argv:
        wrong = sorted(str(p) for p in made.keys() | have.keys() if made.get(p) != have.get(p))
        if wrong: print("not in step with nbs/index.ipynb, run `make readme`:", ", ".join(wrong))
        return bool(wrong)
    for p in have.keys() - made.keys(): (ROOT / p).unlink()
    for p, data in made.items():
        (ROOT / p).parent.mkdir(exist_ok=True)
        (ROOT / p).write_bytes(data)
    return 0


if __name__ == "__main__": sys.exit(main())
