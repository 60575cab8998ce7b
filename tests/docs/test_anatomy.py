"""What chapter 0 says in words is what the tools compute. (That the tables are theirs, `test_packaging` compares.)"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT

CHAPTER = " ".join((ROOT / "docs/0_what_happens.md").read_text("utf-8").split())
README = (ROOT / "folovllm/assets/stories-5m/README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "docs/_tools"))
    yield {name: importlib.import_module(name) for name in ("anatomy", "answer", "checkpoint", "excerpts", "shapes")}
    sys.path.remove(str(ROOT / "docs/_tools"))


class TestParameters:
    def test_they_add_up(self, tools: dict[str, ModuleType]) -> None:
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

    def test_what_the_text_says_of_them(self, tools: dict[str, ModuleType]) -> None:
        anatomy = tools["anatomy"]
        counts, n = anatomy.parameters(anatomy.LARGE), anatomy.letters(anatomy.LARGE)
        assert f"reads about {counts.total() * 2 / 2**30:.1f} GiB of weights" in CHAPTER
        assert f"In `Qwen3-0.6B` it is {n['Hq'] * n['D']:,}, and `H` is {n['H']:,}" in CHAPTER
        assert f"all {n['L']} layers in one captured graph" in CHAPTER
        assert 0.24 < counts["embed_tokens"] / counts.total() < 0.27, "a quarter of a small model"
        for model in (anatomy.SMALL, anatomy.LARGE):
            counts, n = anatomy.parameters(model), anatomy.letters(model)
            assert n["I"] == 3 * n["H"], "`I` is three times `H`"
            mlp = counts["gate_up_proj"] + counts["down_proj"]
            assert mlp > max(counts["qkv_proj"] + counts["o_proj"], counts["embed_tokens"]), (
                "the MLP is the largest part"
            )
            assert n["Hkv"] * 2 == n["Hq"], "both use GQA, half of the heads"

    def test_every_field_of_the_file_has_a_meaning(self, tools: dict[str, ModuleType]) -> None:
        anatomy = tools["anatomy"]
        assert set(anatomy.fields(anatomy.SMALL)) == set(anatomy.MEANING)


class TestOneAnswer:
    def test_byte_pairs_are_the_tokenizers(self, tools: dict[str, ModuleType]) -> None:
        answer = tools["answer"]
        for word in (" Peru", " Zorimba", "Once", " yesterday", "unbelievable"):
            assert answer.byte_pairs(word.replace(" ", "Ġ"), answer.merges())[-1] == answer.tokenizer().tokenize(word)

    def test_byte_pairs_by_hand(self, tools: dict[str, ModuleType]) -> None:
        steps = tools["answer"].byte_pairs("abab", [("b", "a"), ("a", "b"), ("ab", "ab")])
        assert steps == [["a", "b", "a", "b"], ["a", "ba", "b"]], "the earliest merge first, though it leads nowhere"

    def test_what_the_text_says_of_it(self, tools: dict[str, ModuleType]) -> None:
        answer = tools["answer"]
        tokens = len(answer.prompt_ids())
        assert (
            f"prefill of {tokens} tokens" in CHAPTER
            and f"here [{tokens}]" in CHAPTER
            and f"once for {tokens}." in CHAPTER
        )
        draws, _, _ = answer.watched()
        assert len(draws) == 8 and "Seven decode steps gave the answer" in CHAPTER
        assert f'After "{answer.STORY}" these come next' in CHAPTER
        says = [row.split("|")[5].strip() for row in answer.stream_table().splitlines()[2:]]
        assert says[2:-1] == ["` Budapest`"] * 4 and says[-1] == "` Lima`", "a wrong capital until the last layer"

    def test_the_watched_model_answers_as_the_engine_does(self, tools: dict[str, ModuleType]) -> None:
        from folovllm import LLM, SamplingParams

        answer = tools["answer"]
        llm = LLM(milestone="m2", dtype="float32", use_tqdm=False)
        messages = [{"role": "user", "content": answer.QUESTION}]
        (output,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        assert output.prompt_token_ids == answer.prompt_ids()
        assert output.outputs[0].token_ids == [token for token, _ in answer.watched()[0]]


class TestShapes:
    def test_letters_that_do_not_fit_are_found(
        self, tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shapes = tools["shapes"]
        steps = shapes.recorded(shapes.SMALL)
        assert [step["scores"][1] for step in steps] == ["[4, 18, 18]", "[4, 1, 19]", "[4, 1, 20]"]
        monkeypatch.setitem(shapes.ROWS, "lm_head", ("", "[S, H]", "[T, V]"))
        sizes = {**shapes.letters(shapes.SMALL), "T": 18, "n": 18, "S": 1, "N": 8, "B": 16}
        with pytest.raises(ValueError, match=r"lm_head has shapes \[1, 4096\], and \[T, V\] would be \[18, 4096\]"):
            shapes._compare(steps[0], sizes)

    def test_every_module_has_a_row(self, tools: dict[str, ModuleType]) -> None:
        """Of the first layer and around the layers; what only holds others has none."""
        shapes, anatomy = tools["shapes"], tools["anatomy"]
        leaves = [
            name
            for name, module in anatomy.skeleton(anatomy.SMALL).named_modules()
            if not list(module.children()) and (".layers." not in name or ".layers.0." in name)
        ]
        assert set(leaves) <= set(shapes.ROWS)

    def test_slots_in_the_text(self, tools: dict[str, ModuleType]) -> None:
        slots = tools["shapes"].batches()[0].slot_mapping.tolist()
        assert (slots[0], slots[16]) == (80, 32), "position 0 is slot 80, and position 16 is slot 32"


def test_merged_projections_were_faster() -> None:
    rows = json.loads((ROOT / "docs/data/merged_h200.json").read_text("utf-8"))["rows"]
    gain = {(row["what"], row["tokens"]): row["separate"] / row["merged"] for row in rows}
    assert gain["query, key, value", 1] > 3, "with one token several times as fast"
    assert all(1 <= gain[what, 2048] < 1.5 for what in ("query, key, value", "gate, up")), (
        "with thousands the gain is small"
    )


def test_a_computed_part_of_a_page(tools: dict[str, ModuleType]) -> None:
    excerpts = tools["excerpts"]
    page = "<!-- computed anatomy:activation_table -->\nold\n<!-- end -->\n"
    assert "| SiLU | -0.14 |" in excerpts.fill_in(page)
    with pytest.raises(ValueError, match=r"there is no nothing\.py"):
        excerpts.fill_in("<!-- computed nothing:at_all -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"there is no nothing in anatomy\.py"):
        excerpts.fill_in("<!-- computed anatomy:nothing -->\n<!-- end -->\n")
