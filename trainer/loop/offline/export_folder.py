"""What every export shares: the checkpoint that it reads, the folder that it writes under a temporary name, and what it prints."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from safetensors import SafetensorError

from ...models.families import FAMILIES, family_of, is_made_by_transformers
from ...models.hf_format.model_type import hf_model_type
from ...models.ops.lora import without_lora
from ...spec.problem import Problem, Unreadable
from .load_run import SavedRun, check_weights, load_saved_run
from .verb_process import write_stdout


def load_exported_run(folder: Path, *, step: int | None, average: int = 1, ema: bool = False) -> SavedRun:
    """Find the checkpoint that is exported (`load_saved_run`), and print its remarks; raises Unreadable, LoadFailed."""
    found = load_saved_run(folder, step=step, average=average, ema=ema)
    for remark in found.remarks:
        write_stdout(f"{remark}\n")
    return found


def check_exportable(saved: SavedRun) -> None:
    """Raise Unreadable where no class of transformers computes the run's model, or the checkpoint is of another one."""
    run = without_lora(saved.run)
    if not is_made_by_transformers(run.model):
        if not family_of(run.model).model_types:
            says = f"model.family={run.model.family} can't be exported to Hugging Face"
            known = ", ".join(name for name, family in FAMILIES.items() if family.model_types or family.made_by_transformers)
            raise refusal(says, f"families {known} can")
        hf_model_type(run)
    check_weights(saved)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the destination; it becomes the destination when the block ends, and is removed if it raises."""
    destination = destination.absolute()
    folder = destination.with_name(f".{destination.name}.tmp-{secrets.token_hex(4)}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise refusal(f"{destination} can't be created: {error.strerror}", "name another folder") from None
    try:
        yield folder
        for file in folder.iterdir():
            file.chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner may read
        folder.rename(destination)
    except SafetensorError as error:
        raise refusal(f"{destination} can't be written: {error}", "") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def print_result(saved: SavedRun, says: str, remarks: Sequence[str], files: Sequence[str], destination: Path, program: str) -> None:
    """Print which checkpoints were written, what was checked, the files, and the command that runs a Python program on the folder."""
    lines = [
        f"{_steps_text(saved)}, {says}",
        *remarks,
        f"wrote {', '.join(files)}",
        f"done: {destination}",
        f"next: {quote(sys.executable)} -c {quote(program)}",
    ]
    write_stdout("".join(f"{line}\n" for line in lines))


def _steps_text(saved: SavedRun) -> str:
    """Return which checkpoints were written: `step 4`, `mean of steps 2 and 4`."""
    steps = sorted(reader.step for reader in saved.readers)
    return saved.title if len(steps) == 1 else f"mean of steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def refusal(says: str, mend: str) -> Unreadable:
    """Return the error of an export that is refused."""
    return Unreadable([Problem(rule="export", says=says, mend=mend)])
