"""Ranks of which one is faulty: RUN_DIR/spoiler, {"how": FAULT, "rank": RANK}, names the fault and its rank."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from math import nan
from pathlib import Path
from typing import Any

import torch

from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop import train
from distrain.trainer.loop import train_rank as setup
from distrain.trainer.loop import validate as validate_module
from distrain.trainer.loop.checkpoint import CheckpointReader, LoadFailed
from distrain.trainer.loop.checkpoint import host_copy as copy_module
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.loop.state import reference_pass
from distrain.trainer.loop.state import saver as saver_of_run
from distrain.trainer.parallel import world

FILE_LIMIT = 60_000  # bytes
COLLECTIVE_TIMEOUT, CORPUS_TIME = 15.0, 18.0  # seconds

# What the faults replace functions and values of.
loop: Any = train
validate: Any = validate_module
host_copy: Any = copy_module
rank_setup: Any = setup
reference: Any = reference_pass
reader: Any = CheckpointReader
saver: Any = saver_of_run


def stop_request() -> None:
    """A stop request arrives while the rank is still loading, and its agent holds it back."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)


def stuck_thread() -> None:
    """The rank raises in its second step, while a thread of its own waits forever."""
    original = loop.learning_rate

    def learning_rate(optim: Any, step: int, steps: int) -> float:
        if step == 1:
            ThreadPoolExecutor(1).submit(threading.Event().wait)
            raise ArithmeticError("what a rank may raise\nand explain")
        return float(original(optim, step, steps))

    loop.learning_rate = learning_rate


def no_memory() -> None:
    """In its second step the rank asks for more memory than any machine has."""
    original = loop.learning_rate

    def learning_rate(optim: Any, step: int, steps: int) -> float:
        if step == 1:
            torch.empty(1 << 47, dtype=torch.int8)
        return float(original(optim, step, steps))

    loop.learning_rate = learning_rate


def unreadable_shard() -> None:
    """The rank can't read its part of a checkpoint."""

    def read(self: Any, part: Any) -> None:
        raise LoadFailed("a shard is on no disk of this host")

    reader.read = read


def slow_corpus() -> None:
    """Preparing the corpus takes longer than the other ranks would wait in a collective."""
    original = rank_setup.prepare_corpus

    def prepare_corpus(*arguments: Any, **options: Any) -> Any:
        rank_setup.prepare_corpus = original
        time.sleep(CORPUS_TIME)
        return original(*arguments, **options)

    rank_setup.prepare_corpus = prepare_corpus


def other_text() -> None:
    """The rank's host has other files under the same name, of as many tokens."""
    original = rank_setup.prepare_corpus

    def prepare_corpus(data: Any, **options: Any) -> Any:
        other = Path(data.path).with_name("other.txt")
        other.write_bytes(Path(data.path).read_bytes()[::-1])
        return original(replace(data, path=str(other)), **options)

    rank_setup.prepare_corpus = prepare_corpus


def small_files() -> None:
    """The rank may only write small files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))


def stop_in_reference() -> None:
    """A stop request arrives in the third round of the pass that computes the reference of preferences."""
    _send_in_reference(signal.SIGTERM, 2)


def killed_in_reference() -> None:
    """The rank is killed in the sixth round of that pass, and the file of the reference is written in each."""
    reference.WRITE_INTERVAL = 0.0
    _send_in_reference(signal.SIGKILL, 5)


def _send_in_reference(number: int, after: int) -> None:
    original, rounds = reference.model_inputs, iter(range(10**6))

    def model_inputs(*arguments: Any) -> Any:
        if next(rounds) == after:
            os.kill(os.getpid(), number)
        return original(*arguments)

    reference.model_inputs = model_inputs


def nan_validation() -> None:
    """The validation loss is nan."""
    original = validate.evaluate_unless_stopped
    validate.evaluate_unless_stopped = lambda *arguments: original(*arguments)._replace(loss=nan)


def stop_in_validation() -> None:
    """A stop request arrives while the rank evaluates."""
    _stop_in_evaluation(0)


def stop_in_averaged_validation() -> None:
    """A stop request arrives while the rank evaluates the average of the weights."""
    _stop_in_evaluation(1)


def _stop_in_evaluation(after: int) -> None:
    original, evaluations = validate.evaluate_unless_stopped, iter(range(10**6))

    def evaluate_unless_stopped(*arguments: Any) -> Any:
        if next(evaluations) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    validate.evaluate_unless_stopped = evaluate_unless_stopped


def stop_in_save() -> None:
    """A stop request arrives while the rank saves."""
    original = saver.save_shards

    def save_shards(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    saver.save_shards = save_shards


def stop_in_copy() -> None:
    """A stop request arrives while the rank copies what it saves in the background."""
    original = host_copy.HostCopy.take

    def take(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    host_copy.HostCopy.take = take


FAULTS = {
    each.__name__: each
    for each in (
        stop_request,
        stuck_thread,
        no_memory,
        unreadable_shard,
        slow_corpus,
        other_text,
        small_files,
        nan_validation,
        stop_in_reference,
        stop_in_validation,
        stop_in_averaged_validation,
        stop_in_save,
        stop_in_copy,
        killed_in_reference,
    )
}


def run_faulty_rank(path: Path, channel: Channel) -> int:
    """Run a rank, with the fault that RUN_DIR/spoiler gives it, if any."""
    file = path.with_name("spoiler")
    request = json.loads(file.read_text()) if file.is_file() else {}
    if request.get("how") == "slow_corpus":
        world.COLLECTIVE_TIMEOUT = timedelta(seconds=COLLECTIVE_TIMEOUT)
    if request.get("rank") == int(os.environ["RANK"]):
        FAULTS[request["how"]]()
    return run_rank(path, channel)
