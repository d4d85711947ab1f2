"""Draw planned over measured step times, a row of points for each source.

Run `python -m distrain.scripts.published.draw CASES.json > docs/published.svg`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from math import log
from pathlib import Path

from ..show_help import show_help
from .measured import score
from .predict import predict

LEFT, WIDTH, ROW, TOP = 300, 560, 20, 30  # pixels
LEAST, MOST = 0.25, 4.0  # of planned over measured
MARKS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


def draw(ratios: Mapping[str, Sequence[float]]) -> str:
    """Return the SVG of planned over measured, on a log scale."""
    height = TOP + ROW * len(ratios) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-family="sans-serif" font-size="12">'
    ]
    for mark in MARKS:
        at = _position(mark)
        lines.append(f'<line x1="{at:.1f}" y1="{TOP - 8}" x2="{at:.1f}" y2="{height - 8}" stroke="{"#555" if mark == 1 else "#ddd"}"/>')
        lines.append(f'<text x="{at:.1f}" y="{TOP - 12}" text-anchor="middle">{mark:g}</text>')
    for row, (name, points) in enumerate(ratios.items()):
        middle = TOP + ROW * row + ROW / 2
        lines.append(f'<text x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)} ({len(points)})</text>')
        lines += [f'<circle cx="{_position(each):.1f}" cy="{middle:.1f}" r="3" fill="#4c78a8" fill-opacity="0.4"/>' for each in points]
    return "\n".join([*lines, "</svg>", ""])


def _position(ratio: float) -> float:
    return LEFT + WIDTH * log(min(MOST, max(LEAST, ratio)) / LEAST) / log(MOST / LEAST)


def main() -> None:
    """Plan the cases of a file, and print the picture."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        if (step := score(case, predict(case)).step) is not None:
            ratios[case["source"]["name"][:42]].append(step)
    print(draw(dict(sorted(ratios.items()))), end="")


if __name__ == "__main__":
    show_help(__doc__)
    main()
