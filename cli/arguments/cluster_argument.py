"""`cluster=384x8` and `cluster=6x8x64`: the size of a cluster, and its mesh, in one argument."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ...trainer.spec.problem import Problem

SHAPE_FORMS = "NODESxGPUS as 384x8, or DATAxTENSORxPIPELINE as 6x8x64"
SHAPE_DEGREES = ("dp", "tp", "pp")
MOST_DIGITS = 18  # of one number


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The keys of `cluster` and `parallel` that a size sets, and a sentence on how it was read."""

    cluster: Mapping[str, int]
    parallel: Mapping[str, int]
    reading: str


def is_shape(value: object) -> bool:
    """Return whether a value of `cluster=` is a size and not the name of an option."""
    return isinstance(value, str) and re.fullmatch(r"\d+([xX]\d+)+", value) is not None


def apply_shape(config: dict[str, Any], size: str, user_values: Mapping[str, Any]) -> list[Problem]:
    """Set the cluster, mesh and `reading` of a composed config from a size; return the problems."""
    shape = read_shape(size, config.get("cluster"), user_values)
    if isinstance(shape, Problem):
        return [shape]
    config["cluster"].update(shape.cluster)
    if isinstance(mesh := config.setdefault("parallel", {}), dict):
        mesh.update(shape.parallel)
    config["reading"] = join_readings(config.get("reading"), shape.reading)
    return []


def join_readings(*readings: str | None) -> str:
    """Return the sentences on how arguments were read as one text."""
    return ". ".join(each for each in readings if each)


def read_shape(size: str, cluster: Any, user_values: Mapping[str, Any]) -> Shape | Problem:
    """Read a size for the recipe's `cluster`; keys in `user_values`, which the user set on the command line, keep their values."""

    def problem(why: str, mend: str) -> Problem:
        return Problem(rule="cluster", says=f"cluster={size} {why}", mend=mend)

    digits = re.split("[xX]", size)
    if max(map(len, digits)) > MOST_DIGITS:
        return problem(f"has a number of more than {MOST_DIGITS} digits", f"write {SHAPE_FORMS}")
    numbers = tuple(map(int, digits))
    if len(numbers) > 3:
        return problem(f"has {len(numbers)} numbers", f"write {SHAPE_FORMS}")
    if 0 in numbers:
        return problem("has a 0", "every number is at least 1")
    if not isinstance(cluster, Mapping) or not isinstance(cluster.get("device"), Mapping):
        return problem("sizes the recipe's cluster, but the recipe has none", "add one, such as cluster=dgx_a100")
    noun = "processes" if cluster["device"].get("kind") == "cpu" else "GPUs"
    if len(numbers) == 2:
        shape: Shape | Problem = _nodes_shape(size, numbers, noun)
    else:
        shape = _mesh_shape(size, numbers, cluster.get("gpus"), user_values, noun, problem)
    if isinstance(shape, Problem):
        return shape
    for key, value in shape.cluster.items():
        other = user_values.get(f"cluster.{key}", value)
        if other != value:
            return problem(f"means cluster.{key}={value}, but cluster.{key}={other} is set too", "remove one of them")
    return shape


def _nodes_shape(size: str, numbers: tuple[int, ...], noun: str) -> Shape:
    """Return the shape of NODESxGPUS."""
    nodes, gpus = numbers
    return Shape(
        cluster={"nodes": nodes, "gpus": gpus},
        parallel={},
        reading=f"cluster={size}: {_count(nodes, 'node')} x {gpus} {noun} = {nodes * gpus} {noun}",
    )


def _mesh_shape(
    size: str, numbers: tuple[int, ...], gpus: object, user_values: Mapping[str, Any], noun: str, problem: Callable[[str, str], Problem]
) -> Shape | Problem:
    """Return the shape of DATAxTENSORxPIPELINE on nodes of `gpus`."""
    if not isinstance(gpus, int) or gpus < 1:
        return problem("needs the number of GPUs in a node", "set cluster.gpus")
    world = prod(numbers)
    if world > gpus and world % gpus:
        data = _nearest_valid_data(numbers, gpus)
        mend = f"cluster={data}x{numbers[1]}x{numbers[2]} is {data * world // numbers[0]}"
        return problem(f"is {world} {noun}, not a multiple of the {gpus} in a node", mend)
    nodes, per_node = (world // gpus, gpus) if world >= gpus else (1, world)
    degrees = dict(zip(SHAPE_DEGREES, numbers, strict=True))
    parallel = {key: degree for key, degree in degrees.items() if f"parallel.{key}" not in user_values}
    return Shape(
        cluster={"nodes": nodes, **({"gpus": per_node} if per_node != gpus else {})},
        parallel=parallel,
        reading=_reading_text(size, numbers, nodes, per_node, noun) + _user_degrees(user_values, parallel),
    )


def _nearest_valid_data(numbers: tuple[int, ...], gpus: int) -> int:
    """Return the nearest data degree whose ranks fill whole nodes of `gpus`."""
    data, step = numbers[0], gpus // gcd(gpus, numbers[1] * numbers[2])
    below = data // step * step
    return below if below and data - below < below + step - data else below + step


def _reading_text(size: str, numbers: tuple[int, ...], nodes: int, gpus: int, noun: str) -> str:
    data, tensor, pipeline = numbers
    per_stage = data * tensor
    stages = f", each stage on {_count(per_stage // gpus, 'node')}" if pipeline > 1 and per_stage % gpus == 0 else ""
    return (
        f"cluster={size}: data {data} x tensor {tensor} x pipeline {pipeline} = {per_stage * pipeline} {noun}, "
        f"{_count(nodes, 'node')} x {gpus}{stages}"
    )


def _user_degrees(user_values: Mapping[str, Any], parallel: Mapping[str, int]) -> str:
    """Return a note on the degrees that the user set beside the size, which does not change them."""
    degrees = [f"parallel.{key}={user_values[f'parallel.{key}']}" for key in SHAPE_DEGREES if key not in parallel]
    return f"; {', '.join(degrees)} as you set it" if degrees else ""


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
