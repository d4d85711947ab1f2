"""Draws a plan as an SVG: the memory of a rank in every stage, by kind, and where the time of a step goes.

Run `distrain plan conf=NAME --json | python -m distrain.scripts.draw_plan > plan.svg`.
"""

from __future__ import annotations

import json
import sys

from ..cli.drawings.plan_drawing import draw_plan
from .show_help import show_help

if __name__ == "__main__":
    show_help(__doc__)
    sys.stdout.write(draw_plan(json.load(sys.stdin)))
