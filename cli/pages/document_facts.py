"""What a plan says of the lengths of documents."""

from __future__ import annotations

from ...trainer.plan.plan_data import Plan
from ...trainer.spec.numbers.as_text import count_text, seconds_text, share_text

SLOWEST = 1.005  # times the mean from which a rank with more attention is named


def documents_text(plan: Plan) -> str:
    """What the lengths of documents make of attention; "" where they are not stated."""
    found = plan.documents
    if found is None:
        return ""
    verb = "computes" if found.computed else "counts"
    text = f"attention {verb} {share_text(found.pairs)} of a whole sequence's pairs: documents of {count_text(round(found.tokens))} tokens"
    if found.slowest > SLOWEST:
        text += f"; the busiest rank of a sequence has {found.slowest:.2f} times the mean"
    if found.wait and plan.time and found.wait > (SLOWEST - 1) * plan.time.step:
        text += f"; {seconds_text(found.wait)} a step is for the replica with the longest"
    return text
