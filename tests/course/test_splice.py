"""The splice: bodies go out and come back to the letter, whatever the function looks like."""

import ast
import inspect
import textwrap

import pytest

from milestones import splice
from milestones.manifest import Course

CORNERS = textwrap.dedent('''\
    """Corner cases."""
    from __future__ import annotations
    import functools
    from abc import ABC, abstractmethod
    from typing import overload
    import collections.abc as _abc
    try:
        import triton
        import triton.language as tl
        HAS = True
    except ImportError:
        HAS = False
    else:
        def in_else(x): return x

    def _helper(x: int) -> int:
        return x + 1

    def uses_helper(x: int) -> int:
        """Uses a private helper: ä."""
        return _helper(x) + len(_abc.__name__)

    def oneliner(x: int) -> int: return x + 1

    def one_line_with_docstring(x: dict[str, int] = {"a": 1}) -> int: "döc"; return x  # why

    def wrapped_line(x): return (x +
      1)

    @functools.lru_cache(
        maxsize=None,
    )
    def cached(
        x: int,  # a comment: with a colon
    ) -> int:  # and one here
        # before the docstring
        """Decorated."""
        return x

    @overload
    def loaded(x: int) -> int: ...
    @overload
    def loaded(x: str) -> str: ...
    def loaded(x):
        """Real one."""
        return x

    if HAS:
        def conditional(x: int) -> str:
            """Lives in an if."""
            return f"""{x}
    flush left
        indented"""

        @triton.jit
        def kernel(x, n: tl.constexpr):
            """A kernel."""
            return tl.sum(x) + n

    def generator(n: int):
        """A generator."""
        for i in range(n):
            yield i

    class D:
        """Class."""
        @property
        def total(self) -> int:
            """Sum."""
            return self.a + self.b
        @total.setter
        def total(self, v: int) -> None:
            self.a = v
        @classmethod
        def make(cls) -> "D":
            """Make."""
            return cls(1, 2)
        class Inner:
            async def deep(self):
                # leading comment


                x = 1
                # middle
                return x
                # trailing comment that gives it away

        # of the class
        def g(self): return super().__repr__()

    class A(ABC):
        @abstractmethod
        def f(self) -> int:
            """Only a docstring."""
''')
NAMES = [name for name, _ in splice.functions(CORNERS)]


def parsed(source: str) -> str:
    return ast.dump(ast.parse(source))


@pytest.mark.parametrize("name", NAMES)
def test_a_blank_compiles_and_touches_nothing_else(name: str) -> None:
    blanked = splice.blank(CORNERS, {name: "m1.1"})
    compile(blanked, "blanked", "exec")
    function, stub = splice.find(CORNERS, name), splice.find(blanked, name)
    assert splice.stub_text("m1.1", name) in stub.body_at("") and splice.stub_text("m1.1", name) not in CORNERS
    before, after = CORNERS.split("\n"), blanked.split("\n")
    assert before[: function.start] == after[: stub.start]
    assert before[function.end :] == after[stub.end :]
    assert ast.get_docstring(function.node) == ast.get_docstring(stub.node)
    assert ast.unparse(function.node.args) == ast.unparse(stub.node.args)
    assert [ast.unparse(d) for d in function.node.decorator_list] == [ast.unparse(d) for d in stub.node.decorator_list]


@pytest.mark.parametrize("name", NAMES)
def test_the_body_comes_back(name: str) -> None:
    restored = splice.graft(splice.blank(CORNERS, {name: "m1.1"}), name, CORNERS)
    assert parsed(restored) == parsed(CORNERS)
    if name not in ("oneliner", "one_line_with_docstring", "wrapped_line", "in_else", "D.g", "A.f"):
        assert restored == CORNERS


def test_all_at_once() -> None:
    blanked = splice.blank(CORNERS, {name: f"m1.{n}" for n, name in enumerate(NAMES)})
    stubs = [splice.stub_text(f"m1.{n}", name) for n, name in enumerate(NAMES)]
    assert all(stub in splice.find(blanked, name).body_at("") for stub, name in zip(stubs, NAMES, strict=True))
    for name in reversed(NAMES):
        blanked = splice.graft(blanked, name, CORNERS)
    assert parsed(blanked) == parsed(CORNERS)


def test_names() -> None:
    assert {"in_else", "conditional", "D.Inner.deep", "D.total"} <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))  # neither overloads nor setters


def test_stub_text() -> None:
    blanked = splice.blank(
        CORNERS, {"uses_helper": "m3.1", "D.total": "m3.2", "kernel": "m4.1", "D.Inner.deep": "m3.3"}
    )
    assert '    raise NotImplementedError("m3.1: uses_helper")\n' in blanked
    assert '        raise NotImplementedError("m3.2: D.total")\n' in blanked
    assert 'tl.static_assert(False, "m4.1: kernel")' in blanked
    assert "gives it away" not in blanked and "# of the class" in blanked


def test_a_body_moves_to_another_indentation() -> None:
    shallow = "def conditional(x): pass\n"
    moved = splice.graft(shallow, "conditional", CORNERS)
    spaces: dict[str, object] = {}
    exec(moved, spaces)
    assert spaces["conditional"](1) == "1\nflush left\n    indented"  # type: ignore[operator]
    assert splice.graft(CORNERS, "conditional", moved) == CORNERS


def test_what_cannot_be_found() -> None:
    with pytest.raises(LookupError, match="0 definitions of nothing"):
        splice.find(CORNERS, "nothing")
    with pytest.raises(LookupError, match="2 definitions of f"):
        splice.find("if a:\n    def f(): pass\nelse:\n    def f(): pass\n", "f")


def test_on_other_peoples_code() -> None:
    """Files whose authors never thought of us: this tool's own, one of the standard library, and the engine's smaller ones."""
    engine = sorted((Course.here().root / "folovllm").rglob("*.py"), key=lambda file: file.stat().st_size)
    sources = [inspect.getsource(module) for module in (splice, inspect.getmodule(Course), textwrap)]  # type: ignore[arg-type]
    for source in sources + [file.read_text() for file in engine[:30]]:
        for name in {name: 0 for name, _ in splice.functions(source)}:
            function = splice.find(source, name)
            again = splice.replace(source, name, function.head, function.body_at(function.indent + "    "))
            assert again == source or parsed(again) == parsed(source), name
            compile(splice.blank(source, {name: "m1.1"}), name, "exec")
