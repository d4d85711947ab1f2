"""Plans of published runs against their measurements.

    python -m distrain.scripts.published CASES.json [--json] [--rows]

CASES.json is a list of runs (id, source, model, cluster, parallel, batch, precision, recompute, framework, measured). A plan reads a run's
configuration and which kind of figure was measured, never a figure; docs/published.md says how it comes about.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from .measured import Score, peak_bytes, score, step_seconds
from .predict import predict
from .ranking import rankings


def main() -> None:
    """Predict every case; print the predictions, or how far off they are."""
    parser = argparse.ArgumentParser(description="plans of published runs against their measurements")
    parser.add_argument("cases", type=Path)
    parser.add_argument("--json", action="store_true", help="a prediction for each case, and nothing else")
    parser.add_argument("--rows", action="store_true", help="also a line for each case")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text())
    predictions = [predict(case) for case in cases]
    if arguments.json:
        print(json.dumps([each.row() for each in predictions], indent=1))
        return
    print_scores([score(case, each) for case, each in zip(cases, predictions, strict=True)], rows=arguments.rows)


def print_scores(scores: Sequence[Score], *, rows: bool) -> None:
    """Print errors by source, device and precision, and in all; how layouts are ranked; which error bars hold; what can't be planned."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        groups[f"{each.case['source']['name'][:36]:36} {each.case['cluster']['gpu']:5} {each.case['precision']}"].append(each)
    print(f"{'':52} {'step: errors, median mean p90 signed':44} memory")
    for name, group in [*sorted(groups.items()), ("all", list(scores))]:
        print(f"{name:52} {_errors([each.step for each in group]):44} {_errors([each.memory for each in group])}")
        for each in group if rows and name != "all" else ():
            print(f"    {each.case['id']:60} {_ratio(each.step)} {_ratio(each.memory)}")
    _print_rankings(scores)
    _print_bars(scores)
    reasons = [each.prediction for each in scores if each.prediction.why_not]
    print(f"planned {len(scores) - len(reasons)} of {len(scores)}")
    for reason in reasons:
        print(f"not planned: {reason.id}: {reason.why_not}")


def _errors(ratios: Sequence[float | None]) -> str:
    errors = sorted(abs(each - 1) for each in ratios if each is not None)
    if not errors:
        return ""
    signed = median(each - 1 for each in ratios if each is not None)
    return f"{len(errors):4}  {median(errors):6.1%} {mean(errors):6.1%} {errors[int(0.9 * len(errors))]:6.1%} {signed:+7.1%}"


def _ratio(ratio: float | None) -> str:
    return "    -" if ratio is None else f"{ratio:5.2f}"


def _print_rankings(scores: Sequence[Score]) -> None:
    found = rankings(scores)
    for each in found:
        print(f"layouts: {each.name:70} {each.cases:3} regret {each.regret:5.1%} tau {each.tau:5.2f} of {each.most:.2f}")
    if found:
        regret, tau, most = (mean(values) for values in zip(*[(each.regret, each.tau, each.most) for each in found], strict=True))
        clear = [order for each in found for order in each.clear]
        print(f"layouts: {len(found)} groups: mean regret {regret:.1%}, tau {tau:.2f} of {most:.2f}")
        print(f"layouts: tau {mean(clear):.2f} over the {len(clear)} pairs of two layouts that differ by 3 % or more" if clear else "")


def _print_bars(scores: Sequence[Score]) -> None:
    steps, memories = [], []
    for each in scores:
        seconds, peak, row = step_seconds(each.case), peak_bytes(each.case), each.prediction
        if seconds and row.step_low is not None and row.step_high is not None:
            steps.append(row.step_low <= seconds <= row.step_high)
        if peak and row.memory_low is not None and row.memory_high is not None:
            memories.append(row.memory_low <= peak <= row.memory_high)
    for name, inside in (("step", steps), ("memory", memories)):
        if inside:
            print(f"error bars of {name}: {mean(inside):.0%} of {len(inside)} measurements inside")


if __name__ == "__main__":
    main()
