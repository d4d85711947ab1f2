"""Runs a program of DeepSpeed's launcher: python -m distrain.trainer.launch.agent.deepspeed_program deepspeed.launcher.launch ARGUMENTS.

Each of these programs imports torch and DeepSpeed, here and on every host, before it starts anything. Of 3.0 CPU seconds Python spends 0.9
looking for garbage, and finds none; nor do the programs leave any while they wait for their children.
"""

from __future__ import annotations

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
