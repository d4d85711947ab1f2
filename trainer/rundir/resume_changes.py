"""Changes of a run since its checkpoint was saved: which keys refuse a resume, which are reported, which are free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from ..plan.layout.layout import mesh_of
from ..plan.layout.schedule_of_run import delay_of
from ..plan.layout.workers import OUTER_MOMENTUM, worker_count
from ..spec.derived.data_blends import blends_before
from ..spec.problem import Problem
from ..spec.read import value_text
from ..spec.run import Run
from .effective_values import effective_values, flatten, moment_kinds

Policy = Literal["refused", "acceptable", "reported", "free"]

# The first row that names a key, or a prefix of it, decides. `refused`: with another value the weights mean another function.
# `acceptable`: refused unless checkpoint.accept names it. `reported`: the run resumes and reports the change. `free`: it just resumes.
# fmt: off
POLICIES: tuple[tuple[str, Policy], ...] = (
    ("model.weights",        "reported"),        # read only when a run begins
    ("model.lora.weights",   "reported"),        # read only when a run begins
    ("model.init.",          "free"),        # read only when a run begins
    ("model.hf",             "free"),        # its content is in the other keys, and in the config that is kept
    ("model.parameters",     "free"),        # the weights' shapes are compared one by one
    ("model.vocab_multiple", "free"),        # padding of a rank's slice
    ("model.dropout",        "reported"),
    ("model.lora.dropout",   "reported"),
    ("model.aux_loss",       "reported"),        # the weight of an additional loss
    ("model.mtp.weight",     "reported"),        # the weight of an additional loss
    ("model.router.bias_rate", "reported"),      # how fast, not where
    ("model.router.z_loss",  "reported"),        # the weight of an additional loss
    ("model.",               "refused"),
    ("data.cache",           "free"),
    ("data.validate",        "free"),        # evaluated, not trained on
    ("data.document_tokens", "free"),        # a fact for plans
    ("data.",                "acceptable"),
    ("optim.name",           "acceptable"),
    ("optim.mup",            "acceptable"),    # the rates of most weights
    ("optim.gradient_copy",  "free"),        # memory
    ("optim.",               "reported"),
    ("parallel.compress.",   "reported"),        # trains another curve
    ("parallel.staleness",   "reported"),        # trains another curve
    ("train.batch",          "reported"),
    ("train.rampup.",        "reported"),
    ("train.seq",            "reported"),
    ("train.steps",          "reported"),
    ("train.tokens",         "reported"),
    ("train.precision",      "reported"),
    ("train.gradients",      "reported"),
    ("train.clip",           "reported"),
    ("train.seed",           "reported"),
    ("train.microbatch",     "free"),        # layout: no loss is of a micro-batch
    ("train.attention",      "free"),        # how, not what
    ("train.linear_attention", "free"),      # how, not what
    ("train.compile",        "free"),
    ("train.loss_chunks",    "free"),        # layout
    ("train.z_loss",         "reported"),        # the weight of an additional loss
    ("train.preference.",    "reported"),        # trains another curve
    ("train.deterministic",  "free"),
    ("train.flops",          "free"),        # a way of counting
    ("train.skip_spikes",    "reported"),        # trains another curve
    ("train.skip",           "free"),
    ("train.evaluate.",      "free"),
)
# fmt: on
# Keys of a config.json that do not change what a model computes.
HARMLESS_CONFIG_KEYS = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures", "quantization_config")
)
# Keys for the place or the form of the data: another value may give the same tokens.
DATA_PLACE_KEYS = ("data.path", "data.tokenizer")
CONTEXT_KEY = "model.context"
FAMILY_KEY = "model.family"
DELAY_KEYS = ("parallel.schedule", "parallel.pp", "parallel.vertical")  # by which weights are late
SYNC_KEYS = ("parallel.sync.every", "parallel.sync.outer.lr", "parallel.sync.outer.momentum", "parallel.sync.outer.nesterov")
BASE_KEYS = (
    "train.seed",
    "model.init.",
    "model.weights",
    "optim.mup",
)  # by which weights are drawn that LoRA adds to, and no checkpoint holds
MOMENTS_KEY = "optim.moments"
ORDER_KEYS = ("train.seq", "train.seed")  # by which the windows of an epoch are cut and drawn
BLEND_KEYS = ("data.weights", "data.stages")  # by which sources are blended, in the samples that were read and in those to come
DOCUMENTS_KEY = "data.documents"  # which labels count, not which tokens there are


@dataclass(frozen=True, kw_only=True)
class ChangedKey:
    """A key whose value differs from when the checkpoint was saved. `content`: the value is the same, but names different tokens."""

    key: str
    before: Any
    now: Any
    content: bool = False

    @property
    def text(self) -> str:
        """The change for people: optim.lr 0.001 -> 0.0005."""
        return (
            f"other tokens in {self.key}={value_text(self.now)}"
            if self.content
            else f"{self.key} {value_text(self.before)} -> {value_text(self.now)}"
        )

    def problem(self, step: int, acceptable: Sequence[str]) -> Problem:
        """Return the change as a problem of a run that resumes from a step, with its fix.

        `acceptable` are all the changed keys that checkpoint.accept must name.
        """
        if self.content:
            says, back = f"{self.key}={value_text(self.now)} holds other tokens than when step {step} was saved", "bring those back"
        else:
            says = f"{self.key} was {value_text(self.before)} when step {step} was saved, and is {value_text(self.now)} now"
            back = f"set {self.key}={value_text(self.before)}"
        allow = f", or checkpoint.accept=[{','.join(acceptable)}] to go on all the same" if self.key in acceptable else ""
        return Problem(rule="resume", says=says, mend=f"{back} to go on, or name=NEW to train another run{allow}")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between the run that saved a checkpoint and the one that resumes from it.

    `problems` refuse the resume; `reported` and `accepted` changes do not. `other_data`: the tokens are different, so the run reads
    them from their first sample on. `new_moments` start at zero and `dropped_moments` are not read, by their kinds in checkpoints.
    """

    problems: tuple[Problem, ...] = ()
    reported: tuple[ChangedKey, ...] = ()
    accepted: tuple[ChangedKey, ...] = ()
    other_data: bool = False
    new_moments: tuple[str, ...] = ()
    dropped_moments: tuple[str, ...] = ()
    begins_average: bool = False
    drops_average: bool = False

    def remarks(self, step: int) -> Iterator[str]:
        """Yield what changed since a step, a line for each kind of change."""
        if self.reported:
            yield f"changed since step {step}: {', '.join(each.text for each in self.reported)}"
        if any(each.key in ORDER_KEYS for each in self.reported) and not self.other_data:
            yield "windows come in another order: of an epoch that is under way some tokens are read twice, and as many are left out"
        if any(each.key == MOMENTS_KEY for each in self.reported):
            now = next(each.now for each in self.reported if each.key == MOMENTS_KEY)
            says = {"fp32": "widened to fp32", "bf16": "rounded to the nearest bf16", "int8": "quantized to 8 bits"}[now]
            yield f"the checkpoint's optimizer moments are {says}"
        if self.accepted:
            yield f"changed since step {step}, as checkpoint.accept allows: {', '.join(each.text for each in self.accepted)}"
        if self.other_data:
            yield "the data are different: the run reads them from their first sample on"
        if self.new_moments:
            yield f"optimizer moments that start at zero: {', '.join(self.new_moments)}"
        if self.begins_average:
            yield "the average of the weights begins with those of the checkpoint (optim.ema)"
        if self.dropped_moments:
            yield f"moments in the checkpoint that this optimizer does not use: {', '.join(self.dropped_moments)}"
        if self.drops_average:
            yield "the checkpoint's average of the weights is dropped (optim.ema=0.0)"


def key_policy(key: str) -> Policy:
    """Return the policy for a change of a key."""
    return next((what for name, what in POLICIES if key == name or (name.endswith(".") and key.startswith(name))), "free")


def acceptable_keys() -> tuple[str, ...]:
    """List the keys that `checkpoint.accept` takes."""
    sections = ((f"{section.name}.{key.name}") for section in fields(Run) if section.name in ("data", "optim") for key in _keys(section))
    return tuple(key for key in sections if key_policy(key) == "acceptable")


def _keys(section: Any) -> tuple[Any, ...]:
    kind = section.default_factory
    return fields(kind) if is_dataclass(kind) else ()


def run_differences(before: Run, now: Run) -> Iterator[ChangedKey]:
    """Yield the keys whose values differ between the two runs, with all defaults that follow from other keys filled in.

    A default that differs only because the key it follows from was changed is left out, except the rows of a position table: they
    follow from train.seq, which may change.
    """
    old, new = effective_values(before), effective_values(now)
    stated_before, stated_now = dict(flatten(before, "")), dict(flatten(now, ""))
    for key in dict.fromkeys((*old, *new)):
        follows = stated_before.get(key) == stated_now.get(key) and key != CONTEXT_KEY
        if old.get(key) != new.get(key) and not follows:
            yield ChangedKey(key=key, before=old.get(key), now=new.get(key))


def compare_runs(
    before: Run,
    now: Run,
    *,
    step: int,
    samples: int | None = None,
    same_data: bool | None = None,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Changes:
    """Judge what changed since the checkpoint of a step was saved, after so many samples (None: step x train.batch).

    `same_data`: whether the tokens are the same, however they are named; None where that is not known yet, and then the keys
    for their place decide nothing. `configs` are the two config.json of a model of family hf.
    """
    is_drawn = bool(before.model.lora.rank and now.model.lora.rank and None in (before.model.weights, now.model.weights))

    def policy(key: str) -> Policy:
        return "refused" if is_drawn and key.startswith(BASE_KEYS) else key_policy(key)

    found = [each for each in run_differences(before, now) if policy(each.key) != "free"]
    to_come = [each for each in found if each.key in BLEND_KEYS] if _same_so_far(before, now, step, samples) else []
    data = list(_data_differences([each for each in found if each.key.startswith("data.") and each not in to_come], now, same_data))
    others = [each for each in found if not each.key.startswith("data.")]
    accepted = [each for each in (*data, *others) if policy(each.key) == "acceptable" and each.key in now.checkpoint.accept]
    refused = [each for each in (*data, *others) if policy(each.key) in ("refused", "acceptable") and each not in accepted]
    if any(each.key == FAMILY_KEY for each in refused):  # the other keys of the model follow from it
        refused = [each for each in refused if each.key == FAMILY_KEY or not each.key.startswith("model.")]
    if before.model.context is now.model.context is None and now.train.seq > before.train.seq:  # only the old length mends it
        longer = ChangedKey(key="train.seq", before=before.train.seq, now=now.train.seq)
        refused = [longer if each.key == CONTEXT_KEY else each for each in refused]
    names = tuple(dict.fromkeys((*now.checkpoint.accept, *(each.key for each in refused if policy(each.key) == "acceptable"))))
    steps_others = (before.optim.name == "muon") != (now.optim.name == "muon")  # a kind of moments belongs to other weights
    kept, new = ((*moment_kinds(each.optim), *_outer_moments(each)) for each in (before, now))
    old = _outer_moments(before) if steps_others else kept
    return Changes(
        problems=(*(each.problem(step, names) for each in refused), *_config_problems(*configs, step=step)),
        reported=(
            *(each for each in others if policy(each.key) == "reported"),
            *to_come,
            *_delay_differences(before, now),
            *_sync_differences(before, now),
        ),
        accepted=tuple(accepted),
        other_data=any(each.key.startswith("data.") and each.key != DOCUMENTS_KEY for each in accepted),
        new_moments=tuple(kind for kind in new if kind not in old),
        dropped_moments=tuple(kind for kind in kept if kind not in new or kind not in old),
        begins_average=bool(now.optim.ema) and not before.optim.ema,
        drops_average=bool(before.optim.ema) and not now.optim.ema,
    )


def _same_so_far(before: Run, now: Run, step: int, samples: int | None) -> bool:
    """Return whether two runs blend the samples alike that the first has read: then they differ in stages to come alone."""
    read = step * before.train.batch if samples is None else samples
    old, new = (blends_before(each.data, before.train.seq, read) for each in (before, now))
    return old == new


def _delay_differences(before: Run, now: Run) -> Iterator[ChangedKey]:
    """Yield the differences of the layout that train another curve: of pipelines without a flush."""
    delays = delay_of(before.parallel), delay_of(now.parallel)
    if any(delays):
        old, new = dict(flatten(before, "")), dict(flatten(now, ""))
        yield from (ChangedKey(key=key, before=old[key], now=new[key]) for key in DELAY_KEYS if old[key] != new[key])
    if all(each is not None and each.each_micro_batch for each in delays):
        counts = _micro_batches(before), _micro_batches(now)
        if counts[0] != counts[1]:
            yield ChangedKey(key="updates of a step", before=counts[0], now=counts[1])


def _micro_batches(run: Run) -> int:
    """Return the micro-batches of a step of train.batch; 0 where the degrees don't fit the cluster, which the plan says."""
    dp = mesh_of(run.parallel, run.cluster.nodes * run.cluster.gpus).dp
    return run.train.batch // (dp * run.train.microbatch) if dp else 0


def _workers(run: Run) -> int:
    """Return how many workers step alone; 0 where the degrees don't fit the cluster, which the plan says."""
    return worker_count(run.parallel, mesh_of(run.parallel, run.cluster.nodes * run.cluster.gpus), run.cluster.gpus)


def _outer_moments(run: Run) -> tuple[str, ...]:
    """Return the kinds of the moments of the step that workers take together, as checkpoints name them."""
    return (OUTER_MOMENTUM,) if run.parallel.sync.outer.momentum and _workers(run) > 1 else ()


def _sync_differences(before: Run, now: Run) -> Iterator[ChangedKey]:
    """Yield the differences of workers, which train another curve."""
    many = _workers(before), _workers(now)
    if max(many) == 1:
        return
    if many[0] != many[1]:
        yield ChangedKey(key="workers", before=many[0], now=many[1])
    old, new = dict(flatten(before, "")), dict(flatten(now, ""))
    yield from (ChangedKey(key=key, before=old[key], now=new[key]) for key in SYNC_KEYS if old[key] != new[key])


def _data_differences(found: list[ChangedKey], now: Run, same: bool | None) -> Iterator[ChangedKey]:
    """Yield the differences that mean different tokens or document ends; other names for the same tokens are no difference."""
    documents, blended = [each for each in found if each.key == DOCUMENTS_KEY], [each for each in found if each.key in BLEND_KEYS]
    words = [each for each in found if each not in documents and each not in blended]
    yield from (*documents, *blended)
    if same is None:
        yield from (each for each in words if each.key not in DATA_PLACE_KEYS)
    elif not same and not (blended and not words):  # another first blend alone is another identity
        key = "data.path" if now.data.path else "data.name"
        value = effective_values(now)[key]
        yield from words or [ChangedKey(key=key, before=value, now=value, content=True)]


def _config_problems(before: Mapping[str, Any], now: Mapping[str, Any], *, step: int) -> Iterator[Problem]:
    for key in sorted((before.keys() | now.keys()) - HARMLESS_CONFIG_KEYS) if before and now else ():
        if before.get(key) != now.get(key):
            says = f"model.hf: {key} was {before.get(key)} when step {step} was saved, and is {now.get(key)} now"
            yield Problem(rule="resume", says=says, mend="set it back to go on, or name=NEW to train another run")
