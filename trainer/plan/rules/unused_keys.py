"""Keys that a run sets and that have no effect with its other values, one row a key.

A key is in `IDLE`, with the condition under which it has no effect, or in `READ`: it always has one, or describes hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import chain
from typing import Any, get_args, get_type_hints

from ...models.families import has_experts, is_made_by_transformers
from ...models.hybrid.ops import LINEAR
from ...models.mla.ops import LATENT
from ...spec.problem import Problem
from ...spec.read import value_text
from ...spec.run import Run
from ...spec.sections.rope import ROPE_KEYS
from ..axes import AXES
from ..costs.precision import has_moments
from ..engines import PAPERS_NAME, cost_model, engine_for
from ..layout.gradient_routes import inner_ranks
from ..layout.mesh import Mesh
from ..layout.workers import worker_count

RULE = "idle"
Condition = Callable[[Run, Mesh], str]  # the condition as OTHER=VALUE under which a key has no effect; "" where it has one


def _is(key: str, *values: object) -> Condition:
    """Return the condition that another key has one of these values."""

    def condition(run: Run, mesh: Mesh) -> str:
        value = _value(run, key)
        return f"{key}={value_text(value)}" if value in values else ""

    return condition


def _is_not(key: str, *values: object) -> Condition:
    """Return the condition that another key has none of these values."""

    def condition(run: Run, mesh: Mesh) -> str:
        value = _value(run, key)
        return "" if value in values else f"{key}={value_text(value)}"

    return condition


def _any(*several: Condition) -> Condition:
    """Return the condition that any of several holds."""
    return lambda run, mesh: next((why for condition in several if (why := condition(run, mesh))), "")


def _never_replaced(run: Run, mesh: Mesh) -> str:
    """No host is asked before the first start, and there is no other start."""
    return "launch.restarts=0 and launch.preflight=false" if not run.launch.restarts and not run.launch.preflight else ""


def _one_data_rank(run: Run, mesh: Mesh) -> str:
    return "one data-parallel rank" if mesh.dp * mesh.cp == 1 else ""


def _waits(run: Run, mesh: Mesh) -> str:
    """An engine trains the run whose layers wait for their messages."""
    row, limits = engine_for(run, run.parallel)
    return f"engine {row.name}, which waits for them" if row and not limits and not cost_model(row.name).hides_messages else ""


def _one_level(run: Run, mesh: Mesh) -> str:
    """Sums that would have two levels have one."""
    if run.parallel.reduce != "hierarchical" or run.parallel.zero or inner_ranks(run.parallel, mesh, run.cluster.gpus) > 1:
        return ""
    return "all data-parallel ranks in one node, or one in each"


def _one_worker(run: Run, mesh: Mesh) -> str:
    """Nobody steps alone."""
    if run.parallel.sync.every == 1:
        return "parallel.sync.every=1"
    return "one worker" if worker_count(run.parallel, mesh, run.cluster.gpus) == 1 else ""


def _no_position_table(run: Run, mesh: Mesh) -> str:
    return "" if is_made_by_transformers(run.model) else _is_not("model.positions", "learned")(run, mesh)


def _begun(run: Run, mesh: Mesh) -> str:
    """A run that only resumes does not read what it began with, unless preferences are relative to that."""
    return "" if run.data.has_preferences and run.train.preference.has_reference else _is("checkpoint.resume", "must")(run, mesh)


def _made_by_transformers(run: Run, mesh: Mesh) -> str:
    return f"model.family={run.model.family}" if is_made_by_transformers(run.model) else ""


def _rope_key(key: str) -> Condition:
    """Return the condition that the run's kind of rope does not read a key of model.rope."""
    reading = (kind for kind, keys in ROPE_KEYS.items() if key in keys)
    return _any(_is_not("model.positions", "rope"), _is_not("model.rope.type", *reading))


def _no_experts(run: Run, mesh: Mesh) -> str:
    routes = has_experts(run.model) or (run.model.experts and is_made_by_transformers(run.model))
    return "" if routes else f"model.family={run.model.family}"


def _no_router(run: Run, mesh: Mesh) -> str:
    return "" if has_experts(run.model) else f"model.family={run.model.family}"


def _expert_ffn(run: Run, mesh: Mesh) -> str:
    model = run.model
    own = has_experts(model) and model.expert_ffn not in (None, model.ffn) and not model.dense_layers
    return f"model.expert_ffn={model.expert_ffn} of every layer" if own else ""


def _one_base(run: Run, mesh: Mesh) -> str:
    model = run.model
    is_one = model.rope_local_base == model.rope_base and not model.has_local_rope
    return f"model.rope_base={model.rope_base:g} of all layers" if is_one else ""


def _ends_before(window: Callable[[Run], tuple[int, int] | None]) -> Condition:
    """Return the condition that the run ends before the first step of a window."""

    def ends_before(run: Run, mesh: Mesh) -> str:
        steps, found = run.train.steps, window(run)
        return f"train.steps={steps}" if steps and found and found[0] > steps else ""

    return ends_before


# fmt: off
IDLE: dict[str, Condition] = {
    "model.context":           _no_position_table,
    "model.ffn":               _expert_ffn,
    "model.window":            _made_by_transformers,
    "model.layer_types":       _any(_made_by_transformers, _is("model.window", None)),
    "model.sinks":             _made_by_transformers,
    "model.expert_bias":       _no_experts,
    "model.qk_norm_over":      _is("model.qk_norm", False),
    "model.norm_place":        _any(_made_by_transformers, _is("model.family", "bert")),
    "model.rope_base":         _is_not("model.positions", "rope"),
    "model.scale_embedding":   _any(_made_by_transformers, _is("model.family", "bert")),
    "model.query_pre_attn_scalar": _made_by_transformers,
    "model.rope_local_base":   _any(_is_not("model.positions", "rope"), _is("model.window", None), _one_base),
    "model.rope_share":        _any(_is_not("model.positions", "rope"), _is("model.family", "mla")),
    "model.rope.type":         _is_not("model.positions", "rope"),
    **{f"model.rope.{key}": _rope_key(key) for key in sorted(set(chain(*ROPE_KEYS.values())))},
    **{f"model.{key}": _is_not("model.family", "mla") for key in LATENT},
    **{f"model.{key}": _is_not("model.family", "hybrid") for key in LINEAR},
    "model.head_dim":          _is("model.family", "mla"),
    "model.init.std":          _made_by_transformers,
    "model.init.scale_residual": _made_by_transformers,
    "model.lora.alpha":        _is("model.lora.rank", 0),
    "model.lora.dropout":      _is("model.lora.rank", 0),
    "model.lora.targets":      _is("model.lora.rank", 0),
    "model.lora.weights":      _any(_is("model.lora.rank", 0), _begun),
    "model.mtp.weight":        _is("model.mtp.layers", 0),
    "model.top_k":             _no_experts,
    **{f"model.router.{key}": _no_router for key in ("score", "normalize", "scale", "groups", "bias", "z_loss")},
    "model.router.bias_rate":  _any(_no_router, _is("model.router.bias", False)),
    "model.router.top_groups": _any(_no_router, _is("model.router.groups", 1)),
    "model.expert_ffn":        _no_experts,
    "model.shared_experts":    _no_experts,
    "model.aux_loss":          _no_experts,
    "model.capacity":          _no_experts,
    "model.weights":           lambda run, mesh: "" if run.model.lora.rank else _begun(run, mesh),
    "checkpoint.background":   _is("checkpoint.every", 0),
    "parallel.shard":          _is("parallel.zero", 0),
    "parallel.gather":         _is_not("parallel.zero", 3),
    "parallel.schedule":       _is("parallel.pp", 1),
    "parallel.chunks":         _is("parallel.pp", 1),
    "parallel.stages":         _is("parallel.pp", 1),
    "parallel.vertical":       _any(_is("parallel.pp", 1), _is_not("parallel.schedule", "pipedream")),
    "parallel.sequence":       _is("parallel.tp", 1),
    "parallel.reduce":         _any(_one_data_rank, _one_level),
    "parallel.servers":        _any(_is_not("parallel.reduce", "server"), _one_data_rank),
    "parallel.staleness":      _one_data_rank,
    "parallel.sync.every":     _one_worker,
    "parallel.sync.across":    _is("parallel.sync.every", 1),
    "parallel.sync.outer.lr":  _one_worker,
    "parallel.sync.outer.momentum": _one_worker,
    "parallel.sync.outer.nesterov": _any(_one_worker, _is("parallel.sync.outer.momentum", 0.0)),
    "parallel.bucket":         lambda run, mesh: _one_data_rank(run, mesh) if run.parallel.zero == 0 else "",
    "parallel.compress.name":  _any(_one_data_rank, _is("engine", PAPERS_NAME)),
    "parallel.compress.rank":  _any(_is("parallel.compress.name", "none"), _one_data_rank, _is("engine", PAPERS_NAME)),
    "parallel.compress.start": _any(_is("parallel.compress.name", "none"), _one_data_rank, _is("engine", PAPERS_NAME)),
    "parallel.scatter":        _any(_is("parallel.pp", 1), _is("parallel.tp", 1), _is("parallel.sequence", True)),
    "parallel.overlap.data":   _one_data_rank,
    "parallel.overlap.tensor": _any(_is("parallel.tp", 1), _waits),
    "parallel.overlap.pipeline": _is("parallel.pp", 1),
    "parallel.overlap.context": _any(_is("parallel.cp", 1), _is("parallel.cp_comm", "all_to_all"), _waits),
    "parallel.cp_comm":        _is("parallel.cp", 1),
    "parallel.ep_load":        _is("parallel.ep", 1),
    "train.linear_attention":  _any(_is_not("model.family", "hybrid"), _is("model.full_attention_interval", 1)),
    "train.compile":           lambda run, mesh: "" if run.engine == PAPERS_NAME else _is("parallel.zero", 3)(run, mesh),
    "train.preference.loss":   _is_not("data.name", "preferences"),
    "train.preference.beta":   _is_not("data.name", "preferences"),
    "train.preference.label_smoothing": _any(_is_not("data.name", "preferences"), _is("train.preference.loss", "ipo")),
    "train.preference.margin": _any(_is_not("data.name", "preferences"), _is("train.preference.loss", "ipo")),
    "train.preference.nll_weight": _is_not("data.name", "preferences"),
    "train.evaluate.batches":  _is("train.evaluate.every", 0),
    "optim.betas":             _is_not("optim.name", "adamw", "muon"),
    "optim.eps":               _is_not("optim.name", "adamw", "muon"),
    "optim.momentum":          _is_not("optim.name", "sgd"),
    "optim.muon.momentum":     _is_not("optim.name", "muon"),
    "optim.muon.nesterov":     _is_not("optim.name", "muon"),
    "optim.muon.ns_steps":     _is_not("optim.name", "muon"),
    "optim.muon.adjust_lr_fn": _is_not("optim.name", "muon"),
    "optim.moments":           lambda run, mesh: "" if has_moments(run.optim) else _is("optim.momentum", 0.0)(run, mesh),
    "optim.rounding":          _is("optim.moments", "fp32", "int8"),
    "optim.min_lr":            _is("optim.schedule", "constant"),
    "data.path":               _is("data.name", "stdlib", "synthetic"),
    "data.weights":            _any(_is("data.name", "stdlib", "synthetic"), _is("data.path", None)),
    "data.tokenizer":          _is("data.name", "synthetic"),
    "data.end":                _is("data.name", "synthetic"),
    "data.text_key":           _is_not("data.name", "text"),
    "data.prompt_key":         _is_not("data.name", "pairs", "preferences"),
    "data.completion_key":     _is_not("data.name", "pairs"),
    "data.messages_key":       _is_not("data.name", "pairs"),
    "data.turns":              _is_not("data.name", "pairs"),
    "data.chosen_key":         _is_not("data.name", "preferences"),
    "data.rejected_key":       _is_not("data.name", "preferences"),
    "data.document_tokens":    _is("data.documents", False),
    "data.validate":           _is("train.evaluate.every", 0),
    "data.cache":              _is("data.name", "synthetic"),
    "log.profile":             _ends_before(lambda run: run.log.profile),
    "log.timeline":            _ends_before(lambda run: run.log.timeline),
    "launch.hostfile":         _is("launch.name", "local", "slurm"),
    "launch.include":          _is("launch.name", "local", "slurm"),
    "launch.exclude":          _is("launch.name", "local", "slurm"),
    "launch.address":          _is("launch.name", "local", "slurm"),
    "launch.runner":           _is_not("launch.name", "deepspeed"),
    "launch.port":             _is("launch.name", "local"),
    "launch.environment":      _is_not("launch.name", "deepspeed"),
    "launch.restarts":         _is("launch.name", "torchrun", "slurm"),
    "launch.spares":           _any(_is_not("launch.name", "deepspeed"), _never_replaced),
    "launch.patience":         _is("launch.name", "torchrun", "slurm"),
    "launch.preflight":        _is_not("launch.name", "deepspeed"),
}
READ: dict[str, tuple[str, ...]] = {  # by section
    "model":           ("family", "layers", "hidden", "heads", "vocab", "kv_heads", "vocab_multiple", "tied", "bias",
                        "qkv_bias", "qk_norm", "norm", "norm_eps", "act", "positions", "dropout", "hf", "parameters", "experts",
                        "dense_layers"),
    "model.lora":      ("rank",),
    "model.mtp":       ("layers",),
    "cluster":         ("nodes", "gpus", "storage", "price", "mtbf"),
    "cluster.device":  ("name", "memory", "bandwidth", "peak", "kind", "units", "sustained", "flash", "streaming", "launch", "dispatch",
                        "context"),
    "cluster.inside":  ("bandwidth", "latency", "efficiency"),
    "cluster.between": ("bandwidth", "latency", "efficiency"),
    "cluster.host":    ("memory", "bandwidth", "link"),
    "parallel":        (*AXES, "zero", "recompute", "actions"),
    "parallel.offload": ("optimizer", "parameters"),
    "train":           ("batch", "seq", "microbatch", "steps", "tokens", "precision", "gradients", "attention", "flops", "loss_chunks",
                        "z_loss", "deterministic", "seed", "clip", "skip", "skip_spikes"),
    "train.rampup":    ("batch", "until", "by"),
    "train.evaluate":  ("every",),
    "search":          ("by", "runnable", "rows", "headroom", "nodes", "boundaries", "within"),
    "optim":           ("name", "lr", "weight_decay", "mup", "ema", "schedule", "warmup", "gradient_copy"),
    "data":            ("name", "stages", "documents", "validation"),
    "log":             ("every", "sinks", "dir", "ledger"),
    "checkpoint":      ("every", "final", "keep", "resume", "accept"),  # the ends of runs that go on are saves, of which some are kept
    "launch":          ("name", "device_check"),
    "":                ("name", "engine", "reading"),
}
# fmt: on


def unused_keys(run: Run, mesh: Mesh) -> Iterator[Problem]:
    """Yield every key that was set and has no effect."""
    for key, condition in IDLE.items():
        value = _value(run, key)
        if value != default(key) and (other := condition(run, mesh)):
            yield Problem(rule=RULE, says=f"{key}={value_text(value)} does nothing with {other}")
    if "jsonl" not in run.log.sinks:
        yield Problem(rule=RULE, says=f"log.sinks={value_text(run.log.sinks)} leaves out jsonl, which is always written")


def default(key: str) -> Any:
    """Return the default of a key; None for a key that must be set."""
    return defaults()[key]


@cache
def defaults(of: Any = Run, at: str = "") -> dict[str, Any]:
    """Return the defaults of all keys of a section."""
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
