"""Keys that a run sets away from their defaults and that nothing reads under its other values, one row a key.

A key is in `IDLE` with when it does nothing, or in `READ`: it always does something, or describes hardware that may lie idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from ..spec.problem import Problem
from ..spec.read import shown
from ..spec.run import Run
from .mesh import Mesh

RULE = "idle"
Because = Callable[[Run, Mesh], str]  # OTHER=VALUE, under which a key does nothing; "" where it does something


def _is(key: str, *values: object) -> Because:
    """That another key has one of these values."""

    def because(run: Run, mesh: Mesh) -> str:
        value = _value(run, key)
        return f"{key}={shown(value)}" if value in values else ""

    return because


def _is_not(key: str, *values: object) -> Because:
    """That another key has none of these values."""

    def because(run: Run, mesh: Mesh) -> str:
        value = _value(run, key)
        return "" if value in values else f"{key}={shown(value)}"

    return because


def _any(*several: Because) -> Because:
    """The first of several."""
    return lambda run, mesh: next((why for because in several if (why := because(run, mesh))), "")


def _one_data_rank(run: Run, mesh: Mesh) -> str:
    return "one data-parallel rank" if mesh.dp * mesh.cp == 1 else ""


def _expert_ffn(run: Run, mesh: Mesh) -> str:
    model = run.model
    own = model.family == "moe" and model.expert_ffn not in (None, model.ffn)
    return f"model.expert_ffn={model.expert_ffn} of every layer" if own else ""


def _no_such_step(run: Run, mesh: Mesh) -> str:
    """That a run ends before its profiler's window."""
    steps, window = run.train.steps, run.log.profile
    return f"train.steps={steps}" if steps and window and window[0] > steps else ""


# fmt: off
IDLE: dict[str, Because] = {
    "model.context":           lambda run, mesh: "" if run.model.family == "hf" else _is_not("model.positions", "learned")(run, mesh),
    "model.ffn":               _expert_ffn,
    "model.rope_base":         _is_not("model.positions", "rope"),
    "model.top_k":             _is_not("model.family", "moe"),
    "model.expert_ffn":        _is_not("model.family", "moe"),
    "model.shared_experts":    _is_not("model.family", "moe"),
    "model.aux_loss":          _is_not("model.family", "moe"),
    "model.capacity":          _is_not("model.family", "moe"),
    "model.weights":           _is("checkpoint.resume", "must"),
    "parallel.shard":          _is("parallel.zero", 0),
    "parallel.schedule":       _is("parallel.pp", 1),
    "parallel.chunks":         _is("parallel.pp", 1),
    "parallel.sequence":       _is("parallel.tp", 1),
    "parallel.reduce":         _one_data_rank,
    "parallel.bucket":         lambda run, mesh: _one_data_rank(run, mesh) if run.parallel.zero == 0 else "",
    "parallel.scatter":        _any(_is("parallel.pp", 1), _is("parallel.tp", 1), _is("parallel.sequence", True)),
    "parallel.overlap.data":   _one_data_rank,
    "parallel.overlap.tensor": _is("parallel.tp", 1),
    "parallel.overlap.pipeline": _is("parallel.pp", 1),
    "parallel.overlap.context": _is("parallel.cp", 1),
    "train.evaluate.batches":  _is("train.evaluate.every", 0),
    "optim.betas":             _is_not("optim.name", "adamw"),
    "optim.eps":               _is_not("optim.name", "adamw"),
    "optim.momentum":          _is_not("optim.name", "sgd"),
    "optim.min_lr":            _is("optim.schedule", "constant"),
    "data.path":               _is("data.name", "stdlib", "synthetic"),
    "data.weights":            _any(_is("data.name", "stdlib", "synthetic"), _is("data.path", None)),
    "data.tokenizer":          _is("data.name", "synthetic"),
    "data.end":                _is("data.name", "synthetic"),
    "data.text_key":           _is_not("data.name", "text"),
    "data.cache":              _is("data.name", "synthetic"),
    "log.profile":             _no_such_step,
    "launch.hostfile":         _is("launch.name", "local", "slurm"),
    "launch.include":          _is("launch.name", "local", "slurm"),
    "launch.exclude":          _is("launch.name", "local", "slurm"),
    "launch.address":          _is("launch.name", "local", "slurm"),
    "launch.runner":           _is_not("launch.name", "deepspeed"),
    "launch.port":             _is("launch.name", "local"),
    "launch.environment":      _is_not("launch.name", "deepspeed"),
    "launch.restarts":         _is("launch.name", "torchrun", "slurm"),
    "launch.patience":         _is("launch.name", "torchrun", "slurm"),
    "launch.preflight":        _is_not("launch.name", "deepspeed"),
}
READ: dict[str, tuple[str, ...]] = {  # by section
    "model":           ("family", "layers", "hidden", "heads", "vocab", "kv_heads", "head_dim", "vocab_multiple", "tied", "bias",
                        "qkv_bias", "norm", "norm_eps", "act", "positions", "dropout", "hf", "parameters", "experts"),
    "cluster":         ("nodes", "gpus", "storage", "mtbf"),
    "cluster.device":  ("name", "memory", "bandwidth", "peak", "kind", "units", "sustained", "flash", "streaming", "launch", "dispatch",
                        "context"),
    "cluster.inside":  ("bandwidth", "latency", "efficiency"),
    "cluster.between": ("bandwidth", "latency", "efficiency"),
    "parallel":        ("dp", "tp", "pp", "cp", "ep", "zero", "recompute"),
    "parallel.offload": ("optimizer", "parameters"),
    "train":           ("batch", "seq", "microbatch", "steps", "tokens", "precision", "gradients", "attention", "flops", "compile", "seed",
                        "clip", "skip"),
    "train.evaluate":  ("every",),
    "optim":           ("name", "lr", "weight_decay", "schedule", "warmup", "gradient_copy"),
    "data":            ("name", "documents", "validation"),
    "log":             ("every", "sinks", "dir", "ledger"),
    "checkpoint":      ("every", "keep", "resume", "accept"),  # the ends of runs that go on are saves, of which some are kept
    "launch":          ("name",),
    "":                ("name", "engine", "reading"),
}
# fmt: on


def idle(run: Run, mesh: Mesh) -> Iterator[Problem]:
    """Every key that was set and does nothing."""
    for key, because in IDLE.items():
        value = _value(run, key)
        if value != default(key) and (other := because(run, mesh)):
            yield Problem(rule=RULE, says=f"{key}={shown(value)} does nothing with {other}")
    if "jsonl" not in run.log.sinks:
        yield Problem(rule=RULE, says=f"log.sinks={shown(run.log.sinks)} leaves out jsonl, which is written all the same")


def default(key: str) -> Any:
    """The value that a key has where nothing is said; None where something has to be said."""
    return defaults()[key]


@cache
def defaults(of: Any = Run, at: str = "") -> dict[str, Any]:
    """The defaults of all keys below a section."""
    hints, found = get_type_hints(of), dict[str, Any]()
    for row in fields(of):
        section: Any = next((kind for kind in (hints[row.name], *get_args(hints[row.name])) if is_dataclass(kind)), None)
        found |= defaults(section, f"{at}{row.name}.") if section else {f"{at}{row.name}": None if row.default is MISSING else row.default}
    return found


def _value(run: Run, key: str) -> Any:
    value: Any = run
    for name in key.split("."):
        value = getattr(value, name)
    return value
