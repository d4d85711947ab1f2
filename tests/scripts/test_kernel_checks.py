"""The checks of a trace refuse what a GPU's kernels refuse."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.scripts.trace_cuda.kernel_checks import (  # noqa: E402
    ALIGNMENT,
    CHECKS,
    CheckedKernels,
    RefusedKernel,
    check_copy,
    refuse_number,
)
from distrain.trainer.plan.mesh_position import mesh_position  # noqa: E402
from distrain.trainer.plan.native.buckets import gradient_buckets  # noqa: E402

BF16, F8, G8 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
FLASH = torch.ops.aten._flash_attention_forward
ENDS = (None, None, 8, 8, 0.0, True, False)


def empty(*shape: int, dtype: Any = BF16, at: int = 0) -> Any:
    """A tensor without data that begins so many elements into its memory."""
    return torch.empty(at + torch.Size(shape).numel(), dtype=dtype, device="meta")[at:].view(shape)


def grouped(a: Any, b: Any, ends: Any = torch.int32) -> Any:
    return lambda: torch._grouped_mm(a, b, offs=torch.empty(4, dtype=ends, device="meta"))


def scaled(a: Any, b: Any, scale: Any = torch.float32) -> Any:
    one, other = (torch.empty((), dtype=each, device="meta") for each in (scale, torch.float32))
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=other, out_dtype=BF16)


def flash(query: Any, key: Any, value: Any) -> Any:
    return lambda: FLASH(query, key, value, *ENDS, scale=1.0)


def test_what_a_gpu_takes_is_counted() -> None:
    with CheckedKernels() as kernels:
        grouped(empty(32, 16), empty(4, 16, 24))()
        grouped(empty(32, 16), empty(4, 24, 16).mT)()
        grouped(empty(32, 16).mT, empty(32, 24))()
        scaled(empty(32, 16, dtype=F8), empty(48, 16, dtype=F8).mT)()
        flash(empty(2, 8, 4, 16), empty(2, 8, 2, 16), empty(2, 8, 2, 16))()
    assert kernels.checked == {"_grouped_mm": 3, "_scaled_mm": 1, "_flash_attention_forward": 1}


REFUSED = [
    (grouped(empty(32, 16, at=4), empty(4, 16, 24)), "its first tensor begins 4 elements into its memory"),
    (grouped(empty(32, 16), empty(4, 16, 24, at=12)), "its second tensor begins 12 elements"),
    (grouped(empty(32, 12), empty(4, 12, 24)), r"its first tensor \(32, 12\) has strides \(12, 1\)"),
    (grouped(empty(32, 16), empty(4, 16, 20)), r"its second tensor \(4, 16, 20\) has strides"),
    (grouped(empty(32, 32)[:, ::2], empty(4, 16, 24)), r"its first tensor \(32, 16\) has strides \(32, 2\)"),
    (grouped(empty(32, 16), empty(4, 16, 24), torch.int64), r"the ends of groups are no int32 \[E\]"),
    (grouped(empty(32, 16, dtype=torch.float16), empty(4, 16, 24, dtype=torch.float16)), "it multiplies torch.float16"),
    (scaled(empty(32, 16, dtype=F8), empty(16, 48, dtype=F8)), "where rows and columns are asked for"),
    (scaled(empty(32, 24, dtype=F8), empty(48, 24, dtype=F8).mT), r"its sides are \(32, 24, 48\)"),
    (scaled(empty(24, 16, dtype=F8), empty(48, 16, dtype=F8).mT), r"its sides are \(24, 16, 48\)"),
    (scaled(empty(32, 16, dtype=G8), empty(48, 16, dtype=G8).mT), "it multiplies torch.float8_e5m2"),
    (scaled(empty(32, 16, dtype=F8), empty(48, 16, dtype=F8).mT, BF16), "a scale is no float32 number"),
    (flash(*(empty(2, 8, 4, 12) for _ in range(3))), r"heads have \[12\] elements"),
    (flash(*(empty(2, 8, 4, 264) for _ in range(3))), r"heads have \[264\] elements"),
    (flash(empty(2, 8, 4, 16), empty(2, 8, 4, 16), empty(2, 8, 4, 8)), r"heads have \[8, 16\] elements"),
    (flash(empty(2, 8, 4, 16), empty(2, 8, 3, 16), empty(2, 8, 3, 16)), "3 key heads do not divide 4"),
    (flash(*(empty(2, 8, 4, 16, dtype=torch.float32) for _ in range(3))), "its inputs are torch.float32"),
    (flash(*(empty(2, 8, 16, 4).mT for _ in range(3))), "elements of a head are not side by side"),
]


@pytest.mark.parametrize(("act", "says"), REFUSED)
def test_what_a_gpu_refuses_is_refused(act: Any, says: str) -> None:
    with CheckedKernels(), pytest.raises(RefusedKernel, match=says):
        act()


def test_a_wait_for_the_device_is_refused() -> None:
    class OnGpu:
        """Stands for a tensor of a GPU: torch makes none without one."""

        device, shape = torch.device("cuda"), (2, 3)

    with pytest.raises(RefusedKernel, match=r"a copy of \(2, 3\) to the host"):
        check_copy(OnGpu(), device=torch.device("cpu"))  # type: ignore[arg-type]
    check_copy(OnGpu(), device=torch.device("cuda"))  # type: ignore[arg-type]
    check_copy(OnGpu(), dtype=BF16)  # type: ignore[arg-type]
    with pytest.raises(RefusedKernel, match="the host reads a number"):
        refuse_number(OnGpu())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHECKS)
def test_every_checked_kernel_is_torchs(name: str) -> None:
    assert hasattr(torch.ops.aten, name)


MODELS = ("tiny_moe", "tiny_gpt_oss", "tiny_mla", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v2_lite", "glm45_air_106b")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lora", [None, 8])
def test_experts_begin_where_a_gpus_kernel_reads_them(name: str, lora: int | None) -> None:
    """In engine native's flat bf16 buckets, beside biases, sinks and routers of any size."""
    adapted = (f"model.lora.rank={lora}",) if lora else ()
    words = (f"model={name}", *adapted, "cluster=1x1", "device=h100_80g", "engine=native", "train.precision=bf16")
    run = load_recipe("quickstart", [*words, "parallel.dp=1", "parallel.zero=1"])
    position = mesh_position(run, 0)
    shards = [shard for part in position.parts for shard in position.weight_shards(run, part)]
    found = [
        start
        for bucket in gradient_buckets(run, position.mesh, shards)
        for each, start in zip(bucket.names, bucket.starts, strict=True)
        if ".experts." in each and "bias" not in each
    ]
    assert found
    assert not [start for start in found if start * BF16.itemsize % ALIGNMENT]
