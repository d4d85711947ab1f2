"""The fork server of ranks that train models of transformers, which it imports once."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM, OPTForCausalLM

from distrain.tests.rank_programs.signalled_ranks import with_signals
from distrain.trainer.loop.forkserver.server import QUESTIONS, serve
from distrain.trainer.loop.rank import run_rank

IMPORTED = (AutoModelForCausalLM, GPTNeoXForCausalLM, OPTForCausalLM)


def main() -> int:
    """Serve until stdin ends."""
    serve(with_signals(run_rank), QUESTIONS)
    return 0
