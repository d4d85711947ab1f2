"""What a plan says, as figures, rows and sentences; `plan_page` and the HTML page lay them out."""

from __future__ import annotations

from dataclasses import asdict

from ...trainer.launch.file_checks import WOULD_REFUSE
from ...trainer.plan.axes.dp import HOST
from ...trainer.plan.engines.engine_limit import DOES_NOT_RUN
from ...trainer.plan.plan_data import Message, Plan
from ...trainer.spec.numbers.as_text import (
    count_text,
    part_of_size,
    plural,
    rate_text,
    seconds_range_text,
    seconds_text,
    share_text,
    size_range_text,
    size_text,
)
from ...trainer.spec.problem import one_line

TIME_PARTS = {
    "compute": "computing",
    "exposed": "waiting for messages",
    "bubble": "waiting in the pipeline",
    "optimizer": "optimizer step",
    "host": "the host, once a step",
}
MESSAGE_COLUMNS = ("axis", "verb", "link", "messages", "sent", "takes", "waited for")
MAX_MESSAGES = 14  # rows of messages, the largest first
HOST_WAIT = 0.2  # share of a step from which launching operators, a part of computing, is named


# The verdict


def verdict(plan: Plan) -> str:
    """One line: whether the plan fits, the memory of its fullest device, its speed, and why nothing here runs it."""
    if plan.memory is None:
        return f"{one_line(plan.name)} {outcome(plan)}"
    of = memory_figure(plan)
    if overflows_host(plan):
        says = f"{outcome(plan)}: needs {host_part(plan)} on each node's host ({of} on a device)"
    elif not plan.fits:
        says = f"{outcome(plan)}: needs {of}{f' on stage {plan.memory.stage}' if len(plan.memory.stages) > 1 else ''}"
    elif not plan.ok:
        says = f"{outcome(plan)} (memory fits: {of})"
    else:
        says = f"{outcome(plan)}: {of}"
    return f"{one_line(plan.name)} {says}{_speed_text(plan)}{f'; {note}' if (note := refusal_note(plan)) else ''}"


def outcome(plan: Plan) -> str:
    """Whether the plan fits, or how many problems keep it from running or from being laid out."""
    if plan.memory is None:
        return f"can't be laid out: {plural(len(plan.problems), 'problem')}"
    return fit_words(plan) if plan.ok or not plan.fits else f"can't run: {plural(len(plan.problems), 'problem')}"


def overflows_host(plan: Plan) -> bool:
    """Whether what ranks keep on their node's host does not fit there, while the rest fits on their devices."""
    return plan.memory is not None and plan.memory.full_host is not None


def host_part(plan: Plan) -> str:
    """The bytes that ranks keep on the host of the fullest node, of those that it has."""
    assert plan.memory
    host = plan.memory.host
    assert host
    return size_text(host.node) if host.capacity is None else part_of_size(host.node, host.capacity)


def host_text(plan: Plan) -> str:
    """What ranks keep on their node's host, and of one rank which kinds; "" where they keep nothing there."""
    if plan.memory is None or plan.memory.host is None:
        return ""
    host = plan.memory.host
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in asdict(host.rank).items() if size)
    where = "Host copies, in the same memory" if host.is_own else "On a node's host"
    return f"{where} {host_part(plan)}{f'; of one rank {kinds}' if kinds else ''}"


def fit_words(plan: Plan) -> str:
    """Whether the plan's memory fits; "probably" where the capacity lies inside the error bar."""
    assert plan.memory
    if overflows_host(plan):
        return "does not fit"
    capacity = plan.memory.capacity
    if plan.fits:
        return "probably fits" if plan.memory_high is not None and plan.memory_high > capacity else "fits"
    return "probably does not fit" if plan.memory_low is not None and plan.memory_low <= capacity else "does not fit"


def memory_figure(plan: Plan) -> str:
    """The bytes of the fullest device of those that it has, with the ends of the error bar."""
    return f"{memory_part(plan)}{memory_ends(plan)}{f', {note}' if (note := unknown_note(plan)) else ''}"


def unknown_note(plan: Plan) -> str:
    """What the bytes leave out; "" for a plan that counts all kinds."""
    return "without activations, which are not known" if plan.memory and plan.memory.unknown else ""


def memory_part(plan: Plan) -> str:
    """The bytes of the fullest device of those that it has."""
    assert plan.memory
    return part_of_size(plan.memory.peak, plan.memory.capacity)


def memory_ends(plan: Plan) -> str:
    """The ends of the error bar of the memory in brackets, after a space; "" where it has none."""
    assert plan.memory
    return size_range_text(plan.memory.peak, plan.memory_low, plan.memory_high)


def step_figure(plan: Plan) -> str:
    """The seconds of a step, with the ends of the error bar."""
    assert plan.time
    return f"{seconds_text(plan.time.step)}{step_ends(plan)}"


def step_ends(plan: Plan) -> str:
    """The ends of the error bar of the step in brackets, after a space; "" where it has none."""
    assert plan.time
    return seconds_range_text(plan.time.step, plan.step_low, plan.step_high)


def _speed_text(plan: Plan) -> str:
    if plan.time is None or plan.throughput is None:
        return "; step time not known"
    days = f", {seconds_text(plan.run.seconds)}" if plan.run and plan.run.seconds is not None else ""
    speed = plan.throughput
    return f"; {step_figure(plan)} a step, {count_text(speed.tokens_per_second)} tokens/s, MFU {share_text(speed.mfu)}{days}"


def refusal_note(plan: Plan) -> str:
    """Why nothing here runs a plan that fits; "" where something does, or the plan does not fit."""
    if plan.runnable or not (plan.fits and plan.ok):
        return ""
    return "`fit` would refuse it on this machine" if refusal_here(plan) else f"not run: {engine_limit(plan)}"


def engine_limit(plan: Plan) -> str:
    """The first override that keeps the plan's engine from running it."""
    limits = [each.says.partition(DOES_NOT_RUN)[2] for each in plan.warnings if each.rule == "engine"]
    return next(filter(None, limits), "no engine runs it")


def refusal_here(plan: Plan) -> str:
    """The first reason why `fit` would refuse the run on this machine; "" where there is none."""
    return next((str(each).removeprefix(f"{WOULD_REFUSE}: ") for each in plan.warnings if each.says.startswith(WOULD_REFUSE)), "")


# The mesh


def mesh_text(plan: Plan) -> str:
    """The mesh, outermost axis first, and the nodes: `pp 2 x tp 4 = 8 ranks on 1 node x 8 A100-80G`."""
    mesh = plan.mesh or {}
    shape = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1 and axis != "ep")
    experts = f" (ep {mesh['ep']} inside dp)" if mesh.get("ep", 1) > 1 else ""
    equals = f"{shape}{experts} = " if shape else ""
    return f"{equals}{plural(plan.world, 'rank')} on {plural(plan.nodes, 'node')} x {plan.gpus} {one_line(plan.device)}"


def schedule_text(plan: Plan) -> str:
    """The schedule, the micro-batches of a step, the bubble and the engine."""
    parts = []
    if plan.microbatches is not None:
        staged = f"schedule {plan.schedule}, " if (plan.mesh or {}).get("pp", 1) > 1 else ""
        parts.append(f"{staged}{plan.microbatches:,} micro-batch{'' if plan.microbatches == 1 else 'es'} a step")
    if plan.bubble_fraction:
        parts.append(f"pipeline bubble {share_text(plan.bubble_fraction)}")
    return ", ".join([*parts, f"engine {plan.engine}{_engine_note(plan)}" if plan.engine else "no engine runs it"])


def _engine_note(plan: Plan) -> str:
    """Why that engine, or that it does not run the layout."""
    if not (plan.runnable or refusal_here(plan)):
        return " (planned only: this version does not run it)"
    return f" ({plan.engine_reason})" if plan.engine_reason else ""


# Traffic and time


def traffic_title(plan: Plan) -> str:
    """The bytes that one rank sends in a step over each link."""
    by_link = {link: sum(each.sent for each in plan.traffic if each.link == link) for link in ("inside", "between")}
    totals = [f"{size_text(sent)} {link} {'nodes' if link == 'between' else 'the node'}" for link, sent in by_link.items() if sent]
    if copied := sum(each.sent for each in plan.traffic if each.link == HOST):
        totals.append(f"{size_text(copied)} to and from the host")
    return f"Traffic of a rank in a step: {', '.join(totals) or 'nothing'}"


def message_rows(plan: Plan) -> list[list[str]]:
    """The messages that one rank sends in a step, by axis and link, the largest first, in MESSAGE_COLUMNS."""
    return [_message_row(each) for each in _messages(plan)[:MAX_MESSAGES]]


def rare_messages(plan: Plan) -> str:
    """What the number behind a verb means; "" where every message is sent in each step."""
    every = next((each.every for each in _messages(plan)[:MAX_MESSAGES] if each.every > 1), 0)
    return f"/{every}: as many in one of {every} steps; sent, takes and waited for are the mean of a step" if every else ""


def rest_of_messages(plan: Plan) -> str:
    """What the messages without a row send; "" where each has one."""
    rest = _messages(plan)[MAX_MESSAGES:]
    return f"... and {size_text(sum(each.sent for each in rest))} in {len(rest)} smaller kinds" if rest else ""


def _messages(plan: Plan) -> list[Message]:
    return sorted(plan.traffic, key=lambda each: -each.sent)


def _message_row(each: Message) -> list[str]:
    times = [seconds_text(value) if value is not None else "?" for value in (each.seconds, each.exposed)]
    verb = each.verb if each.every == 1 else f"{each.verb} /{each.every}"
    return [each.axis, verb, each.link, f"{each.count:,} x {size_text(each.payload)}", size_text(each.sent), *times]


def time_parts(plan: Plan) -> list[tuple[str, float, float]]:
    """(name, seconds, share of the step) of each part of a step that takes any time."""
    assert plan.time
    parts = [(label, getattr(plan.time, part)) for part, label in TIME_PARTS.items()]
    return [(label, seconds, seconds / plan.time.step) for label, seconds in parts if seconds]


def host_wait_text(plan: Plan) -> str:
    """How much of what counts as computing is the launching of operators, and what shortens it; "" where it is little."""
    share, seconds = next(((each.share, each.seconds) for each in plan.operators if each.kind == "host"), (0.0, 0.0))
    if share < HOST_WAIT:
        return ""
    return (
        f"computing includes {seconds_text(seconds)} ({share_text(share)}) of launching operators: {fewer_launches(plan.microbatches or 1)}"
    )


def fewer_launches(micros: int) -> str:
    """What makes fewer and larger operators of a step with so many micro-batches."""
    larger = "train.microbatch" if micros > 1 else "train.batch and train.microbatch"
    return f"larger {larger} or train.seq make fewer of them"


def speed_texts(plan: Plan) -> tuple[str, str]:
    """The arithmetic of a device, and the tokens of all and of each."""
    speed = plan.throughput
    assert speed
    model, hardware = speed.model_flops_per_second_per_gpu, speed.hardware_flops_per_second_per_gpu
    recomputed = f", {rate_text(hardware, 'FLOP/s')} with recomputation (HFU {share_text(speed.hfu)})" if hardware > model else ""
    return (
        f"on each device {rate_text(model, 'FLOP/s')} of the model (MFU {share_text(speed.mfu)}){recomputed}",
        f"{count_text(speed.tokens_per_second)} tokens/s, {count_text(speed.tokens_per_second_per_gpu)} on each device",
    )


def missing_rates(plan: Plan) -> str:
    """How to have the time planned: the fix of the plan's own warning; "" where it has none."""
    fixes = [each.mend for each in plan.warnings if each.rule == "time"]
    return fixes[0] if fixes else f"set cluster.device.peak and .bandwidth of {plan.device}, and both links"


# The model and the whole run


def model_figures(plan: Plan) -> dict[str, str]:
    """The model's figures by name: parameters, those trained and those that one token uses where these are fewer, FLOP."""
    model = plan.model
    if model is None:
        return {}
    parts = {"trained": model.trained_parameters, "active per token": model.active_parameters}
    return {
        "parameters": count_text(model.parameters),
        **{name: count_text(part) for name, part in parts.items() if part != model.parameters},
        "a token, forward and backward": rate_text(model.flops_per_token, "FLOP"),
    }


def bars_text(plan: Plan) -> str:
    """What the ends in brackets mean, and which measured runs they rest on."""
    reasons: dict[str, list[str]] = {}
    for figure, bar in plan.bars.items():
        of = f" ({plural(bar.runs, 'run')} of {plural(bar.sources, 'source')})" if bar.runs else ""
        reasons.setdefault(f"{bar.because}{of}", []).append(figure)
    if not reasons:
        return ""
    says = "; ".join(f"{' and '.join(figures)}: {why}" for why, figures in reasons.items())
    return f"In brackets: where nine runs in ten lie. {says[0].upper()}{says[1:]}"
