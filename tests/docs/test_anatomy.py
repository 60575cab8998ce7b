"""The tools that write chapter 0's tables count, split and watch what the model and its tokenizer do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from folovllm import LLM, SamplingParams
from tests.docs.blocks import ROOT

README = (ROOT / "folovllm/assets/stories-5m/README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "docs/_tools"))
    yield {name: importlib.import_module(name) for name in ("anatomy", "answer", "checkpoint", "excerpts", "shapes")}
    sys.path.remove(str(ROOT / "docs/_tools"))


def test_parameters_add_up(tools: dict[str, ModuleType]) -> None:
    """By the letters, by the parameters, and in the model's own description."""
    anatomy = tools["anatomy"]
    for model in (anatomy.SMALL, anatomy.LARGE):
        n, counts = anatomy.letters(model), anatomy.parameters(model)
        for part, (_, size) in anatomy.PARTS.items():
            formula = size.split(",")[0].replace("·", "*").replace("2 Hkv", "2 * Hkv")
            expected = 0 if part == "lm_head" else eval(formula, {}, n)  # both models are tied
            assert counts[part] == expected, f"{part} of {model}"
        assert counts.total() == sum(weight.numel() for weight in anatomy.skeleton(model).parameters())
    assert f"| parameters | {anatomy.parameters(anatomy.SMALL).total():,} in bf16" in README
    assert set(anatomy.fields(anatomy.SMALL)) == set(anatomy.MEANING), "every field of config.json has a meaning"


def test_byte_pairs_are_the_tokenizers(tools: dict[str, ModuleType]) -> None:
    answer = tools["answer"]
    for word in (" Peru", " Zorimba", "Once", " yesterday", "unbelievable"):
        assert answer.byte_pairs(word.replace(" ", "Ġ"), answer.merges())[-1] == answer.tokenizer().tokenize(word)
    steps = answer.byte_pairs("abab", [("b", "a"), ("a", "b"), ("ab", "ab")])
    assert steps == [["a", "b", "a", "b"], ["a", "ba", "b"]], "the earliest merge first, though it leads nowhere"


def test_the_watched_model_answers_as_the_engine_does(tools: dict[str, ModuleType]) -> None:
    answer = tools["answer"]
    llm = LLM(milestone="m2", dtype="float32", use_tqdm=False)
    messages = [{"role": "user", "content": answer.QUESTION}]
    (output,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert output.prompt_token_ids == answer.prompt_ids()
    assert output.outputs[0].token_ids == [token for token, _ in answer.watched()[0]]


def test_every_module_has_a_row_of_shapes(tools: dict[str, ModuleType]) -> None:
    """Of the first layer and around the layers; what only holds others has none."""
    shapes, anatomy = tools["shapes"], tools["anatomy"]
    modules = anatomy.skeleton(anatomy.SMALL).named_modules()
    leaves = {name for name, module in modules if not list(module.children())}
    assert {name for name in leaves if ".layers." not in name or ".layers.0." in name} <= set(shapes.ROWS)


def test_a_computed_part_of_a_page(tools: dict[str, ModuleType]) -> None:
    excerpts = tools["excerpts"]
    page = "<!-- computed anatomy:activation_table -->\nold\n<!-- end -->\n"
    assert "| SiLU | -0.14 |" in excerpts.fill_in(page)
    with pytest.raises(ValueError, match=r"there is no nothing\.py"):
        excerpts.fill_in("<!-- computed nothing:at_all -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"there is no nothing in anatomy\.py"):
        excerpts.fill_in("<!-- computed anatomy:nothing -->\n<!-- end -->\n")
