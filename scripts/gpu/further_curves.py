"""The check of further ways to compute: in bf16 on the device, each has the losses of another run there, or its own on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...cli.config.load import load_recipe
from ...trainer.launch.admission import fla_problem
from ...trainer.rundir.metric_rows import AVERAGED_KEY, VALIDATION_KEY
from .check_context import CheckContext
from .finding import CheckBroken, Finding
from .fit_runs import ONE_DEVICE, RECIPE, FinishedFit, fit_each
from .loss_checks import computes_in_fp8
from .loss_differences import most_apart
from .options import COMPILED, OPTION_LOSS, PLAIN, option_run

# 61M parameters in 4 layers: the host steps several pieces of them, and one is copied while another is stepped.
LARGE = (
    "model.hidden=1024", "model.heads=16", "model.kv_heads=4", "model.head_dim=64", "model.ffn=4096", "optim.lr=3e-4", "parallel.zero=3",
)  # fmt: skip
REFERENCES: dict[str, tuple[str, ...]] = {PLAIN: (), "large": LARGE}  # runs with which others are compared
ON_HOST = ("parallel.zero=3", "parallel.offload.optimizer=true")
HYBRID = ("model=tiny_hybrid",)
BY_FLA = "train.linear_attention=fla"
RATE = "optim.lr=3e-3"  # at which LoRA changes losses in six steps
FP8_LOSS = 2e-3  # of the first loss, from bf16; on a CPU, which rounds to the same 8-bit floats, it is 1e-4
AVERAGE = "average of the weights"


@dataclass(frozen=True, kw_only=True)
class FurtherWay:
    """Overrides of a way to compute; the run whose losses it has, without one its own in float32 on the CPU; how far it may be from them,
    as a share of the first loss; the run from which it must be further; and what it `needs` to be tried."""

    words: tuple[str, ...]
    like: str = ""
    limit: float = OPTION_LOSS
    unlike: str = ""
    needs: Literal["", "fp8", "GPU", "fla"] = ""


WAYS = {
    "offloaded zero3": FurtherWay(words=ON_HOST, like=PLAIN),
    "weights on the host": FurtherWay(words=("parallel.zero=3", "parallel.offload={optimizer: true, parameters: true}"), like=PLAIN),
    "offloaded zero3 of a large model": FurtherWay(words=(*LARGE, *ON_HOST), like="large", unlike=PLAIN, needs="GPU"),
    "compiled layers with float32 sums": FurtherWay(words=(*COMPILED, "train.gradients=fp32"), like=PLAIN),
    "moments in 8 bits": FurtherWay(words=("optim.moments=int8",), like=PLAIN),
    AVERAGE: FurtherWay(words=("optim.ema=0.8", "train.evaluate.every=3", "train.evaluate.batches=2")),
    "hybrid": FurtherWay(words=HYBRID, unlike=PLAIN),
    "hybrid in fp8": FurtherWay(words=(*HYBRID, "train.precision=fp8"), like="hybrid", limit=FP8_LOSS, needs="fp8"),
    "hybrid by fla": FurtherWay(words=(*HYBRID, BY_FLA), like="hybrid", unlike=PLAIN, needs="fla"),
    "LoRA of a hybrid": FurtherWay(words=(*HYBRID, "model.lora={rank: 8, alpha: 32}", RATE), unlike="hybrid"),
    "LoRA": FurtherWay(words=("model.lora={rank: 8, alpha: 32}", RATE), unlike=PLAIN),
    "LoRA with dropout": FurtherWay(words=("model.lora={rank: 8, alpha: 32, dropout: 0.5}", RATE), unlike="LoRA"),
}


def compare_further_ways(context: CheckContext) -> Finding:
    """Train each way in engine native, and name those whose losses are not what they must be. Where the host steps, memory is copied beside
    kernels: a copy for which nothing waited shows in the losses."""
    has = {"": True, "GPU": context.on_gpu, "fp8": computes_in_fp8(context), "fla": has_fla(context)}
    ways = {name: way for name, way in WAYS.items() if has[way.needs]}
    words = {**{name: REFERENCES[name] for name in REFERENCES if name in {PLAIN, *(way.like for way in ways.values())}},
             **{name: way.words for name, way in ways.items()}}  # fmt: skip
    runs = {name: option_run(f"further.{name}", each) for name, each in words.items()}
    on_cpu = ("train.precision=fp32", "device=cpu")
    exact = {name: option_run(f"further.{name}.cpu", way.words, on_cpu) for name, way in ways.items() if not way.like}
    trained, failed = fit_each([*runs.values(), *exact.values()], context)
    found = {name: trained[run.name] for name, run in runs.items() if run.name in trained}
    expected = {name: trained[run.name] for name, run in exact.items() if run.name in trained}
    if PLAIN not in found:
        raise CheckBroken("; ".join(failed.values()))
    expected |= {name: found[way.like] for name, way in ways.items() if way.like in found}
    apart = {name: share_apart(found[name], expected[name]) for name in ways if name in found and name in expected}
    validations = [each[AVERAGE] for each in (found, expected) if AVERAGE in each]
    return Finding(
        figures={
            "losses": {name: each.losses for name, each in found.items()},
            "apart, of the first loss": apart,
            "validations of the weights and of their average": [list(validation_losses(each)) for each in validations],
        },
        departures=(
            *failed.values(),
            *curve_departures(ways, found, apart),
            *(average_departures(*validations) if len(validations) == 2 else ()),
        ),
    )


def has_fla(context: CheckContext) -> bool:
    """Whether package fla and what it needs is installed beside a GPU."""
    device = load_recipe(RECIPE, [*context.words(), *ONE_DEVICE, "parallel.dp=1"]).cluster.device
    return fla_problem(device) is None


def share_apart(one: FinishedFit, other: FinishedFit) -> float:
    """Return how far the losses of two trainings are apart, of the first loss."""
    return most_apart(one.losses, other.losses) / other.losses[0]


def curve_departures(ways: Mapping[str, FurtherWay], found: Mapping[str, FinishedFit], apart: Mapping[str, float]) -> list[str]:
    """Return which ways train another curve than they must, and which that of a run from which they differ."""
    departures = [f"{name} is {100 * share:.2f} % from what it must be" for name, share in apart.items() if not share <= ways[name].limit]
    pairs = ((name, way) for name, way in ways.items() if name in found and way.unlike in found)
    alike = (f"{name} trains the curve of {way.unlike}" for name, way in pairs if not _is_apart(found[name], found[way.unlike], way.limit))
    return [*departures, *alike]


def _is_apart(one: FinishedFit, other: FinishedFit, limit: float) -> bool:
    return share_apart(one, other) > limit


def validation_losses(trained: FinishedFit) -> tuple[list[float], list[float]]:
    """Return the validation losses of a run's weights and of their average."""
    rows = [row for row in trained.rows if row.get(VALIDATION_KEY) is not None]
    return [row[VALIDATION_KEY] for row in rows], [row[AVERAGED_KEY] for row in rows]


def average_departures(on_device: FinishedFit, on_cpu: FinishedFit) -> list[str]:
    """Return what is wrong with the validations of the average: they must be the CPU's, and not those of the weights."""
    weights, averages = validation_losses(on_device)
    expected: Sequence[float] = validation_losses(on_cpu)[1]
    if not averages or len(averages) != len(expected):
        return [f"the average of the weights was validated {len(averages)} times, {len(expected)} on the CPU"]
    apart, moved = (most_apart(averages, each) / expected[0] for each in (expected, weights))
    departures = [f"the average of the weights is {100 * apart:.2f} % from what it must be"] if not apart <= OPTION_LOSS else []
    return departures + (["the average of the weights is validated as the weights are"] if not moved > OPTION_LOSS else [])
