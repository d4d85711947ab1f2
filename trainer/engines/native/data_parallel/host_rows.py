"""Rows of weights that stay in the host's memory at ZeRO 3 (ZeRO-Infinity: arXiv:2104.07857), and are copied to the device each time that
fully_shard gathers them. Its import takes a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class HostRows(FSDPParam):
    """A weight of fully_shard whose rows, padded to those of the rank with most, are in the host's memory. Their sharded tensor on the
    device has no memory. fully_shard asks for them on the stream on which it prepares a gather, ahead of the layer that needs them."""

    on_host: Tensor
    arriving: tuple[Tensor, Any] | None  # a copy that was begun, and its end

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """This rank's rows, flat, in new memory of the device."""
        if self.arriving is None:
            return [self.on_host.to(self.device, non_blocking=True, copy=True)]
        (rows, end), self.arriving = self.arriving, None
        torch.get_device_module(self.device).current_stream().wait_event(end)
        return [rows]

    def begin_copy(self) -> None:
        """Begin to copy the rows on the current stream, for the next who asks for them."""
        rows = self.on_host.to(self.device, non_blocking=True, copy=True)
        self.arriving = rows, torch.get_device_module(self.device).current_stream().record_event()


def keep_rows_on_host(groups: Iterable[Any], own: Mapping[nn.Parameter, Tensor], device: torch.device) -> None:
    """Have fully_shard's groups of parameters, which have no memory yet, gather this rank's rows from the host's memory: pinned, where the
    device is a GPU. `own` are those of each sharded parameter, which is replaced by one that has them as `host_rows`."""
    for group in groups:
        group._reset_sharded_params = True  # else the first forward reads them on the device
        for weight in group.fsdp_params:
            rows = own[weight.sharded_param]
            padded = torch.zeros(weight.padded_sharded_param_size, dtype=rows.dtype, pin_memory=device.type == "cuda")
            padded[: len(rows)] = rows
            without_memory = torch.empty_like(padded, device=device)
            sharded = nn.Parameter(weight.to_sharded_dtensor(without_memory[: len(rows)]), requires_grad=weight.sharded_param.requires_grad)
            sharded.host_rows = padded[: len(rows)]  # type: ignore[attr-defined]
            weight.sharded_param, weight._sharded_param_data = sharded, without_memory.view(-1)
            without_memory.untyped_storage().resize_(0)
            weight._setattr_on_modules(sharded)
            weight.__class__, weight.on_host, weight.arriving = HostRows, padded.view(-1), None
        if group._all_gather_process_group.size() == 1:
            _copy_ahead(group)


def _copy_ahead(group: Any) -> None:
    """Have a group of one rank copy its rows when fully_shard would begin a gather, on that stream: it begins none, and would ask for the
    rows where they are used. It lets the stream go on once the copy before has been used."""
    unshard = group.unshard

    def begin(async_op: bool = False) -> None:
        was_under_way = group._all_gather_result is not None
        unshard(async_op)
        if group._all_gather_result is None or was_under_way:
            return
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with group.device_handle.stream(stream):
            for weight in group.fsdp_params:
                weight.begin_copy()

    group.unshard = begin
