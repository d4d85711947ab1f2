"""The process of one check: python -m distrain.scripts.gpu.check_process REQUEST.json FINDING.json."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import msgspec

from .checks import CheckRequest
from .finding import CheckBroken, CheckSkipped


def main() -> int:
    """Carry out the check and write its finding, {"figures", "departures"}, or {"broken": why}, {"skipped": why}; return 0."""
    request, target = CheckRequest.from_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])
    try:
        answer = msgspec.to_builtins(request.check.carry_out(request.context))
    except CheckBroken as error:
        answer = {"broken": str(error)}
    except CheckSkipped as error:
        answer = {"skipped": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"broken": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
    target.write_bytes(msgspec.json.encode(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a device that does not answer would keep the process
