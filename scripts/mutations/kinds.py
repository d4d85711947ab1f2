"""The kinds of planted errors: for a node of a syntax tree, the expressions that may replace it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TypeVar

GROUP_NAMES = ("tp", "dp", "cp", "pp", "ep", "data", "model", "copies", "ends", "expert_copies")  # names of process groups

# fmt: off
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add:      ast.Sub,      ast.Sub:    ast.Add,
    ast.Mult:     ast.Div,      ast.Div:    ast.Mult,
    ast.FloorDiv: ast.Mult,     ast.Mod:    ast.FloorDiv,
    ast.Pow:      ast.Mult,     ast.BitXor: ast.BitOr,
    ast.LShift:   ast.RShift,   ast.RShift: ast.LShift,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt:    (ast.LtE, ast.GtE),      ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt:    (ast.GtE, ast.LtE),      ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq:    (ast.NotEq,),            ast.NotEq: (ast.Eq,),
    ast.Is:    (ast.IsNot,),            ast.IsNot: (ast.Is,),
    ast.In:    (ast.NotIn,),            ast.NotIn: (ast.In,),
}
REDUCTIONS = {
    "sum": "mean",       "mean": "sum",        "max": "min",      "min": "max",    "amax": "amin",   "amin": "amax",
    "any": "all",        "all": "any",         "prod": "sum",     "SUM": "MAX",    "MAX": "SUM",     "cumsum": "cumprod",
    "softmax": "log_softmax", "logsumexp": "amax", "topk": "sort", "maximum": "minimum", "minimum": "maximum",
}
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "all_to_all_single")
# Methods of tensors, and functions of torch, whose integer arguments are dims: which of their arguments, for a method.
DIMS: dict[str, tuple[int, ...]] = {
    "sum": (0,), "mean": (0,), "amax": (0,), "amin": (0,), "cumsum": (0,), "flatten": (0, 1), "transpose": (0, 1), "unsqueeze": (0,),
    "squeeze": (0,), "size": (0,), "unbind": (0,), "softmax": (0,), "gather": (0,), "scatter_": (0,), "narrow": (0,), "all": (0,),
    "any": (0,), "unflatten": (0,), "select": (0,), "argmax": (0,), "logsumexp": (0,), "index_add_": (0,), "index_add": (0,),
}
# fmt: on
PATHS = ("path", "folder", "name", "file")
AXES = ("dp", "cp", "pp", "ep", "tp")

Replacements = Iterator[ast.AST]
Parents = Sequence[ast.AST]  # of a node, the nearest first
Node = TypeVar("Node", bound=ast.AST)


def _replace_fields(node: Node, **fields: object) -> Node:
    """Return a copy of a node with other fields."""
    copied = copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def arithmetic(node: ast.AST, parents: Parents) -> Replacements:
    """Another operator."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS and not _is_text_or_list(node):
        yield _replace_fields(node, op=OPERATORS[type(node.op)]())


def comparison(node: ast.AST, parents: Parents) -> Replacements:
    """Another comparison, at the bound or the opposite."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                yield _replace_fields(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])


def constant(node: ast.AST, parents: Parents) -> Replacements:
    """Another number, or the opposite truth value."""
    if not isinstance(node, ast.Constant) or _is_dim(node, parents):
        return
    if isinstance(node.value, bool):
        yield _replace_fields(node, value=not node.value)
    elif isinstance(node.value, int):
        yield _replace_fields(node, value=node.value + 1)
        if node.value > 0:
            yield _replace_fields(node, value=node.value - 1)
    elif isinstance(node.value, float):
        yield _replace_fields(node, value=node.value * 1.25 if node.value else 1.0)


def reduction(node: ast.AST, parents: Parents) -> Replacements:
    """Another reduction, or a collective that is left out."""
    if isinstance(node, ast.Attribute) and node.attr in ("SUM", "MAX"):
        yield _replace_fields(node, attr=REDUCTIONS[node.attr])
    if not isinstance(node, ast.Call):
        return
    name = last_name(node.func)
    if name in COLLECTIVES:
        yield ast.Constant(None)
    elif name in REDUCTIONS and isinstance(node.func, ast.Attribute):
        yield _replace_fields(node, func=_replace_fields(node.func, attr=REDUCTIONS[name]))
    elif name in ("max", "min", "any", "all") and isinstance(node.func, ast.Name):
        yield _replace_fields(node, func=ast.Name(REDUCTIONS[name], ast.Load()))


def dim(node: ast.AST, parents: Parents) -> Replacements:
    """Another dim of a tensor."""
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        yield node.value
    if _integer(node) is not None and _is_dim(node, parents) and not isinstance(parents[0], ast.UnaryOp):
        yield from _other_dims(node)


def group(node: ast.AST, parents: Parents) -> Replacements:
    """Another group of ranks, or all ranks."""
    if isinstance(node, ast.Constant) and node.value in GROUP_NAMES and _names_a_group(parents[0]):
        place = GROUP_NAMES.index(str(node.value))
        yield from (_replace_fields(node, value=GROUP_NAMES[(place + by) % len(GROUP_NAMES)]) for by in (1, 5))
    if isinstance(node, ast.keyword) and node.arg == "group":
        yield _replace_fields(node, value=ast.Constant(None))


def sign(node: ast.AST, parents: Parents) -> Replacements:
    """The opposite sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _integer(node) is None:
        yield node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.MatMult) and not _is_text_or_list(node):
        yield ast.UnaryOp(ast.USub(), node)


def axis(node: ast.AST, parents: Parents) -> Replacements:
    """The degree of another axis of the mesh."""
    if isinstance(node, ast.Attribute) and node.attr in AXES and isinstance(node.ctx, ast.Load):
        yield _replace_fields(node, attr=AXES[(AXES.index(node.attr) + 1) % len(AXES)])


def term(node: ast.AST, parents: Parents) -> Replacements:
    """A sum, a product or a condition without one of its parts."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and not _is_text_or_list(node):
        yield node.left
        if isinstance(node.op, ast.Add | ast.Mult):
            yield node.right
    elif isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            yield rest[0] if len(rest) == 1 else _replace_fields(node, values=rest)


def rounding(node: ast.AST, parents: Parents) -> Replacements:
    """A quotient that is rounded down instead of up, or up instead of down."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ceil":  # of what is not negative
        yield _replace_fields(node, func=ast.Name("int", ast.Load()))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        if isinstance(node.left, ast.UnaryOp) and isinstance(node.left.op, ast.USub):  # -(-a // b): a / b rounded up
            yield _replace_fields(
                node,
                left=ast.UnaryOp(ast.USub(), ast.BinOp(ast.BinOp(node.left.operand, ast.FloorDiv(), node.right), ast.Mult(), node.right)),
            )
        else:
            yield ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))


Kind = Callable[[ast.AST, Parents], Replacements]

KINDS: dict[str, Kind] = {  # of errors in the mathematics of training
    "arithmetic": arithmetic,
    "comparison": comparison,
    "constant": constant,
    "reduction": reduction,
    "dim": dim,
    "group": group,
    "sign": sign,
}
PLAN_KINDS: dict[str, Kind] = {  # of errors in plans
    "arithmetic": arithmetic,
    "comparison": comparison,
    "constant": constant,
    "reduction": reduction,
    "axis": axis,
    "term": term,
    "rounding": rounding,
}


def last_name(node: ast.AST) -> str:
    """The last name of an attribute or a variable; "" of anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text_or_list(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether an operator joins or repeats texts, lists or paths."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    if any(last_name(side).strip("_") in PATHS for side in sides):
        return True
    held = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict)
    return any(isinstance(side, held) or (isinstance(side, ast.Constant) and isinstance(side.value, str)) for side in sides)


def _integer(node: ast.AST) -> int | None:
    """The value of an integer literal, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _integer(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _is_dim(node: ast.AST, parents: Parents) -> bool:
    """Whether a literal is the number of a dim: an index of a shape, an argument of a method that takes dims, `dim=`."""
    if isinstance(parents[0], ast.UnaryOp):
        node, parents = parents[0], parents[1:]
    parent = parents[0]
    if isinstance(parent, ast.Subscript):
        return parent.slice is node and last_name(parent.value) in ("shape", "size", "sizes", "length", "offset")
    if isinstance(parent, ast.keyword):
        return parent.arg in ("dim", "axis")
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr in DIMS:
        return any(place < len(parent.args) and parent.args[place] is node for place in DIMS[parent.func.attr])
    return False


def _names_a_group(parent: ast.AST) -> bool:
    """Whether a text in this node is the name of a group of ranks."""
    if isinstance(parent, ast.Call):
        return last_name(parent.func) in ("group", "size", "coordinate", "groups", "members", "_handle")
    return isinstance(parent, ast.Subscript) and last_name(parent.value) in ("groups", "coordinates", "degrees")


def _other_dims(node: ast.AST) -> Iterator[ast.expr]:
    value = _integer(node) or 0
    others = (-2, 0) if value == -1 else (1,) if value == 0 else (value - 1, value + 1)
    yield from (ast.parse(str(each), mode="eval").body for each in others)
