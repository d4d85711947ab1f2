"""Traces ranks of runs on fake CUDA tensors, and compares the bytes that they keep for backward and hold at most with their plans.

Run `python -m distrain.scripts.trace_cuda RECIPE [k=v ...] [ranks=0,7] [--json]`, or `... --all` for the recipes that an engine here
runs. It needs no GPU; it compiles a small library with g++ once.

Columns: the bytes that a micro-batch keeps for backward, traced, and over what the plan counts; the most that the passes of a step hold
beside weights and the optimizer, and over the plan; the kernels that a micro-batch launches: all of layers that are not compiled, and
compared with the plan of that. At last, where the run compiles its layers, what a micro-batch keeps then over what the plan counts.

Exit status: 0 all keep what is planned within 0.5 % (4 % where layers are compiled), and hold it within 3 %; 1 one does not, or could
not be traced; 2 the arguments are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..show_help import show_help
from .device_guard import NoGuard
from .processes import TraceJob, trace

KEPT_TOLERANCE, COMPILED_TOLERANCE, PEAK_TOLERANCE = 0.005, 0.04, 0.03
GIB = 2**30

# Each recipe that an engine here runs, as it is written.
RECIPES = (
    "gpt2_124m", "gpt2_124m_1gpu", "llama3_2_1b_1node", "llama3_8b", "llama3_8b_1node", "llama3_8b_ethernet", "llama3_8b_128k",
    "llama3_70b", "mixtral_8x7b", "qwen3_30b_a3b", "finetune_llama", "llama3_8b_finetune", "megatron_22b", "gpt3_175b", "nano_shakespeare",
    "quickstart", "tiny_2x2x2", "llama3_405b",
)  # fmt: skip


def main() -> int:
    """Trace what the command line asks for, and print a table."""
    words = sys.argv[1:]
    as_json, every = "--json" in words, "--all" in words
    rest = [word for word in words if word not in ("--json", "--all")]
    if bool(rest) == every:
        print("give a recipe and overrides, or --all", file=sys.stderr)
        return 2
    jobs = [TraceJob(recipe=name) for name in RECIPES] if every else [_job(rest)]
    failed = False
    try:
        for number, (job, row) in enumerate(trace(jobs)):
            if "error" in row:
                print(f"{job.recipe}: {row['error']}", file=sys.stderr)
            elif as_json:
                print(json.dumps({"recipe": job.recipe, "words": job.words, **row}), flush=True)
            else:
                print("\n".join([HEADER] * (number == 0) + list(lines(job, row))), flush=True)
            failed |= not is_close(row)
    except NoGuard as error:
        print(error, file=sys.stderr)
        return 2
    return int(failed)


def _job(words: Sequence[str]) -> TraceJob:
    recipe, *rest = words
    ranks = next((word.removeprefix("ranks=") for word in rest if word.startswith("ranks=")), "")
    overrides = tuple(word for word in rest if not word.startswith("ranks="))
    return TraceJob(recipe=recipe.removeprefix("conf="), words=overrides, ranks=tuple(map(int, ranks.split(","))) if ranks else ())


HEADER = f"{'recipe':<24}{'rank':>6}{'stage':>6}{'kept GiB':>10}{'/ plan':>9}{'peak GiB':>10}{'/ plan':>9}{'kernels':>9}{'compiled':>10}"


def lines(job: TraceJob, row: Mapping[str, Any]) -> Iterator[str]:
    """A line for each rank."""
    for rank in row["ranks"]:
        traced, planned = rank["traced"], rank["planned"]
        sizes = "".join(f"{traced[key] / GIB:>10.3f}{traced[key] / planned[key]:>9.4f}" for key in ("kept", "peak"))
        compiled = f"{traced['kept_compiled'] / planned['kept_compiled']:>10.4f}" if traced["kept_compiled"] else ""
        yield f"{job.recipe:<24}{traced['rank']:>6}{traced['stage']:>6}{sizes}{traced['kernels']:>9}{compiled}"


def is_close(row: Mapping[str, Any]) -> bool:
    """Whether all ranks of a row were traced, and keep and hold what the plan counts."""
    tolerances = {"kept": KEPT_TOLERANCE, "kept_compiled": COMPILED_TOLERANCE, "peak": PEAK_TOLERANCE}
    return "error" not in row and all(
        abs(each["traced"][key] / each["planned"][key] - 1) <= tolerance
        for each in row["ranks"]
        for key, tolerance in tolerances.items()
        if each["traced"][key]
    )


if __name__ == "__main__":
    show_help(__doc__)
    raise SystemExit(main())
