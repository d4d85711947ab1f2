"""What a run that goes on from a checkpoint has changed since: which keys refuse it, which are said, which are free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from ..spec.problem import Problem
from ..spec.read import value_text
from ..spec.run import Model, Optim, Run

Policy = Literal["refused", "acceptable", "said", "free"]

# The policy of a key is that of the first row whose name it has or begins with. `refused`: the weights mean another function.
# `acceptable`: refused unless checkpoint.accept names it. `said`: the run goes on and says what changed. `free`: nothing is said.
# fmt: off
POLICIES: tuple[tuple[str, Policy], ...] = (
    ("model.weights",        "said"),        # read at the beginning only
    ("model.hf",             "free"),        # what it says stands in the other keys, and in the config that is kept
    ("model.parameters",     "free"),        # the weights' shapes are compared one by one
    ("model.vocab_multiple", "free"),        # padding of a rank's slice
    ("model.dropout",        "said"),
    ("model.aux_loss",       "said"),        # weighs a loss beside the model's
    ("model.",               "refused"),
    ("data.cache",           "free"),
    ("data.",                "acceptable"),
    ("optim.name",           "acceptable"),
    ("optim.gradient_copy",  "free"),        # memory
    ("optim.",               "said"),
    ("train.batch",          "said"),
    ("train.seq",            "said"),
    ("train.steps",          "said"),
    ("train.tokens",         "said"),
    ("train.precision",      "said"),
    ("train.gradients",      "said"),
    ("train.clip",           "said"),
    ("train.seed",           "said"),
    ("train.microbatch",     "free"),        # layout
    ("train.attention",      "free"),        # how, not what
    ("train.compile",        "free"),
    ("train.flops",          "free"),        # what is counted
    ("train.skip",           "free"),
    ("train.evaluate.",      "free"),
)
# fmt: on
# Keys of a config.json that change nothing of what a model computes.
HARMLESS = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"))
# Keys that name where data lie, or what they are made of: other words may name the same tokens.
PLACES = ("data.path", "data.tokenizer")
CONTEXT = "model.context"
FAMILY = "model.family"
DOCUMENTS = "data.documents"  # says which labels count, not which tokens there are


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key whose value was another when the checkpoint was saved; `content`: its value names other tokens than it did."""

    key: str
    before: Any
    now: Any
    content: bool = False

    @property
    def words(self) -> str:
        """The change as a user reads it: optim.lr 0.001 -> 0.0005."""
        return (
            f"other tokens in {self.key}={value_text(self.now)}"
            if self.content
            else f"{self.key} {value_text(self.before)} -> {value_text(self.now)}"
        )

    def problem(self, step: int, acceptable: Sequence[str]) -> Problem:
        """Return the change as a problem of a run that goes on from a step, with what would mend it.

        `acceptable` are the keys that checkpoint.accept must name, of all that changed.
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
    """What differs between the run that saved a checkpoint and one that goes on from it.

    `problems` refuse it. `said` and `accepted` are let through and said. `other_data`: the tokens are others, so that the run reads
    them from their first sample on. `new_moments` begin at zero, `dropped_moments` are not read, each a kind as checkpoints name it.
    """

    problems: tuple[Problem, ...] = ()
    said: tuple[Difference, ...] = ()
    accepted: tuple[Difference, ...] = ()
    other_data: bool = False
    new_moments: tuple[str, ...] = ()
    dropped_moments: tuple[str, ...] = ()

    def remarks(self, step: int) -> Iterator[str]:
        """Say what changed since a step, a line each kind."""
        if self.said:
            yield f"changed since step {step}: {', '.join(each.words for each in self.said)}"
        if self.accepted:
            yield f"changed since step {step}, as checkpoint.accept allows: {', '.join(each.words for each in self.accepted)}"
        if self.other_data:
            yield "the data are others: the run reads them from their first sample on"
        if self.new_moments:
            yield f"moments of the optimizer that begin at zero: {', '.join(self.new_moments)}"
        if self.dropped_moments:
            yield f"moments of the checkpoint that this optimizer has not: {', '.join(self.dropped_moments)}"


def policy(key: str) -> Policy:
    """Return what a change of a key does to a resume."""
    return next((what for name, what in POLICIES if key == name or (name.endswith(".") and key.startswith(name))), "free")


def acceptable_keys() -> tuple[str, ...]:
    """List the keys that `checkpoint.accept` takes."""
    sections = ((f"{section.name}.{key.name}") for section in fields(Run) if section.name in ("data", "optim") for key in _keys(section))
    return tuple(key for key in sections if policy(key) == "acceptable")


def _keys(section: Any) -> tuple[Any, ...]:
    kind = section.default_factory
    return fields(kind) if is_dataclass(kind) else ()


def differences(before: Run, now: Run) -> Iterator[Difference]:
    """List the keys of which the two runs have other values, with every default that follows from other keys filled in.

    A default that is another because the key it follows from was changed is left out; but for the rows of a position table, which
    follow from train.seq, that a run may change.
    """
    old, new = effective(before), effective(now)
    said, says = dict(_flatten(before, "")), dict(_flatten(now, ""))
    for key in dict.fromkeys((*old, *new)):
        follows = said.get(key) == says.get(key) and key != CONTEXT
        if old.get(key) != new.get(key) and not follows:
            yield Difference(key=key, before=old.get(key), now=new.get(key))


def compare(
    before: Run,
    now: Run,
    *,
    step: int,
    same_data: bool | None = None,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Changes:
    """Judge what changed since the checkpoint of a step was saved.

    `same_data`: whether the tokens are the same, whatever words name them; None where that is not known yet, and then what
    names their place decides nothing. `configs` are the two config.json of a model of family hf.
    """
    found = [each for each in differences(before, now) if policy(each.key) != "free"]
    data = list(_data_differences([each for each in found if each.key.startswith("data.")], now, same_data))
    others = [each for each in found if not each.key.startswith("data.")]
    accepted = [each for each in (*data, *others) if policy(each.key) == "acceptable" and each.key in now.checkpoint.accept]
    refused = [each for each in (*data, *others) if policy(each.key) in ("refused", "acceptable") and each not in accepted]
    if any(each.key == FAMILY for each in refused):  # the others follow from it
        refused = [each for each in refused if each.key == FAMILY or not each.key.startswith("model.")]
    names = tuple(dict.fromkeys((*now.checkpoint.accept, *(each.key for each in refused if policy(each.key) == "acceptable"))))
    old, new = moment_kinds(before.optim), moment_kinds(now.optim)
    return Changes(
        problems=(*(each.problem(step, names) for each in refused), *_config_problems(*configs, step=step)),
        said=tuple(each for each in others if policy(each.key) == "said"),
        accepted=tuple(accepted),
        other_data=any(each.key.startswith("data.") and each.key != DOCUMENTS for each in accepted),
        new_moments=tuple(kind for kind in new if kind not in old),
        dropped_moments=tuple(kind for kind in old if kind not in new),
    )


def _data_differences(found: list[Difference], now: Run, same: bool | None) -> Iterator[Difference]:
    """Keep what says that the tokens are others, or where their documents end; words that name the same tokens are the same."""
    documents, words = [each for each in found if each.key == DOCUMENTS], [each for each in found if each.key != DOCUMENTS]
    yield from documents
    if same is None:
        yield from (each for each in words if each.key not in PLACES)
    elif not same:
        key = "data.path" if now.data.path else "data.name"
        value = effective(now)[key]
        yield from words or [Difference(key=key, before=value, now=value, content=True)]


def effective(run: Run) -> dict[str, Any]:
    """Return every key of a run with its value, None where it decides nothing in this model."""
    flat = dict(_flatten(run, ""))
    return flat | {f"model.{key}": value for key, value in effective_model(run.model, run.train.seq).items()}


def effective_model(model: Model, seq: int) -> dict[str, Any]:
    """Return the keys of a model whose default follows from other keys; None for one that this model does not read."""
    ffn, mixture = model.ffn or 4 * model.hidden, bool(model.experts)
    return {
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "ffn": (model.expert_ffn or ffn) if mixture else ffn,
        "expert_ffn": (model.expert_ffn or ffn) if mixture else None,
        "qkv_bias": model.bias if model.qkv_bias is None else model.qkv_bias,
        "context": (model.context or seq) if model.positions == "learned" else None,
        "rope_base": model.rope_base if model.positions == "rope" else None,
        **({} if mixture else dict.fromkeys(("experts", "top_k", "shared_experts", "aux_loss", "capacity"))),
    }


def moment_kinds(optim: Optim) -> tuple[str, ...]:
    """Return the kinds of what an optimizer keeps for each element of a weight, as checkpoints name them."""
    match optim.name:
        case "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "sgd":
            return ("momentum_buffer",) if optim.momentum else ()


def _flatten(part: Any, at: str) -> Iterator[tuple[str, Any]]:
    for row in fields(part):
        value = getattr(part, row.name)
        if is_dataclass(value):
            yield from _flatten(value, f"{at}{row.name}.")
        else:
            yield f"{at}{row.name}", value


def _config_problems(before: Mapping[str, Any], now: Mapping[str, Any], *, step: int) -> Iterator[Problem]:
    for key in sorted((before.keys() | now.keys()) - HARMLESS) if before and now else ():
        if before.get(key) != now.get(key):
            says = f"model.hf: {key} was {before.get(key)} when step {step} was saved, and is {now.get(key)} now"
            yield Problem(rule="resume", says=says, mend="set it back to go on, or name=NEW to train another run")
