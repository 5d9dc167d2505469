"""Execute the example notebooks and keep their outputs, without paths, times or warnings.

python scripts/notebooks.py                 # all of examples/notebooks
python scripts/notebooks.py first-look      # one of them
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def executed(path: Path, kernel: KernelManager | None = None) -> Any:
    """The notebook after running every cell in a folder of its own.

    kernel: a running one that has imported what notebooks import and knows no name of another
        notebook any more; a new one by default.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, km=kernel, timeout=300, kernel_name="python3", resources=resources
        )
        if kernel is not None:
            anew = f"import os\nos.chdir({folder!r})\n%reset -f"
            notebook.cells.insert(0, nbformat.v4.new_code_cell(anew))
        client.execute()
        if kernel is not None:
            del notebook.cells[0]
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if _is_kept(o)]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _is_kept(output: Any) -> bool:
    """Not a warning, nor a bar that only a running kernel can draw."""
    return output.get("name") != "stderr" and not any(
        "widget" in kind for kind in output.get("data", {})
    )


def main() -> None:
    wanted = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for stem in wanted:
        path = FOLDER / f"{stem}.ipynb"
        nbformat.write(executed(path), path)
        print(f"ran {path.name}")


if __name__ == "__main__":
    main()
