"""Messages of ranks that share one GPU: NCCL refuses two ranks on a GPU, and gloo takes only broadcasts and all-reduces of CUDA tensors.

All others are staged: copied to the host, sent by gloo from there, and what they received is copied back. The operators of torch's
`c10d` are replaced, so that messages of our layers, of DeepSpeed and of torch are staged alike, and the ledger counts each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed  # registers the operators
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.library import Library

# Operators whose first argument holds the tensors that a rank receives.
RECEIVING = (
    "_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "_reduce_scatter_base_",
    "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "recv_", "recv_any_source_", "gather_",
    "scatter_", "reduce_",
)  # fmt: skip
SENDING = ("send",)
STAGED = (*RECEIVING, *SENDING)

_open_libraries = list[Library]()  # a library that is collected takes its kernels back


def stage_messages(device: str) -> None:
    """Stage messages of tensors on `device`, "cuda" or "cpu", from now on in this process. On a CPU that only costs copies: a rehearsal."""
    library = Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    key = "AutogradCPU" if device == "cpu" else device.upper()  # above the kernel of the host, which it calls
    for name in STAGED:
        library.impl(name, _staged_kernel(name), key, allow_override=True)  # type: ignore[no-untyped-call]
    _open_libraries.append(library)


def _staged_kernel(name: str) -> Callable[..., Any]:
    """Return what stands for an operator: it stages tensors, calls the operator on the host and, unless it sends, waits for it."""
    operator = getattr(torch.ops.c10d, name).default

    def run_staged(*arguments: Any) -> Any:
        on_host = tuple(_host_copy(each) for each in arguments)
        with torch._C._AutoDispatchBelowAutograd():
            answer = operator(*on_host)
        if name in SENDING:
            return answer  # gloo holds the copy until it is sent
        received, work = answer if isinstance(answer, tuple) else (None, answer)
        work.wait()
        _copy_back(on_host[0], arguments[0])
        done = _finished_work()  # gloo's own would wait for a second message
        return done if received is None else (arguments[0], done)

    return run_staged


def _finished_work() -> Any:
    """Return a `Work` that is done, in the form that operators return."""
    finished = torch.futures.Future[None]()
    finished.set_result(None)
    return _create_work_from_future(finished).boxed()


def _host_copy(argument: Any) -> Any:
    """Return tensors copied to the host, also in lists of lists; anything else as it is."""
    if isinstance(argument, Tensor):
        return argument.detach().to("cpu", copy=True).contiguous()
    if isinstance(argument, list | tuple):
        return [_host_copy(each) for each in argument]
    return argument


def _copy_back(source: Any, target: Any) -> None:
    """Copy tensors, also in lists of lists, into those that they were copied from."""
    if isinstance(target, Tensor):
        target.detach().copy_(source)
        return
    for one, other in zip(source, target, strict=True):
        _copy_back(one, other)
