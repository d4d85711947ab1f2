"""A process that compiles nothing imports no torch._dynamo, until something reads it."""

from __future__ import annotations

import subprocess
import sys

TRAINS_WITHOUT_DYNAMO = """
import sys
import torch
import distrain.trainer.loop.train_rank  # all that a rank imports before its engine is built
assert "torch._dynamo" not in sys.modules
from distrain.trainer.engines import lazy_dynamo
lazy_dynamo.disable_compile()
import distrain.trainer.engines.deepspeed.pipe, distrain.trainer.engines.deepspeed.zero
import distrain.trainer.layers.transformer.core_attention
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
torch.compile(lambda: weight.sum())().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "sympy" not in sys.modules
assert "torch._dynamo.eval_frame" not in sys.modules
"""
READS_DYNAMO = """
import torch._dynamo.config  # also what torch.utils.checkpoint reads
assert "sympy" in sys.modules
assert not isinstance(torch._dynamo, lazy_dynamo.LazyDynamo)
assert torch._dynamo is sys.modules["torch._dynamo"]
product = torch.utils.checkpoint.checkpoint(lambda each: each * 2, weight, use_reentrant=False)
product.sum().backward()
optimizer.step()
"""


def test_training_imports_no_dynamo_and_what_reads_it_gets_the_real_one() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS_WITHOUT_DYNAMO + READS_DYNAMO], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
