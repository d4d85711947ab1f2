"""Bad files for the tests: bad YAML files, and run folders with damaged files."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as some
from msgspec import json as encoder

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.plan import make_plan

Make = Callable[[Path], object]


def text(words: str) -> Make:
    return lambda path: path.write_text(words, encoding="utf-8")


def content(raw: bytes) -> Make:
    return lambda path: path.write_bytes(raw)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket has a small limit
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + at)}: &{chr(98 + at)} [{', '.join(['*' + chr(97 + at)] * 9)}]\n" for at in range(9)
)
LAUGHING_MAPS = "a: &a {x: 1}\n" + "".join(f"k{at}: &{chr(98 + at)} {{p: *{chr(97 + at)}, q: *{chr(97 + at)}}}\n" for at in range(20))
RECIPE = "defaults: [quickstart]\n"

# Bad files in the place of a YAML file, by name.
# fmt: off
FILES: dict[str, Make] = {
    "folder":        lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop of links": lambda path: path.symlink_to(path.name),
    "device":        lambda path: path.symlink_to("/dev/zero"),
    "fifo":          fifo,
    "socket":        bind_socket,
    "nothing":       text(""),
    "null":          text("~\n"),
    "scalar":        text("hello\n"),
    "number":        text("5\n"),
    "list":          text("- a\n"),
    "latin-1":       content(b"name: \xe9\n"),
    "utf-16":        content(RECIPE.encode("utf-16")),
    "bom":           content(RECIPE.encode("utf-8-sig")),
    "binary":        content(bytes(range(256)) * 4),
    "nul":           content(b"name: a\0b\n"),
    "laughs":        text(LAUGHS),
    "laughing maps": text(LAUGHING_MAPS),
    "itself":        text("a: &a [*a]\n"),
    "deep":          text("a: " + "[" * 600 + "]" * 600),
    "unclosed":      text("a: " + "[" * 400),
    "twice":         text("a: 1\na: 2\n"),
    "tab":           text("a:\n\tb: 1\n"),
    "code":          text("a: !!python/object/apply:os.system ['touch pwned']\n"),
    "timestamp":     text("name: !!timestamp 2001-01-01\n"),
    "set":           text("a: !!set {x, y}\n"),
    "bytes":         text("name: !!binary aGk=\n"),
    "documents":     text("a: 1\n---\nb: 2\n"),
    "odd keys":      text("1: 2\n2.5: x\nnull: 3\ntrue: 4\n"),
    "list as key":   text("? [a, b]\n: 1\n"),
    "bad merge":     text("<<: 5\n"),
    "long":          text("# x\n" * 100_000),
    "digits":        text(RECIPE + "train: {steps: " + "9" * 5000 + "}\n"),
    "long name":     text(RECIPE + "name: " + "a" * 100_000),
    "interpolation": text(RECIPE + "name: ${nothing.here}\n"),
    "of itself":     text(RECIPE + "name: ${name}\n"),
    "unclosed ${":   text(RECIPE + "name: '${'\n"),
    "each other":    text(RECIPE + "model: ${train}\ntrain: ${model}\n"),
    "missing":       text(RECIPE + "name: ???\n"),
    "self twice":    text("defaults: [_self_, _self_]\n"),
    "a path":        text("defaults: ['/etc/passwd', model: ../../../../etc/passwd]\n"),
    "no default":    text("defaults: [5]\n"),
    "many defaults": text("defaults: [{a: b, c: d}, {}, {model: [tiny, nano]}]\n"),
    "package":       text("# @package foo.bar\nfamily: gpt\n"),
    "hydra":         text("hydra: {run: {dir: x}}\n"),
    "types":         text(RECIPE + "model: 5\ntrain: [1]\noptim: null\nparallel: true\nlog: {sinks: {a: b}}\n"),
    "lists":         text(RECIPE + "cluster: {device: [1], gpus: {a: 1}}\n"),
    "numbers":       text(RECIPE + "optim: {lr: .inf, eps: .nan}\ntrain: {batch: 1e400, clip: -.inf, seq: 0o17, microbatch: 0x10}\n"),
    "keys":          text(RECIPE + "'': 5\n' ': 6\n'a.b': 7\n'é': 2\n\"\\e[31m\": 3\n"),
}
# fmt: on


def run_folder(folder: Path) -> Path:
    """Write a run folder as `distrain fit` leaves it, without tensors."""
    run = load_recipe("tiny_2x2x2", [f"log.dir={folder.parent}", f"name={folder.name}", "checkpoint=default"])
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "tokens": step * 1024, "seconds": 0.1,
         "tokens_per_second": 1e4, "mfu": 0.1, "memory_peak": 1 << 20, "seconds_data": 0.0, "seconds_forward": 0.03,
         "seconds_backward": 0.06, "seconds_step": 0.01, "seconds_without_core": 0.02}
        for step in range(1, 7)
    ]  # fmt: skip
    rows += [{"step": 6, "validation_loss": 4.5}, {"restart": 1, "step": 3, "lost_steps": 2, "says": "x", "hosts": "on a: spare a for b"}]
    rows += [{"step": 6, "save_seconds": 0.5, "save_bytes": 1 << 20, "save_pause": 0.2, "save_interval": 3.0}, {"goodput": 0.9}]
    (folder / "ranks").mkdir(parents=True)
    (folder / "ranks" / "0.log").write_text("== rank 0 of 1\n")
    (folder / "checkpoints" / "step_6").mkdir(parents=True)
    (folder / "checkpoints" / "step_6" / "manifest.json").write_text("{}")
    (folder / "run.json").write_bytes(encoder.encode(run))
    (folder / "plan.json").write_bytes(encoder.encode(make_plan(run)))
    (folder / "measured.json").write_text(json.dumps({"step": 2, "unigram_entropy": 3.1, "memory": {"weights": 1 << 20}}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


values = some.sampled_from(
    [None, True, -1, 0, 10**18, 10**40, 1.5, -2.5, 1e300, float("nan"), float("inf"), "", "x", "\x1b[31m", [], {}, [1], {"a": 1}]
)


@some.composite
def damaged_json(draw: some.DrawFn, found: object) -> object:
    """JSON in which one value, or a part, is replaced or missing."""
    if draw(some.booleans()) and isinstance(found, dict) and found:
        key = draw(some.sampled_from(sorted(found)))
        rest = {name: value for name, value in found.items() if name != key}
        return rest if draw(some.integers(0, 5)) == 0 else {**rest, key: draw(damaged_json(found[key]))}
    if isinstance(found, list) and found:
        at = draw(some.integers(0, len(found) - 1))
        return [*found[:at], draw(damaged_json(found[at])), *found[at + 1 :]]
    return draw(values)


RAW: dict[str, Callable[[bytes], bytes]] = {
    "cut":     lambda raw: raw[: len(raw) // 2],
    "empty":   lambda raw: b"",
    "binary":  lambda raw: bytes(range(256)),
    "flipped": lambda raw: bytes([raw[0] ^ 64]) + raw[1:] if raw else b"\xff",
    "deep":    lambda raw: b"[" * 100_000,
    "twice":   lambda raw: raw + raw,
    "nul":     lambda raw: raw.replace(b"1", b"\0"),
    "utf-16":  lambda raw: raw.decode(errors="replace").encode("utf-16"),
    "number":  lambda raw: b"5",
    "digits":  lambda raw: b"9" * 5000,
}  # fmt: skip
