"""The file that holds what was tried, as JSON, and from which a campaign goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .campaign import TriedMutation
from .sites import Mutation


def write_results(path: Path, seed: int, tried: Iterable[TriedMutation], files: str = "training") -> None:
    """Write what was tried in a list of files, whole or not at all."""
    rows = [{"name": each.mutation.name, **asdict(each)} for each in tried]
    written = path.with_name(f"{path.name}.new")
    written.write_text(json.dumps({"files": files, "seed": seed, "mutations": rows}, indent=1), encoding="utf-8")
    written.replace(path)


def read_found(path: Path, seed: int, files: str = "training") -> list[TriedMutation]:
    """What a file says was found by `prove` or a test, or changes nothing; [] without a file.

    Raises ValueError where it is no such file, or of another list of files or seed.
    """
    if not path.exists():
        return []
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        tried = [
            TriedMutation(
                mutation=Mutation(**{**row["mutation"], "lines": tuple(row["mutation"]["lines"])}),
                **{key: row[key] for key in ("verdict", "says", "seconds", "prove_seconds")},
            )
            for row in results["mutations"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what --json writes: {error!r}") from error
    if results.get("seed") != seed:
        raise ValueError(f"{path} holds seed {results.get('seed')}, not {seed}")
    if (kept := results.get("files", "training")) != files:
        raise ValueError(f"{path} holds files={kept}, not {files}")
    return [each for each in tried if each.verdict != "survived"]
