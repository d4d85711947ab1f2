"""What a step's row says of a mixture's routing follows from what its tokens chose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.models.moe.module import mixture_layers  # noqa: E402
from distrain.trainer.models.moe.routing import near_tie_count, route  # noqa: E402
from distrain.trainer.models.moe.routing_counts import (  # noqa: E402
    RoutingCounts,
    count_routing,
    mixture_layer_names,
    take_router_losses,
    take_routing_counts,
)
from distrain.trainer.spec.run import Run  # noqa: E402

CPU = torch.device("cpu")
E = 4


def run_of(*words: str) -> Run:
    return load_recipe("quickstart", ("data=synthetic", *words))


def module_of(run: Run) -> Any:
    return build_model(run, device=CPU, dtype=torch.float32, seed=3)


@pytest.mark.parametrize("capacity", [None, 5])
def test_a_layer_counts_choices_computed_copies_and_near_ties(capacity: int | None) -> None:
    """A copy beyond an expert's capacity was chosen all the same, and is not computed."""
    logits = torch.randn(3, 24, E, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = 1.0
    routing = route(logits, 2, capacity)
    *loads, computed, near_ties = count_routing(routing, near_tie_count(logits, 2, logits.dtype)).tolist()
    chosen = [Counter(sequence.topk(2, dim=-1).indices.flatten().tolist()) for sequence in logits]
    assert loads == [sum(each[one] for each in chosen) for one in range(E)]
    assert computed == sum(min(each[one], capacity or 100) for each in chosen for one in range(E))
    assert near_ties == 1


def test_figures_are_of_the_busiest_expert_of_the_layer_where_its_share_is_most() -> None:
    rows = [[10, 10, 10, 10, 40, 2], [0, 24, 0, 8, 30, 5], [3, 3, 3, 11, 18, 0]]
    run = run_of("model=tiny_moe", "model.layers=3")
    figures = RoutingCounts(run.model, torch.tensor(rows).flatten().double()).figures()
    assert figures == {"near_ties": 7, "expert_load": 3.0, "busiest_layer": 1, "idle_experts": 2}
    limited = run_of("model=tiny_moe", "model.layers=3", "model.capacity=1.5")
    counts = RoutingCounts(limited.model, torch.tensor(rows).flatten())
    assert counts.figures() == {**figures, "dropped_copies": round(4 / 92, 6)}
    shared = RoutingCounts(run_of("model=tiny_moe", "model.layers=3", "model.capacity=1.25").model, torch.tensor(rows).flatten(), 2)
    assert shared.figures()["ep_load"] == round((1 + 1.25 + 1.25) / 3, 4), "a rank computes no more than the capacity of its experts"
    assert counts.loads("layers.1").tolist() == [0, 24, 0, 8]
    shared = RoutingCounts(run.model, torch.tensor(rows).flatten(), 2)
    assert shared.figures() == {**figures, "ep_load": round((1 + 1.5 + 1.4) / 3, 4)}
    assert shared.rank_loads(["layers.0", "layers.1", "layers.2"]) == pytest.approx([50 / 46, 42 / 46])
    assert shared.rank_loads(["layers.2"]) == pytest.approx([0.6, 1.4])
    behind_dense = run_of("model=tiny_moe", "model.layers=5", "model.dense_layers=2")
    assert RoutingCounts(behind_dense.model, torch.tensor(rows).flatten()).figures() == {**figures, "busiest_layer": 3}


def test_counts_of_a_step_without_tokens_are_no_error() -> None:
    run = run_of("model=tiny_moe", "model.layers=1", "model.capacity=1")
    figures = RoutingCounts(run.model, torch.zeros(E + 2)).figures()
    assert (figures["expert_load"], figures["idle_experts"], figures["dropped_copies"]) == (0, E, 0)


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("model=tiny_moe", "model.layers=4", "model.dense_layers=2"), "layers.3"),
        (("model=tiny_hybrid",), "layers.1.1"),
        (("model=tiny_mla", "model.layers=3", "model.dense_layers=1", "model.mtp.layers=2"), "mtp.1.layer"),
    ],
)
def test_layers_are_counted_in_the_order_of_the_model(words: tuple[str, ...], last: str) -> None:
    run = run_of(*words)
    module = module_of(run)
    names = mixture_layer_names(run.model)
    assert (tuple(mixture_layers(module)), len(names), names[-1]) == (names, run.model.mixture_layers, last)
    own = run.model.experts + 2
    module.routing_counts = {name: torch.full((own,), at + 1) for at, name in reversed(list(enumerate(names)))}
    found = take_routing_counts([module], run.model, CPU).view(len(names), own)
    assert found.tolist() == [[at + 1] * own for at in range(len(names))]
    assert not module.routing_counts


def test_evaluation_counts_nothing_and_training_counts_all_micro_batches() -> None:
    run = run_of("model=tiny_moe", "model.layers=2", "model.aux_loss=0.25", "model.router.z_loss=0.0")
    module, tokens = module_of(run), torch.randint(run.model.vocab, (2, 16), generator=torch.Generator().manual_seed(7))
    for layer in mixture_layers(module).values():
        layer.router.weight.data.zero_()  # each expert has the same share of scores: a sequence's imbalance is 1
    module.eval()
    module(tokens, tokens)
    assert not module.routing_counts
    assert not take_router_losses(module)
    module.train()
    for _ in range(3):
        module(tokens, tokens)
    counts = take_routing_counts([module], run.model, CPU).view(2, -1)
    assert counts[:, :-2].sum(1).tolist() == [3 * tokens.numel() * run.model.top_k] * 2
    assert counts[:, -1].tolist() == [3 * tokens.numel()] * 2
    added = [float(each) / tokens.numel() for each in take_router_losses(module)]
    assert added == pytest.approx([2 * 0.25] * 3)
