"""The DeepSpeed configuration of a run: what memory and messages rest on."""

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.deepspeed.ds_config import deepspeed_config

PIPELINE = ("model=tiny", "cluster=1x4", "parallel.pp=2", "parallel.dp=2", "train.batch=8", "train.microbatch=2")


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        # a gradient in bf16 is added to the float32 one at once: else DeepSpeed holds it until the end of backward, 2 bytes a parameter
        ("fp32", {"enabled": True, "immediate_grad_update": True}),
        ("bf16", {"enabled": True}),
    ],
)
def test_bf16_gradients_are_not_held_beside_those_in_float32(gradients: str, expected: dict[str, bool]) -> None:
    run = load_recipe("quickstart", [*PIPELINE, "train.precision=bf16", f"train.gradients={gradients}"])
    config = deepspeed_config(run, 2)
    assert config["bf16"] == expected
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if gradients == "fp32" else None)


@pytest.mark.parametrize(("bucket", "elements", "expected"), [(1000, 5000, 1000), (5000, 1000, 1000), (10**9, None, 224_640)])
def test_a_bucket_is_no_larger_than_a_ranks_parameters(bucket: int, elements: int | None, expected: int) -> None:
    """DeepSpeed allocates it in full."""
    run = load_recipe("quickstart", [*PIPELINE, f"parallel.bucket={bucket}"])
    assert deepspeed_config(run, 2, elements)["zero_optimization"]["reduce_bucket_size"] == expected
