"""The layouts that `distrain prove` can train: their names, the runs that they make of a recipe, and the few that show most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any, Literal, cast

from ...plan.axes import AXES
from ...plan.engines import ENGINES, engine_for
from ...plan.engines.engine_row import EngineRow
from ...plan.layout.mesh import replica_size
from ...plan.layout.schedule_of_run import is_file, read_lists
from ...plan.layout.schedules import SCHEDULES, Schedule
from ...spec.derived.batch_levels import batches_of_levels, common_divisor
from ...spec.numbers.divisors import divisors
from ...spec.run import Compress, Offload, Parallel, Run, Sync
from .covering import covering_rows

ZERO_STAGES = (0, 1, 2, 3)
PROVED_RECOMPUTES = ("selective", "full")
PROVED_SCHEDULES = tuple(dict.fromkeys(name for engine in ENGINES.values() for name in engine.schedules))
NATIVE_ENGINE: Literal["native"] = "native"
POWERSGD: Literal["powersgd"] = "powersgd"
HIERARCHICAL: Literal["hierarchical"] = "hierarchical"
ALL_TO_ALL: Literal["all_to_all"] = "all_to_all"
FILE_SCHEDULE = "file"  # the schedule of the recipe's own file
PROVED_CHUNKS = 2  # parts of the model that a stage of a chunked schedule runs, where nothing else is said
DEFAULT_COUNT = 12  # layouts that are proved where none are named

Recompute = Literal["selective", "full"]
Engine = Literal["auto", "native"]
Gather = Literal["step", "micro"]
Offloaded = Literal["optimizer", "all"]

FLUSHING_SCHEDULES = tuple(name for name in PROVED_SCHEDULES if SCHEDULES[name].flushes)  # those that train the curve of one process


@dataclass(frozen=True, kw_only=True)
class ProveLayout:
    """What a layout sets of `parallel`.

    `recompute` of None keeps the recipe's value, other Nones take the default: of the keys that only some users write, a layout has none
    unless it names them.
    """

    dp: int = 1
    ep: int = 1  # divides dp
    tp: int = 1
    cp: int = 1
    pp: int = 1
    zero: int = 0
    sequence: bool = False
    schedule: str = PROVED_SCHEDULES[0]  # or FILE_SCHEDULE
    chunks: int | None = None  # parts of the model that a stage runs, of schedules with chunks
    stages: tuple[int, ...] | None = None  # layers of each part of the model
    shard: int | None = None  # data-parallel ranks over which ZeRO shards
    gather: Gather | None = None
    compress: int | None = None  # the rank of the factors as which gradients travel
    sync: int | None = None  # steps that replicas take alone between two steps together
    stale: int | None = None  # steps that pass before a sum of gradients is used
    servers: int | None = None  # parameter servers
    all_to_all: bool = False  # context ranks exchange tokens for heads
    hierarchical: bool = False  # gradients are summed inside a node, then between nodes
    offload: Offloaded | None = None  # what is on the host: the optimizer, or weights too
    recompute: Recompute | None = None
    engine: Engine = "auto"

    @property
    def ranks(self) -> int:
        """The ranks of its mesh; ep counts within dp."""
        return prod(getattr(self, axis) for axis in PROVED_AXES if AXES[axis].within is None)

    @property
    def is_delayed(self) -> bool:
        """Whether it trains another curve by design, that of delayed gradients."""
        return self.pp > 1 and self.schedule not in (*FLUSHING_SCHEDULES, FILE_SCHEDULE)

    @property
    def is_compressed(self) -> bool:
        """Whether it trains another curve by design, that of compressed gradients."""
        return self.compress is not None and self.dp * self.cp > 1

    @property
    def simulation(self) -> Literal["", "delayed_gradients", "compressed_gradients", "local_steps"]:
        """How one process simulates what the layout trains, where that is another curve by design; "": it is the curve of one process."""
        if self.is_delayed or self.stale:
            return "delayed_gradients"
        return "compressed_gradients" if self.is_compressed else "local_steps" if self.sync else ""

    @property
    def has_other_curve(self) -> bool:
        """Whether it trains another curve by design."""
        return bool(self.simulation)

    @property
    def name(self) -> str:
        """The name that `layouts=` reads back, without defaults: dp2.tp2.zero1."""
        parts = [f"{axis}{getattr(self, axis)}" for axis in PROVED_AXES if getattr(self, axis) > 1] or ["dp1"]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += ["sequence"] if self.sequence else []
        parts += [self.schedule] if self.schedule != PROVED_SCHEDULES[0] else []
        parts += [f"chunks{self.chunks}"] if self.chunks else []
        parts += [f"stages{'-'.join(map(str, self.stages))}"] if self.stages else []
        parts += [f"shard{self.shard}"] if self.shard else []
        parts += [f"gather_{self.gather}"] if self.gather else []
        parts += [f"{POWERSGD}{self.compress}"] if self.compress else []
        parts += [f"sync{self.sync}"] if self.sync else []
        parts += [f"stale{self.stale}"] if self.stale else []
        parts += [f"servers{self.servers}"] if self.servers else []
        parts += [ALL_TO_ALL] if self.all_to_all else []
        parts += [HIERARCHICAL] if self.hierarchical else []
        parts += [f"offload_{self.offload}"] if self.offload else []
        parts += [NATIVE_ENGINE] if self.engine == NATIVE_ENGINE else []
        return ".".join([*parts, *([self.recompute] if self.recompute else [])])

    @property
    def choices(self) -> tuple[int | str | None, ...]:
        """Its choice of each factor; None for a factor that has no effect in it."""
        return (
            *(getattr(self, axis) for axis in PROVED_AXES),
            self.zero,
            str(self.sequence) if self.tp > 1 else None,
            self.schedule if self.pp > 1 else None,
            str(is_native(self)),
            *(str(each) if each else None for each in (self.chunks, self.stages, self.shard, self.gather)),
            *(str(each) if each else None for each in (self.compress, self.sync, self.stale, self.servers, self.hierarchical)),
            str(self.all_to_all) if self.cp > 1 else None,
            self.offload,
        )


PROVED_AXES = tuple(field.name for field in fields(ProveLayout) if field.name in AXES)  # in the order of a layout's name


def is_native(layout: ProveLayout) -> bool:
    """Whether `native` trains it: as it says, or as no other engine runs its ZeRO stage, its shards and its schedule."""
    others = (row for name, row in ENGINES.items() if name != NATIVE_ENGINE)
    return layout.engine == NATIVE_ENGINE or not any(_runs(row, layout) for row in others)


def _runs(row: EngineRow, layout: ProveLayout) -> bool:
    if (layout.compress and not row.compresses) or (layout.sync and not row.steps_alone) or (layout.stale and not row.stale_class):
        return False
    if (layout.servers or layout.hierarchical) and not row.routes_sums:
        return False
    if layout.offload and not set(_offload_keys(layout)) <= set(row.offload):
        return False
    if layout.zero not in row.zero or (layout.shard and not row.hybrid_shards) or (layout.gather == "step" and not row.gathers_once):
        return False
    if layout.pp == 1:
        return row.whole_models
    return row.pipeline and (row.runs_files if layout.schedule == FILE_SCHEDULE else row.runs_schedule(layout.schedule))


def _offload_keys(layout: ProveLayout) -> tuple[str, ...]:
    """The keys of parallel.offload that a layout sets."""
    return {None: (), "optimizer": ("optimizer",), "all": ("optimizer", "parameters")}[layout.offload]


ONE_PROCESS = ProveLayout()  # the reference of all others
NATIVE_LAYOUTS = (  # of engine native: the data axis, weight gradients apart, two chunks a stage
    ProveLayout(dp=2, zero=1, engine="native"),
    ProveLayout(pp=2, schedule="zb_h1"),
    ProveLayout(pp=2, schedule="interleaved"),
)
EACH_AXIS = tuple(ProveLayout(**dict.fromkeys((AXES[axis].within or axis, axis), 2)) for axis in PROVED_AXES)  # type: ignore[arg-type]


def all_layouts(ranks: int, *, experts: bool = False, all_to_all: Sequence[bool] = (False,)) -> Iterator[ProveLayout]:
    """Yield every layout of at most `ranks` ranks that trains the curve of one process, its degrees powers of two, smallest first; with
    `experts`, also with ep > 1. Those that another engine trains and `native` runs too are there once for each. `all_to_all`: whether
    context ranks exchange tokens for heads; each is another layout, whose attention computes windows in another way."""
    degrees = [2**power for power in range(ranks.bit_length()) if 2**power <= ranks]
    axes = [axis for axis in PROVED_AXES if AXES[axis].within is None]
    meshes = (mesh for mesh in product(degrees, repeat=len(axes)) if 1 < prod(mesh) <= ranks)
    for mesh in sorted(meshes, key=lambda mesh: (prod(mesh), mesh)):
        degrees_of_mesh = dict(zip(axes, mesh, strict=True))
        whole = ProveLayout(**degrees_of_mesh)
        expert_degrees = [each for each in degrees if each <= whole.dp] if experts else [1]
        stages = ZERO_STAGES if whole.dp * whole.cp > 1 else ZERO_STAGES[:1]
        schedules = FLUSHING_SCHEDULES if whole.pp > 1 else FLUSHING_SCHEDULES[:1]
        sequences, exchanges = (False, True) if whole.tp > 1 else (False,), all_to_all if whole.cp > 1 else (False,)
        for ep, zero, sequence, schedule, exchange in product(expert_degrees, stages, sequences, schedules, exchanges):
            layout = replace(whole, ep=ep, zero=zero, sequence=sequence, schedule=schedule, all_to_all=exchange)
            yield layout
            if not is_native(layout) and _runs(ENGINES[NATIVE_ENGINE], layout):
                yield replace(layout, engine=NATIVE_ENGINE)


def default_layouts(layouts: Sequence[ProveLayout], first: Sequence[ProveLayout]) -> list[ProveLayout]:
    """`first`, and few of the others so that every pair of choices occurs: at most DEFAULT_COUNT in all, in the order of the table."""
    by_choices = {each.choices: each for each in layouts}
    chosen = list(covering_rows(by_choices, taken=[each.choices for each in first]))
    return sorted([*first, *(by_choices[each] for each in chosen[: DEFAULT_COUNT - len(first)])], key=_table_order)


def _table_order(layout: ProveLayout) -> tuple[object, ...]:
    """Sort key: few ranks first; at equal ranks the data axis, then tensor, context, pipeline."""
    return layout.ranks, -layout.dp, layout.ep, -layout.tp, -layout.cp, layout.name


def recipe_layout(run: Run) -> ProveLayout | None:
    """A recipe's own layout as it is written, with dp=auto resolved; None where it does not fill its cluster, or is one process."""
    parallel = run.parallel
    world = run.cluster.nodes * run.cluster.gpus
    dp = world // replica_size(parallel) if parallel.dp == "auto" else parallel.dp
    degrees: dict[str, Any] = {axis: getattr(parallel, axis) for axis in PROVED_AXES} | {"dp": max(1, dp)}
    layout = ProveLayout(
        **degrees,
        zero=parallel.zero,
        sequence=parallel.sequence and parallel.tp > 1,
        **(_pipeline_choices(parallel) if parallel.pp > 1 else {}),
        shard=parallel.shard if parallel.zero and parallel.shard != "all" else None,
        gather=parallel.gather if parallel.zero == 3 and parallel.gather != "auto" else None,
        compress=parallel.compress.rank if parallel.compress.name == POWERSGD and dp * parallel.cp > 1 else None,
        sync=parallel.sync.every if parallel.sync.every > 1 and dp > 1 else None,
        stale=parallel.staleness if dp * parallel.cp > 1 and parallel.staleness else None,
        servers=parallel.servers if parallel.reduce == "server" and dp * parallel.cp > 1 else None,
        all_to_all=parallel.cp_comm == ALL_TO_ALL and parallel.cp > 1,
        hierarchical=parallel.reduce == HIERARCHICAL and dp * parallel.cp > 1,
        offload="all" if parallel.offload.parameters else "optimizer" if parallel.offload.optimizer else None,
        engine=NATIVE_ENGINE if run.engine == NATIVE_ENGINE and not auto_is_native(run, parallel) else "auto",
    )
    is_known = layout.schedule in (*PROVED_SCHEDULES, FILE_SCHEDULE)
    return layout if is_known and layout.ranks == world and layout != ONE_PROCESS else None


def _pipeline_choices(parallel: Parallel) -> dict[str, Any]:
    """The schedule of a recipe with stages, its chunks and its layers of each part."""
    if is_file(parallel.schedule):
        return {"schedule": FILE_SCHEDULE, "stages": parallel.stages}
    default = PROVED_CHUNKS if parallel.schedule in PROVED_SCHEDULES and SCHEDULES[parallel.schedule].chunked else 1
    chunks = parallel.chunks if parallel.chunks != default else None
    return {"schedule": parallel.schedule, "chunks": chunks, "stages": parallel.stages}


def auto_is_native(run: Run, parallel: Parallel) -> bool:
    """Whether `engine: auto` takes `native` for a layout."""
    row, _ = engine_for(replace(run, engine="auto"), parallel)
    return row is ENGINES[NATIVE_ENGINE]


def run_in_layout(run: Run, layout: ProveLayout, nodes: int = 1) -> Run:
    """The run in that layout, on one node with as many devices; of `parallel` it keeps only what can't change a curve, vertical sync, which
    is a part of schedule pipedream, and how workers step together. Where those of a node are a worker, or sum gradients first, the recipe's
    `nodes` share out the devices, if they can; two do where the recipe has one. One process holds all logits, against which others' chunks
    are proved."""
    kept = run.parallel
    if layout.hierarchical:
        nodes = _nodes_of_levels(layout, nodes)
    elif not (layout.sync and kept.sync.across == "node" and layout.ranks % nodes == 0):
        nodes = 1
    degrees: dict[str, Any] = {axis: getattr(layout, axis) for axis in PROVED_AXES}
    parallel = Parallel(
        **degrees,
        cp_comm=ALL_TO_ALL if layout.all_to_all else "all_gather",
        zero=cast(Literal[0, 1, 2, 3], layout.zero),
        schedule=kept.schedule if layout.schedule == FILE_SCHEDULE else layout.schedule,
        actions=kept.actions if layout.schedule == FILE_SCHEDULE else None,
        chunks=kept.chunks if layout.schedule == FILE_SCHEDULE else _chunks(layout),
        stages=layout.stages,
        shard=layout.shard or "all",
        gather=layout.gather or "auto",
        vertical=kept.vertical and layout.is_delayed and layout.schedule == kept.schedule,
        sequence=layout.sequence,
        recompute=layout.recompute or kept.recompute,
        reduce="server" if layout.servers else "hierarchical" if layout.hierarchical else "ring",
        servers=layout.servers or 1,
        staleness=layout.stale or 0,
        sync=replace(kept.sync, every=layout.sync) if layout.sync else Sync(),
        bucket=kept.bucket,
        offload=Offload(**dict.fromkeys(_offload_keys(layout), True)),
        compress=replace(kept.compress, name=POWERSGD, rank=layout.compress) if layout.compress else Compress(),
        overlap=kept.overlap,
    )
    return replace(
        run,
        name=layout.name,
        engine=layout.engine,
        reading=None,
        parallel=parallel,
        cluster=replace(run.cluster, nodes=nodes, gpus=layout.ranks // nodes),
        train=replace(
            run.train, microbatch=layout_microbatch(run, layout), loss_chunks=1 if layout == ONE_PROCESS else run.train.loss_chunks
        ),
    )


def _nodes_of_levels(layout: ProveLayout, nodes: int) -> int:
    """Nodes among which devices are shared out so that sums have two levels: the recipe's, or two where it has one."""
    wanted = max(nodes, 2)
    return wanted if layout.ranks % wanted == 0 else 1


def layout_microbatch(run: Run, layout: ProveLayout) -> int:
    """Sequences in a micro-batch: a divisor of a replica's share of the batch that leaves a pipeline the micro-batches that it needs.

    It is the recipe's number or the largest below it, whose memory the recipe was planned for. On a CPU the time of a tiny model goes by
    the number of micro-batches: there all layouts but the recipe's own and one process get the largest that leaves two, or as many as
    the pipeline needs.
    """
    if layout.schedule == FILE_SCHEDULE and layout.pp > 1:
        return _file_microbatch(run, layout)
    least, multiple = _needed_microbatches(layout)
    share, rest = divmod(common_divisor(run.train), layout.dp * multiple)  # of a replica, and of each of its rounds
    if rest:
        return run.train.microbatch  # the plan refuses this batch anyway
    fewest = min(batches_of_levels(run.train)) // layout.dp  # sequences of a replica in a step
    size = _largest_divisor(share, min(run.train.microbatch, fewest // least))
    if run.cluster.device.kind == "cpu" and layout not in (ONE_PROCESS, recipe_layout(run)):
        return max(size, _largest_divisor(share, fewest // max(least, 2)))
    return size


def _needed_microbatches(layout: ProveLayout) -> tuple[int, int]:
    """(the fewest micro-batches, of what they are a multiple): as many as the model has parts where the schedule goes out and back, and
    rounds of the stages where they run chunks."""
    if layout.pp == 1:
        return 1, 1
    schedule = _schedule(layout)
    return layout.pp * (2 if schedule.folded else 1), layout.pp if schedule.chunked else 1


def _file_microbatch(run: Run, layout: ProveLayout) -> int:
    """The sequences that make a replica's share of the batch as many micro-batches as the recipe's file lists."""
    try:
        micros = read_lists(run.parallel.actions or "", layout.pp).micros
    except ValueError:
        return run.train.microbatch  # the plan says what is wrong with the file
    size, rest = divmod(run.train.batch, layout.dp * micros)
    return run.train.microbatch if rest else size  # the plan says how many micro-batches the file lists


def _chunks(layout: ProveLayout) -> int:
    if layout.pp == 1:
        return 1
    return layout.chunks or (PROVED_CHUNKS if _schedule(layout).chunked else 1)


def _schedule(layout: ProveLayout) -> Schedule:
    return SCHEDULES[layout.schedule]


def _largest_divisor(number: int, most: int) -> int:
    return max(divisors(number, most), default=1)
