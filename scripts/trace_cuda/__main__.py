"""Traces ranks of runs on fake CUDA tensors, and compares the bytes that they keep for backward with their plans.

Run `python -m distrain.scripts.trace_cuda RECIPE [k=v ...] [ranks=0,7] [--json]`, or `... --all` for the recipes that an engine here
runs. It needs no GPU; it compiles a small library with g++ once.

Columns: the bytes that a micro-batch keeps for backward, traced; over what the plan counts for our modules as they are ("eager"), and over
what the plan of this run counts ("plan": the papers' form on a GPU); the most that the passes hold beside the weights; the kernels that a
micro-batch launches.

Exit status: 0 all are within 0.5 % of the eager form; 1 one is not, or could not be traced; 2 the arguments are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .device_guard import NoGuard
from .processes import TraceJob, trace

TOLERANCE = 0.005
GIB = 2**30

# Each recipe that an engine here runs, as it is written; one of whose sizes is smaller so that a trace takes seconds.
RECIPES = (
    "gpt2_124m", "gpt2_124m_1gpu", "llama3_2_1b_1node", "llama3_8b", "llama3_8b_1node", "llama3_8b_ethernet", "llama3_8b_128k",
    "llama3_70b", "mixtral_8x7b", "finetune_llama", "llama3_8b_finetune", "megatron_22b", "gpt3_175b", "nano_shakespeare", "quickstart",
    "tiny_2x2x2",
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


HEADER = f"{'recipe':<24}{'rank':>6}{'stage':>6}{'kept GiB':>10}{'/ eager':>9}{'/ plan':>9}{'peak GiB':>10}{'kernels':>9}"


def lines(job: TraceJob, row: Mapping[str, Any]) -> Iterator[str]:
    """A line for each rank."""
    for rank in row["ranks"]:
        traced, sizes = rank["traced"], rank["planned"]
        ratios = "".join(f"{traced['kept'] / sizes[form]:>9.4f}" for form in ("eager", "plan"))
        yield (
            f"{job.recipe:<24}{traced['rank']:>6}{traced['stage']:>6}{traced['kept'] / GIB:>10.3f}{ratios}"
            f"{traced['peak'] / GIB:>10.2f}{traced['kernels']:>9}"
        )


def is_close(row: Mapping[str, Any]) -> bool:
    """Whether all ranks of a row were traced and keep what the plan counts for our modules."""
    return "error" not in row and all(abs(each["traced"]["kept"] / each["planned"]["eager"] - 1) <= TOLERANCE for each in row["ranks"])


if __name__ == "__main__":
    raise SystemExit(main())
