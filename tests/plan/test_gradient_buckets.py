"""Gradient buckets of engine `native`: on all ranks that step copies of one weight, its elements have the same owners."""

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.compare_rank_messages import rank_shards
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.plan.native.buckets import Bucket, gradient_buckets
from distrain.trainer.spec.run import Run

WORDS = ("engine=native", "cluster=2x8", "parallel.tp=2", "parallel.pp=2", "train.batch=64", "parallel.schedule=1f1b")
CASES = {
    "positions are summed late too": ("gpt2_124m", *WORDS, "model.tied=true", "parallel.sequence=true", "parallel.zero=1"),
    "a large bucket":                ("llama3_8b", *WORDS, "model.tied=true", "parallel.zero=2", "parallel.bucket=4000000000"),
    "modules of further tokens":     ("llama3_8b", *WORDS, "model.mtp.layers=1", "parallel.sequence=true", "parallel.zero=1",
                                      "parallel.bucket=4000000000"),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_the_embedding_s_copies_on_both_ends_are_cut_alike(words: tuple[str, ...]) -> None:
    """Each rank of the data axis owns the same elements of both, so that their gradients are added up in one order and stay equal."""
    run = load_recipe(words[0], words[1:])
    last = 2 * 8 - 2  # the first tensor rank of the last stage's last replica
    first, end = (_bucket_of(run, rank) for rank in (0, last))
    assert (
        (first.names, first.starts, first.elements) == (end.names, end.starts, end.elements) == (("embedding.weight",), (0,), end.elements)
    )


def _bucket_of(run: Run, rank: int) -> Bucket:
    position = mesh_position(run, rank)
    buckets = gradient_buckets(run, position.mesh, rank_shards(run, position))
    (found,) = (each for each in buckets if "embedding.weight" in each.names)
    return found
