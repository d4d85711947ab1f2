"""`cluster=384x8` and `cluster=6x8x64`: a cluster's size, and its mesh, in one word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ...trainer.spec.problem import Problem

FORMS = "NODESxGPUS as 384x8, or DATAxTENSORxPIPELINE as 6x8x64"
DEGREES = ("dp", "tp", "pp")
LONGEST = 18  # digits of a number


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a shape sets, and its reading in words."""

    cluster: Mapping[str, int]
    parallel: Mapping[str, int]
    reading: str


def is_shape(value: object) -> bool:
    """Whether a value of `cluster=` is a shape rather than the name of an option."""
    return isinstance(value, str) and re.fullmatch(r"\d+([xX]\d+)+", value) is not None


def put(words: dict[str, Any], word: str, said: Mapping[str, Any]) -> list[Problem]:
    """Put a shape's cluster, mesh and reading into composed words; what is wrong with it."""
    read = shape(word, words.get("cluster"), said)
    if isinstance(read, Problem):
        return [read]
    words["cluster"].update(read.cluster)
    if isinstance(mesh := words.setdefault("parallel", {}), dict):
        mesh.update(read.parallel)
    words["reading"] = read.reading
    return []


def shape(word: str, cluster: Any, said: Mapping[str, Any]) -> Shape | Problem:
    """A shape read against the recipe's cluster; `said` holds what the user set beside it."""

    def problem(why: str, mend: str) -> Problem:
        return Problem(rule="cluster", says=f"cluster={word}{why}", mend=mend)

    written = re.split("[xX]", word)
    if max(map(len, written)) > LONGEST:
        return problem(f" has a number of more than {LONGEST} digits", f"write {FORMS}")
    numbers = tuple(map(int, written))
    if len(numbers) > 3:
        return problem(f" has {len(numbers)} numbers", f"write {FORMS}")
    if 0 in numbers:
        return problem(" has a 0", "every number is at least 1")
    if not isinstance(cluster, Mapping) or not isinstance(cluster.get("device"), Mapping):
        return problem(" sizes the recipe's cluster, but the recipe has none", "choose one beside it, such as cluster=dgx_a100")
    noun = "processes" if cluster["device"].get("kind") == "cpu" else "GPUs"
    read = _nodes(word, numbers, noun) if len(numbers) == 2 else _mesh(word, numbers, cluster.get("gpus"), said, noun, problem)
    if isinstance(read, Problem):
        return read
    for key, value in read.cluster.items():
        if said.get(f"cluster.{key}", value) != value:
            other = said[f"cluster.{key}"]
            return problem(f" means cluster.{key}={value}, and cluster.{key}={other} is said too", "leave one of them out")
    return read


def _nodes(word: str, numbers: tuple[int, ...], noun: str) -> Shape:
    nodes, gpus = numbers
    return Shape(
        cluster={"nodes": nodes, "gpus": gpus},
        parallel={},
        reading=f"cluster={word}: {_many(nodes, 'node')} x {gpus} {noun} = {nodes * gpus} {noun}",
    )


def _mesh(
    word: str, numbers: tuple[int, ...], gpus: object, said: Mapping[str, Any], noun: str, problem: Callable[[str, str], Problem]
) -> Shape | Problem:
    if not isinstance(gpus, int) or gpus < 1:
        return problem(" needs the number of GPUs in a node", "set cluster.gpus")
    world = prod(numbers)
    if world > gpus and world % gpus:
        data = _whole(numbers, gpus)
        mend = f"cluster={data}x{numbers[1]}x{numbers[2]} is {data * world // numbers[0]}"
        return problem(f" is {world} {noun}, not whole nodes of {gpus}", mend)
    nodes, each = (world // gpus, gpus) if world >= gpus else (1, world)
    degrees = dict(zip(DEGREES, numbers, strict=True))
    kept = {key: degree for key, degree in degrees.items() if f"parallel.{key}" not in said}
    return Shape(
        cluster={"nodes": nodes, **({"gpus": each} if each != gpus else {})},
        parallel=kept,
        reading=_reading(word, numbers, nodes, each, noun) + _theirs(said, kept),
    )


def _whole(numbers: tuple[int, ...], gpus: int) -> int:
    """The data degree nearest to the one said that fills whole nodes; every multiple of `gpus` does."""
    data, whole = numbers[0], gpus // gcd(gpus, numbers[1] * numbers[2])
    below = data // whole * whole
    return below if below and data - below < below + whole - data else below + whole


def _reading(word: str, numbers: tuple[int, ...], nodes: int, gpus: int, noun: str) -> str:
    data, tensor, pipeline = numbers
    a_stage = data * tensor
    spread = f", each stage on {_many(a_stage // gpus, 'node')}" if pipeline > 1 and a_stage % gpus == 0 else ""
    return (
        f"cluster={word}: data {data} x tensor {tensor} x pipeline {pipeline} = {a_stage * pipeline} {noun}, "
        f"{_many(nodes, 'node')} x {gpus}{spread}"
    )


def _theirs(said: Mapping[str, Any], kept: Mapping[str, int]) -> str:
    theirs = [f"parallel.{key}={said[f'parallel.{key}']}" for key in DEGREES if key not in kept]
    return f"; {', '.join(theirs)} as you set it" if theirs else ""


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
