"""Build a run's model: its parameters by the names and shapes of its op table, with their initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layers.counter_rng import normal_block
from ..spec.derived.width_scaling import initial_divisor
from ..spec.problem import Problem, Unreadable
from ..spec.run import Model, Run
from ..spec.sections.lora import Lora
from .families import FAMILIES, family_of, op_table
from .ops.op_table import OpTable, Parameter, model_constants, model_parameters, round_up

if TYPE_CHECKING:
    from ..layers.rank_group import Group
    from ..layers.tensor_parallel import TensorParallel
    from ..layers.transformer.context_parallel import ContextParallel
    from ..layers.transformer.transformer import Transformer

# Weights whose outputs are added to the residual stream.
RESIDUAL_WEIGHTS = ("attention.out.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")
BEGIN_AT_ONE = (".dt_bias", ".gated_norm.weight")  # whatever model.norm is: of linear attention
RATES = (0.01, 16.0)

Sizes = tuple[int, ...]


def build_model(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None = None) -> Transformer:
    """Build a run's whole model on one rank, with initial values drawn from a seed; without a seed its values are undefined."""
    table = op_table(run)
    logical: Mapping[str, int] = table.sizes
    padded = {**logical, "vocab": round_up(run.model.vocab, run.model.vocab_multiple)}
    parameters: dict[str, nn.Parameter] = {}
    for parameter in model_parameters(table, range(run.model.layer_groups)):
        tensor = torch.empty(parameter.shape(padded), device=device, dtype=dtype)
        if seed is not None and device.type != "meta":
            shape = parameter.shape(logical)
            values = initial_values(parameter.name, shape, (0,) * len(shape), shape, run=run, seed=seed, device=device)
            copy_padded(tensor, values)
        parameters[parameter.name] = nn.Parameter(tensor, requires_grad=run.model.is_trained(parameter.name))
    constants = zero_constants(table, range(run.model.layer_groups), device)
    module = build_module(parameters | constants, run)
    assert {name for name, _ in module.named_parameters()} == parameters.keys(), "the module and the op table name different parameters"
    return module


def zero_constants(table: OpTable, layers: range, device: torch.device, *, last: bool = True) -> dict[str, nn.Parameter]:
    """Return the constants of these layers by logical name, zeros in float32, with `last` those of the modules behind the head too: what
    training begins from without published weights."""
    made = ((each.name, torch.zeros(each.shape(table.sizes), device=device)) for each in model_constants(table, layers, last=last))
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in made}


def named_constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every constant that a module holds, by logical name."""
    for prefix, each in module.named_modules():
        yield from ((f"{prefix}.{name}", tensor) for name, tensor in getattr(each, "constants", {}).items())


def build_module(
    parameters: Mapping[str, nn.Parameter],
    run: Run,
    tp: TensorParallel | None = None,
    *,
    cp: ContextParallel | None = None,
    ep: Group | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> Transformer:
    """Build the module of a run's family around parameters and constants by their logical names: the whole model, or a part of its layers.

    Raises Unreadable where the family has no module.
    """
    make = module_of_family(run.model)
    assert not family_of(run.model).made_by_transformers, "transformers makes its own parameters"
    module: Transformer = make(parameters, run, tp, cp=cp, ep=ep, layers=layers, first=first, last=last)
    return module


def module_of_family(model: Model) -> Callable[..., Any]:
    """Import the module that a model's family names; raises Unreadable where it names none."""
    path = family_of(model).module
    if path is None:
        known = ", ".join(name for name, row in FAMILIES.items() if row.module)
        says = f"model.family={model.family} can be planned, but not trained: it has no module"
        raise Unreadable([Problem(rule="family", says=says, mend=f"families {known} have one")])
    file, _, name = path.partition(":")
    factory: Callable[..., Any] = getattr(import_module(file), name)
    return factory


def initial_values(name: str, shape: Sizes, offset: Sizes, size: Sizes, *, run: Run, seed: int, device: torch.device) -> Tensor:
    """Return the initial values, float32, of the block of `size` at `offset` of a weight of logical `shape`: normal, as model.init and
    optim.mup say; norms 1; 0 for biases, for sinks, and for norms that scale by 1 + their weight. Rates of a delta rule's decay are drawn.

    LoRA's B is 0, and its A has deviation 1 / sqrt(3 rows), as PEFT's uniform one.
    """
    model = run.model
    if name.endswith(BEGIN_AT_ONE):
        return torch.ones(size, device=device)
    if name.endswith(".a_log"):  # logarithms of rates drawn evenly, as transformers draws Qwen3-Next's
        low, high = RATES
        evenly: Tensor = torch.special.ndtr(normal_block(seed, name, shape, offset, size, device))
        return evenly.mul_(high - low).add_(low).log_()
    if name.endswith(("bias", ".sinks")):
        return torch.zeros(size, device=device)
    if len(shape) == 1:
        return torch.zeros(size, device=device) if model.norm == "rmsnorm1p" else torch.ones(size, device=device)
    if name.endswith(".lora_b.weight"):
        return torch.zeros(size, device=device)
    if name.endswith(".lora_a.weight"):
        return normal_block(seed, name, shape, offset, size, device).div_(sqrt(3 * shape[-2]))
    is_scaled = model.init.scale_residual and name.endswith(RESIDUAL_WEIGHTS)
    deviation = model.init.std / sqrt(2 * model.layers) if is_scaled else model.init.std
    return normal_block(seed, name, shape, offset, size, device).mul_(deviation / initial_divisor(run, name))


def copy_padded(padded: Tensor, logical: Tensor) -> None:
    """Copy a logical tensor into one whose vocabulary is padded, and set the padding to 0."""
    with torch.no_grad():
        padded.zero_()
        padded[tuple(slice(size) for size in logical.shape)].copy_(logical)


def logical_view(padded: Tensor, parameter: Parameter, sizes: Mapping[str, int]) -> Tensor:
    """Return a view of a padded tensor without its padding."""
    return padded.detach()[tuple(slice(size) for size in parameter.shape(sizes))]


def named_weights(module: nn.Module, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a whole model by logical name, in the op table's order and its logical shape, as views of the parameters; then
    its constants."""
    parameters = dict(module.named_parameters())
    table = op_table(run)
    for parameter in model_parameters(table, range(run.model.layer_groups)):
        yield parameter.name, logical_view(parameters[parameter.name], parameter, table.sizes)
    yield from named_constants(module)


def load_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, partial: bool = False) -> None:
    """Copy weights and constants by logical name into a whole model; raises KeyError where a weight is missing, unless these are a part of
    the weights."""
    parameters, constants = dict(module.named_parameters()), dict(named_constants(module))
    for name, tensor in tensors:
        copy_padded(constants[name] if name in constants else parameters.pop(name), tensor)
    if parameters and not partial:
        raise KeyError(f"no weights for {', '.join(parameters)}")


def add_lora(weight: Tensor, a: Tensor, b: Tensor, lora: Lora) -> Tensor:
    """Return a target's weight [inner, outer] with LoRA's scale x A [inner, rank] B [rank, outer] added (arXiv:2106.09685)."""
    return weight + lora.scale * (a @ b)
