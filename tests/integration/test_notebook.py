"""examples/quickstart.ipynb runs from start to end on a CPU."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.real
def test_the_notebook_runs(smollm2_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ALULA_NOTEBOOK_MODEL", str(smollm2_folder))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = [picture_count(cell) for cell in notebook.cells]
    assert sum(committed) == 3, "the notebook is committed with its pictures"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [picture_count(cell) for cell in notebook.cells] == committed
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output)
    dense, sparse = (int(share) for share in re.findall(r"tokens, KV saved (\d+)%", printed))
    assert (dense, sparse > 20) == (0, True)
    assert "step 16/16" in printed


def picture_count(cell: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
