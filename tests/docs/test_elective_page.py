"""The elective that `docs/reference/adding_an_elective.md` shows runs as it stands there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from folovllm import LLM, SamplingParams
from folovllm.engine import extension as extensions
from tests.helpers import tiny_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "adding_an_elective.md"


def test_the_example_serves_the_shortest_prompt_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "shortest_first_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shortest_first_of_the_page")
    monkeypatch.setattr(extensions, "EXTENSIONS", {"shortest_first": f"{module.__name__}:ShortestFirst"})
    monkeypatch.setattr("folovllm.plugins.OPTIONS", (f"{module.__name__}:ShortestFirstOptions",))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    fields = {"milestone": "m3", "device": "cpu", "num_kv_blocks": 40, "max_num_seqs": 1, "use_tqdm": False}
    for is_on, expected in ((True, [1, 2, 0]), (False, [0, 1, 2])):
        with LLM(str(tiny_checkpoint()), shortest_first=is_on, **fields) as llm:  # type: ignore[arg-type]
            for number, length in enumerate((9, 3, 6)):
                llm.engine.add_request(str(number), [5] * length, params)
            order: list[int] = []
            while llm.engine.has_unfinished_requests():
                order += [int(out.request_id) for out in llm.engine.step() if out.finished]
        assert order == expected
