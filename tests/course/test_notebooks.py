"""Built notebooks are their sources', executed over a learner's folder, and the check notices when they are not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.notebooks import parse

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]


def notebooks(sample: Course, *words: str) -> tuple[int, str]:
    kept = {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(sample.root), str(ROOT)])}
    command = [sys.executable, "-m", "milestones.notebooks", *words]
    done = subprocess.run(command, cwd=sample.root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_build_then_check(sample: Course) -> None:
    source, built = sample.root / "notebooks/src/m1_pool.py", sample.root / "notebooks/m1_pool.ipynb"
    assert notebooks(sample, "--check") == (1, "notebooks/m1_pool.ipynb: was never built; run `make notebooks`\n")
    status, said = notebooks(sample)
    assert status == 0 and said.startswith("m1_pool.ipynb: 4 cells"), said
    cells = json.loads(built.read_text())["cells"]
    assert cells[1]["outputs"] == [] and "google.colab" in "".join(cells[1]["source"])
    assert cells[2]["outputs"][0]["text"] == ["running: the reference\n"], "a reader has written nothing yet"
    assert cells[3]["outputs"][0]["data"]["text/plain"] == ["0"]
    assert notebooks(sample, "--check") == (0, "")
    source.write_text(source.read_text().replace("Pool(3)", "Pool(4)"))
    assert "its cells are not those of its source" in notebooks(sample, "--check")[1]
    source.write_text(source.read_text().replace("Pool(4).take()", "Pool(0).take()"))
    status, said = notebooks(sample, "m1_pool")
    assert status == 1 and "nothing left" in said


def test_the_address_of_the_repository_is_in_one_place(sample: Course) -> None:
    source, project = sample.root / "notebooks/src/m1_pool.py", sample.root / "pyproject.toml"
    title, colab, *_ = parse(source).cells
    assert "input(" in colab.source and "colab" not in title.source, "nobody has said where it is"
    project.write_text(f'{project.read_text()}\n[tool.folovllm.publish]\nowner = "me"\nrepository = "course"\n')
    title, colab, *_ = parse(source).cells
    assert "    repository = 'https://github.com/me/course'\n" in colab.source
    assert "(https://colab.research.google.com/github/me/course/blob/main/notebooks/m1_pool.ipynb)" in title.source


def test_the_first_cell_installs_on_colab_and_does_nothing_elsewhere(sample: Course) -> None:
    """As IPython reads it: `!` and `%cd` under the condition, and no name that is not there without it."""
    from IPython.core.inputtransformer2 import TransformerManager

    cell = parse(sample.root / "notebooks/src/m1_pool.py").cells[1].source
    code = TransformerManager().transform_cell(cell)
    exec(code, {})  # not on Colab: neither get_ipython nor input is called
    assert "get_ipython().system('git clone -q {repository} /content/folovllm && pip install" in code
    assert "get_ipython().run_line_magic('cd', '-q /content/folovllm')" in code


def test_the_kernels_notebook_starts_without_triton() -> None:
    """numpy's stand-in is there before the notebook imports Triton."""
    cells = [cell.source for cell in parse(ROOT / "notebooks/src/m4_kernels.py").cells if cell.cell_type == "code"]
    imports = next(cell for cell in cells if "import triton" in cell)
    code = f"import sys\nsys.modules['triton'] = None\n{imports}\nassert triton.jit.__module__ == 'folovllm.learn.numpy_triton'"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_committed_outputs_name_no_folder_of_a_machine() -> None:
    for file in sorted((ROOT / "notebooks").rglob("*.ipynb")):
        outputs = [cell.get("outputs") for cell in json.loads(file.read_text("utf-8"))["cells"]]
        found = re.search(r"(?<![\w.])/[\w/.-]+/(milestones|folovllm)/[\w/.-]+", json.dumps(outputs))
        assert found is None, f"{file.name} shows {found[0]}: end the cell with a statement"
