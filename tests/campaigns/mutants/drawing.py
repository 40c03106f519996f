"""Mutants: small changes at random places of the package, each of which a test should notice."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Mutant:
    """A piece of a source file, and what stands in its place.

    Args:
        file: in the package.
        line: of the piece, from 1.
        start, end: of the piece, in characters.
    """

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{self.before}` -> `{self.after}`"

    def applied(self, source: str) -> str:
        assert source[self.start : self.end] == self.before
        return source[: self.start] + self.after + source[self.end :]


def draw(package: Path, count: int, seed: int) -> list[Mutant]:
    """``count`` of all mutants of the package, the same ones for the same seed and sources."""
    files = sorted(path for path in package.rglob("*.py") if path.name != "_hits.py")
    every = [mutant for path in files for mutant in mutants_of(path, package)]
    return random.Random(seed).sample(every, count)


def mutants_of(path: Path, package: Path) -> Iterator[Mutant]:
    """All mutants of a file, in its order."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node, changed in _changes(ast.parse(source)):
        start = place(node.lineno, node.col_offset)
        end = place(node.end_lineno, node.end_col_offset)
        text = ast.unparse(changed)
        after = text if isinstance(changed, ast.stmt) else f"({text})"
        file = str(path.relative_to(package))
        yield Mutant(file, node.lineno, start, end, source[start:end], after)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Nodes, and what to put in their places."""
    for node in _running(tree):
        changed = copy.deepcopy(node)
        match changed:
            case ast.Compare(ops=[op]):
                changed.ops = [_COMPARISONS[type(op)]()]
            case ast.BoolOp(op=op):
                changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                changed = operand
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                changed.op = _OPERATORS[type(op)]()
            case ast.Constant(value=bool() as value):
                changed.value = not value
            case ast.Constant(value=int() | float() as value):
                changed.value = value + 1 if isinstance(value, int) else 2 * value + 1
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                changed = ast.Pass()
            case ast.Return(value=ast.expr() as value) if not _is_constant(value):
                changed = ast.Return(ast.Constant(None))
            case ast.Break():
                changed = ast.Continue()
            case ast.Continue():
                changed = ast.Break()
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
                node, changed = test, ast.UnaryOp(ast.Not(), test)
            case _:
                continue
        yield node, changed  # type: ignore[misc]


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that do something: no annotations, no texts, nothing for type checkers."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _running(child)
