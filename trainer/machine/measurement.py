"""What `distrain calibrate` measures of this machine's devices, as frozen data, and the child process that measures it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from ..spec.problem import Problem
from .cache import LayerRates
from .facts import time_limit

MODULE = "distrain.trainer.machine.device_probe"
PATIENCE = 300.0  # seconds that measuring may take on an idle machine

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class ProductRates:
    """FLOP/s of a product of two square matrices of `side` elements, of each device."""

    precision: str
    side: int
    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """Seconds of two all-reduces between all devices, and a device's link in a ring that takes as long: seconds per hop, bytes/s sent."""

    library: str
    ranks: int
    short_bytes: int
    short_seconds: float
    long_bytes: int
    long_seconds: float
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class DeviceMeasurement:
    """Devices of one machine, all measured at the same time: GPUs, or equal shares of a CPU. It may stand for `hosts` machines.

    `memory` is what a program can use of one device, `context` what the driver and torch's libraries hold of a GPU, in bytes. `copies` are
    bytes/s read and written, `launches` seconds of an op on 8 elements, `dispatches` those in which the host dispatches one of a layer; one
    for each device, as the rates of products are.
    """

    kind: Kind
    name: str
    devices: int
    threads: int  # of a process on a CPU
    cores: int  # that all of them may run on
    memory: int
    context: int | None
    units: int | None  # multiprocessors
    products: tuple[ProductRates, ...]
    copy_bytes: int
    copies: tuple[float, ...]
    launches: tuple[float, ...]
    layer_rates: tuple[LayerRates, ...]  # of a CPU's processes, in float32; () of GPUs
    all_reduce: AllReduceTimes | None  # None: one device
    load: float  # processes per core that ran or waited for one in the minute before
    versions: dict[str, str]
    seconds: float
    date: str
    hosts: int = 1
    dispatches: tuple[float, ...] = ()  # of a CPU's processes; () of GPUs

    @property
    def all_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.devices * self.hosts

    @property
    def share(self) -> float:
        """The share of a core's time that a process gets where there are more processes than cores."""
        return min(1.0, self.cores / self.devices) if self.kind == "cpu" else 1.0

    def rate(self, rates: tuple[float, ...]) -> float:
        """Return one rate for all devices: of a CPU's processes the best, because other work on the machine only slows some; of GPUs the
        slowest, for which the others wait in a step."""
        return (max(rates) if self.kind == "cpu" else min(rates)) * self.share

    @property
    def copy(self) -> float:
        """Bytes/s of a copy, read and written, on one device."""
        return self.rate(self.copies)

    @property
    def launch(self) -> float:
        """Seconds of an op on 8 elements, one of many in a row."""
        return 1 / self.rate(tuple(1 / each for each in self.launches))

    @property
    def dispatch(self) -> float | None:
        """Seconds in which the host dispatches an operator of a layer, the mean of all processes; None of a GPU."""
        return mean(self.dispatches) / self.share if self.dispatches else None

    @property
    def layer(self) -> LayerRates | None:
        """FLOP/s in a layer's training on one device, the mean of all processes, which wait for each other; None of a GPU."""
        if not self.layer_rates:
            return None
        return {
            "products": mean(each["products"] for each in self.layer_rates) * self.share,
            "attention": mean(each["attention"] for each in self.layer_rates) * self.share,
        }

    def product(self, precision: str, side: int | None = None) -> float | None:
        """FLOP/s of a product of this size, else of the largest, on one device; None where none was measured."""
        found = [each for each in self.products if each.precision == precision and side in (None, each.side)]
        return self.rate(max(found, key=lambda each: each.side).rates) if found else None


def measure_devices(kind: Kind | None, devices: int | None, show: Callable[[str], object]) -> DeviceMeasurement | Problem:
    """Measure this machine in a child process; `kind` None is a GPU where there is one, `devices` None all GPUs, or two processes of a CPU.

    `show` is called with what is measured next. Returns the problem where there are no such devices or measuring fails.
    """
    from msgspec import ValidationError, convert

    from ..system.json_child import ask_json_child

    answer: dict[str, Any] = {}
    limit = time_limit(PATIENCE)

    def on_message(message: dict[str, Any]) -> None:
        answer.update(message)
        if "progress" in message:
            show(message["progress"])

    try:
        child = ask_json_child(MODULE, {"kind": kind, "devices": devices}, on_message, seconds=limit)
        if "problem" in answer:
            return Problem(rule="probe", says=answer["problem"], mend=answer["mend"])
        return convert(answer["found"], DeviceMeasurement)
    except (OSError, ValidationError) as error:
        why = str(error)
    except KeyError:
        late = child.status == -signal.SIGKILL
        why = f"it did not end in {limit:.0f} s" if late else child.complaint or f"the process that measured ended with {child.status}"
    return Problem(rule="probe", says=f"this machine could not be measured: {why}")
