"""The course speaks Chinese: every sentence of `python -m milestones` has its translation, with the same braces."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from milestones import language
from milestones.cli import app
from milestones.manifest import Course
from milestones.mine import Mine

ROOT = Path(__file__).resolve().parents[2]
COURSE = Course(ROOT)
CHINESE = language.messages("zh")
SPEAKING = (
    "cli",
    "builders",
    "failures",
    "progress",
    "say",
    "mine",
    "check",
    "manifest",
    "teaching",
    "grading",
    "update",
    "mini/cli",
    "mini/alone",
    "mini/course",
)  # to a learner, of milestones/


def said() -> set[str]:
    """The sentences that the code hands to `t` or `say`: literally, by a choice of two, or as a variable `said`."""
    found = set()
    for module in SPEAKING:
        for node in ast.walk(ast.parse((ROOT / "milestones" / f"{module}.py").read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("t", "say") and node.args:
                value: ast.expr = node.args[0]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("said", "left"):
                value = node.value
            else:
                continue
            choices = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            found |= {c.value for c in choices if isinstance(c, ast.Constant) and isinstance(c.value, str) and c.value}
    return found


def helped() -> set[str]:
    parts = [part for c in language.parts_of(typer.main.get_command(app)) for part in (c, *c.params)]
    return {part.help for part in parts if part.help}


def titles() -> set[str]:
    found = {text for m in COURSE.milestones for text in (m.title, m.summary, *(e.title for e in m.exercises))}
    return found | {builder.title for builder in COURSE.builders}


def test_every_sentence_is_translated() -> None:
    assert len(said()) > 40, "the code hands its sentences over in another way by now: see said()"
    assert sorted((said() | helped() | titles()) - CHINESE.keys()) == []


def test_translations_have_the_same_braces_and_marks() -> None:
    for english, chinese in CHINESE.items():
        for pattern in (r"\{\w+\}", r"\[/?\w*\]", r"python -m milestones \w+|mine/"):
            assert {*re.findall(pattern, english)} == {*re.findall(pattern, chinese)}, english
        assert english.startswith("not updated") <= chinese.startswith(CHINESE["not updated"]), "`update` asks for that"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FOLOVLLM_LANG": "zh"}, "zh"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"FOLOVLLM_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({}, "en"),
    ],
)
def test_which_language(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("FOLOVLLM_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert language.language() == expected


def test_hints_and_statements_have_the_form_of_the_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_LANG", "zh")
    for exercise in COURSE.exercises:
        hints = COURSE.hints(exercise)
        assert len(hints) == 3 and "<!--" not in str(hints), exercise
        assert len(statements := COURSE.statements(exercise)) == len(exercise.symbols) and all(statements), exercise
    for builder in COURSE.builders:
        assert len(COURSE.hints(builder)) == 3 and "<!--" not in builder.statement


def test_start_copies_the_chinese_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_LANG", "zh")
    assert Mine(COURSE, tmp_path)._copy_notebook(COURSE.milestone("m3").notebook) == [
        "m3_paged_kv.ipynb：已复制，不含输出"
    ]
    text = (tmp_path / "m3_paged_kv.ipynb").read_text("utf-8")
    assert "](../docs/3_paged_kv.zh.md)" in text and '"outputs": []' in text


def test_a_session_in_chinese(tmp_path: Path) -> None:
    environment = {**os.environ, "FOLOVLLM_LANG": "zh", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "COLUMNS": "100"}
    for arguments, expected in ((["--help"], "进度"), (["hint", "m9.1"], "错误：没有练习 'm9.1'")):
        command = [sys.executable, "-m", "milestones", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8")
        assert expected in done.stdout + done.stderr
