"""The places where an error can be planted, each named by its function and the expression that is replaced; drawn by a seed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from .kinds import KINDS, last_name
from .mutated_files import TRAINING, FileList, files_to_mutate

LEAST_OF_A_KIND = 10


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted error: in a function of a module, number `occurrence` of an expression becomes its replacement."""

    kind: str
    module: str  # trainer.layers.norms
    function: str  # _RMSNorm.forward; "" for the module's own statements
    expression: str
    replacement: str
    occurrence: int = 1
    lines: tuple[int, int] = (0, 0)  # of the statement, today: not a part of its name

    @property
    def is_of_import(self) -> bool:
        """Whether its statement runs when its module is imported: a constant of the module or of a class."""
        return not self.function or self.function.rpartition(".")[2][:1].isupper()

    @property
    def name(self) -> str:
        """Its name, which moves with the code: module:function: expression => replacement."""
        number = f" (no. {self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.module}:{self.function or '(module)'}: {self.expression}{number} => {self.replacement}"

    @property
    def path(self) -> str:
        """Its file, from the checkout's root."""
        return f"{self.module.replace('.', '/')}.py"


@dataclass(frozen=True)
class _Node:
    """A node of a syntax tree: which field of its parent it is, and which number in it."""

    node: ast.AST
    field: str
    index: int | None
    parents: tuple[ast.AST, ...]  # the nearest first
    function: str

    def put(self, node: ast.AST) -> None:
        """Put a node in the place of this one."""
        if self.index is None:
            setattr(self.parents[0], self.field, node)
        else:
            getattr(self.parents[0], self.field)[self.index] = node

    @property
    def statement(self) -> ast.stmt:
        """The statement that it is in."""
        return next(each for each in (self.node, *self.parents) if isinstance(each, ast.stmt))

    @property
    def name_node(self) -> ast.AST:
        """The node that names its place: itself, or the expression around a literal or a name."""
        if not isinstance(self.node, ast.Constant | ast.Attribute | ast.keyword | ast.UnaryOp):
            return self.node
        around = (each for each in self.parents if not isinstance(each, ast.keyword | ast.UnaryOp | ast.Slice))
        found = next(around)
        return found if isinstance(found, ast.expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return) else self.node


def all_mutations(root: Path, files: FileList = TRAINING) -> list[Mutation]:
    """Every mutation of a checkout's files, in their order."""
    return [mutation for path in files_to_mutate(root, files) for mutation in _file_mutations(path, root, files)]


def _file_mutations(path: Path, root: Path, files: FileList) -> Iterator[Mutation]:
    module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    for mutation, _, _ in _places(ast.parse(path.read_text(encoding="utf-8")), module, files):
        yield mutation


def draw(mutations: Sequence[Mutation], seed: int, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Mutation]:
    """Draw `count` mutations by a seed, one of an expression at most, and at least LEAST_OF_A_KIND of each kind where there are."""
    random = Random(seed)
    by_kind = {kind: [each for each in mutations if each.kind == kind] for kind in kinds}
    least = min(LEAST_OF_A_KIND, count // len(kinds))
    drawn: dict[tuple[str, ...], Mutation] = {}
    for rows in by_kind.values():
        random.shuffle(rows)
    for kind, rows in by_kind.items():
        for each in rows:
            if sum(one.kind == kind for one in drawn.values()) < least:
                drawn.setdefault(_expression_key(each), each)
    rest = [each for rows in by_kind.values() for each in rows]
    random.shuffle(rest)
    for each in rest:
        if len(drawn) < count:
            drawn.setdefault(_expression_key(each), each)
    found = list(drawn.values())
    random.shuffle(found)
    return found


def mutated_source(root: Path, mutation: Mutation, files: FileList = TRAINING) -> str:
    """Return the source of a mutation's file with the error planted; raises LookupError where its expression is not there."""
    tree = ast.parse((root / mutation.path).read_text(encoding="utf-8"))
    for found, node, replacement in _places(tree, mutation.module, files):
        if found.name == mutation.name:
            node.put(replacement)
            return ast.unparse(ast.fix_missing_locations(tree))
    raise LookupError(f"nothing in {mutation.path} is {mutation.name}")


def _expression_key(mutation: Mutation) -> tuple[str, ...]:
    return mutation.module, mutation.function, mutation.expression, str(mutation.occurrence)


def _places(tree: ast.Module, module: str, files: FileList) -> Iterator[tuple[Mutation, _Node, ast.AST]]:
    """Every mutation of a module, the node that it replaces, and by what."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for node in _computing_nodes(tree):
        if set(node.function.split(".")) & set(files.functions_left_out):
            continue
        for kind, replacements in files.kinds.items():
            for replacement in replacements(node.node, node.parents):
                expression = _text(node.name_node)
                other = _text_with(node, replacement)
                seen[node.function, expression, other] += 1
                mutation = Mutation(
                    kind=kind,
                    module=module,
                    function=node.function,
                    expression=expression,
                    replacement=other,
                    occurrence=seen[node.function, expression, other],
                    lines=_header_lines(node.statement),
                )
                yield mutation, node, replacement


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _text_with(node: _Node, replacement: ast.AST) -> str:
    """The text of the expression that names a node, with the replacement in the node's place."""
    if node.name_node is node.node:
        return _text(ast.fix_missing_locations(replacement))
    node.put(ast.fix_missing_locations(replacement))
    text = _text(node.name_node)
    node.put(node.node)
    return text


def _computing_nodes(tree: ast.Module) -> Iterator[_Node]:
    """Every node that computes: no annotations, texts, messages or decorators."""

    def walk(node: ast.AST, parents: tuple[ast.AST, ...], function: tuple[str, ...]) -> Iterator[_Node]:
        for field, value in list(ast.iter_fields(node)):
            children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, child in children:
                if not isinstance(child, ast.AST) or _is_left_out(field, child):
                    continue
                is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
                around = (node, *parents)
                if not is_scope and any(isinstance(each, ast.stmt) for each in (child, *around)):
                    yield _Node(child, field, index, around, ".".join(function))
                yield from walk(child, around, (*function, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else function)

    yield from walk(tree, (), ())


def _is_left_out(field: str, node: ast.AST) -> bool:
    if field in ("annotation", "returns", "decorator_list", "bases", "defaults", "kw_defaults"):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check
        return True
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Subscript) and last_name(node.value) in ("Literal", "Annotated", "Callable"):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _header_lines(statement: ast.stmt) -> tuple[int, int]:
    """The first and last line of a statement, without the statements inside it."""
    body = getattr(statement, "body", None)
    return statement.lineno, (body[0].lineno - 1 if body else statement.end_lineno or statement.lineno)
