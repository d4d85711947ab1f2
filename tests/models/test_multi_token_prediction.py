"""Multi-token prediction (arXiv:2412.19437 section 2.2): losses and gradients are those of plain torch and of transformers' layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch.nn.functional import cross_entropy, embedding, silu  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.small_models import B, S, batch_of, gradients, keys_of, module_of, run_of  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED  # noqa: E402
from distrain.trainer.layers.transformer.multi_token_prediction import further_tokens  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.families import op_table  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.weights import read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.models.ops.op_table import parameter_count  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Model, Run  # noqa: E402
from distrain.trainer.spec.sections.mtp import Mtp  # noqa: E402

WEIGHT, MODULES = 0.4, 2


def mtp_run(name: str, **changes: Any) -> Run:
    return run_of(name, **{"model__mtp__layers": MODULES, "model__mtp__weight": WEIGHT, **changes})


def shifted(rows: Any, far: int, last: int) -> Any:
    """Rows [B, S] whose element i is that of i + far, and past the end `last`; element by element."""
    return torch.tensor([[int(row[at + far]) if at + far < S else last for at in range(S)] for row in rows])


def mean_of_losses(next_logits: list[Any], labels: Any, documents: Any = None) -> Any:
    """Equations 24 and 25: each module's sum of losses by all labels of the model's own loss."""
    count, sums = (labels != IGNORED).sum(), []
    for far, logits in enumerate(next_logits):
        wanted = shifted(labels, far, IGNORED)
        if documents is not None:
            wanted = torch.where(shifted(documents, far, -1) == documents, wanted, IGNORED)
        sums.append(cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / count)
    return sums[0] + WEIGHT / MODULES * sum(sums[1:]), sums


class PlainLlama:
    """A Llama by its weights alone, with the modules of arXiv:2412.19437 figure 3."""

    def __init__(self, module: Any, run: Run) -> None:
        self.weights = {name: each.detach().clone().requires_grad_() for name, each in named_weights(module, run)}
        self.model = run.model

    def __getitem__(self, name: str) -> Any:
        return self.weights[name]

    def norm(self, name: str, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.norm_eps) * self[f"{name}.weight"]

    def layer(self, at: str, x: Any, starts: Any) -> Any:
        size, kv = self.model.head_dim or 0, self.model.kv_heads or 0
        normed, half = self.norm(f"{at}.norm1", x), size // 2
        angles = torch.arange(S)[:, None] * self.model.rope_base ** (-2 * torch.arange(half, dtype=x.dtype) / size)

        def heads(part: str, many: int, turns: bool) -> Any:
            split = (normed @ self[f"{at}.attention.{part}.weight"]).view(B, S, many, size).transpose(1, 2)
            if not turns:
                return split
            one, two = split[..., :half], split[..., half:]
            return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)

        query = heads("query", self.model.heads, True)
        key, value = (heads(part, kv, part == "key").repeat_interleave(self.model.heads // kv, 1) for part in ("key", "value"))
        places = torch.arange(S)
        seen = (places <= places[:, None]) & (places >= starts[:, :, None])
        scores = (query @ key.mT / size**0.5).masked_fill(~seen[:, None], -torch.inf)
        x = x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) @ self[f"{at}.attention.out.weight"]
        normed = self.norm(f"{at}.norm2", x)
        return x + (silu(normed @ self[f"{at}.mlp.gate.weight"]) * (normed @ self[f"{at}.mlp.up.weight"])) @ self[f"{at}.mlp.down.weight"]

    def next_logits(self, tokens: Any, documents: Any = None) -> list[Any]:
        """The logits of the model, and of each module."""
        documents = torch.zeros_like(tokens) if documents is None else documents
        starts = torch.tensor([[next(at for at in range(S) if row[at] == each) for each in row] for row in documents])
        x = embedding(tokens, self["embedding.weight"])
        for index in range(self.model.layers):
            x = self.layer(f"layers.{index}", x, starts)
        states = [self.norm("norm", x)]
        for index in range(MODULES):
            at, ahead = f"mtp.{index}", embedding(shifted(tokens, index + 1, 0), self["embedding.weight"])
            joined = torch.cat((self.norm(f"{at}.embedding_norm", ahead), self.norm(f"{at}.hidden_norm", states[-1])), -1)
            states.append(self.norm(f"{at}.norm", self.layer(f"{at}.layer", joined @ self[f"{at}.join.weight"], starts)))
        head = self.weights.get("head.weight")
        return [state @ (self["embedding.weight"].mT if head is None else head) for state in states]


def documents_of_rows() -> Any:
    """Rows of several documents: of many tokens, of one, of two."""
    ends = (((0, 10), (10, 11), (11, S)), ((0, S),), ((0, 2), (2, 4), (4, S)))
    return torch.tensor([[at for at, (first, end) in enumerate(row) for _ in range(first, end)] for row in ends])


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("changes", [{}, {"model__tied": True}, {"parallel__recompute": "full", "train__loss_chunks": 3}], ids=str)
def test_llamas_losses_and_gradients_are_those_of_plain_torch(changes: Any, with_documents: bool) -> None:
    run = mtp_run("llama", **changes)
    module, (tokens, labels) = module_of(run), batch_of(run)
    documents = documents_of_rows() if with_documents else None
    if documents is not None:  # as batches have it: a document's last token has no label
        labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    plain = PlainLlama(module, run)
    total, (own, *others) = mean_of_losses(plain.next_logits(tokens, documents), labels, documents)
    total.backward()
    loss, found = gradients(module, tokens, labels, documents=documents, further=further_tokens(tokens, labels, documents, MODULES))
    torch.testing.assert_close(loss, own.detach())
    torch.testing.assert_close(module.further_losses[0] / (labels != IGNORED).sum(), sum(others).detach() / MODULES)
    assert found.keys() == plain.weights.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, plain[name].grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


# fmt: off
MIXTURES = {  # transformers' models: their config, and keys of ours
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    "glm4_moe":    {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True},
}
# fmt: on
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def random_folder(transformers: Any, model_type: str, folder: Path) -> Any:
    """Save transformers' model with as many more layers as modules, whose last ones are the modules' layers, in the names of DeepSeek's
    files; return it in float64, with norms and products of the modules."""
    torch.manual_seed(3)
    keys = MIXTURES[model_type]
    keys = SIZES | keys | {"num_hidden_layers": keys["num_hidden_layers"] + MODULES, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(model_type, **keys)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    hidden, first = SIZES["hidden_size"], MIXTURES[model_type]["num_hidden_layers"]
    for at in range(first, first + MODULES):
        layer = model.model.layers[at]
        for name in ("enorm", "hnorm", "last"):
            layer.register_module(name, torch.nn.RMSNorm(hidden, eps=config.rms_norm_eps, dtype=torch.float64))
        layer.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    save_folder(model, folder, first)
    return model


def save_folder(model: Any, folder: Path, layers: int) -> None:
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    held = {name.replace(".last.", ".shared_head.norm."): each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "num_nextn_predict_layers": MODULES}))


def run_of_folder(folder: Path, modules: int = MODULES) -> Run:
    model = read(read_hf_config(folder), Model)
    run = mtp_run("llama")
    return replace(run, model=replace(model, mtp=Mtp(layers=modules, weight=WEIGHT), vocab_multiple=1))


def module_of_folder(folder: Path, run: Run) -> Any:
    module = build_model(run, device=torch.device("cpu"), dtype=torch.float64)
    load_weights(module, read_hf_weights(folder, run))
    return module


def transformers_logits(model: Any, tokens: Any, layers: int) -> list[Any]:
    """The logits of the first layers, and of the modules whose layers are the others."""
    inner, states = model.model, list[Any]()
    x = inner.embed_tokens(tokens)
    places = torch.arange(S)
    mask = torch.zeros(S, S, dtype=torch.float64).masked_fill(places > places[:, None], -torch.inf)[None, None]
    turned = inner.rotary_emb(x, position_ids=places[None])
    for at, layer in enumerate(inner.layers):
        if at >= layers:
            ahead = inner.embed_tokens(shifted(tokens, at - layers + 1, 0))
            x = layer.eh_proj(torch.cat((layer.enorm(ahead), layer.hnorm(states[-1])), -1))
        x = layer(x, attention_mask=mask, position_ids=places[None], position_embeddings=turned)
        x = x[0] if isinstance(x, tuple) else x
        if at == layers - 1:
            states.append(inner.norm(x))
        elif at >= layers:
            states.append(layer.last(x))
    return [model.lm_head(state) for state in states]


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_losses_and_gradients_are_those_of_transformers_layers(model_type: str, tmp_path: Path, transformers: Any) -> None:
    """Gradients are saved as weights, so that each is read by the name of the weight that it is of. Norms and routers of transformers
    compute in float32."""
    theirs = random_folder(transformers, model_type, tmp_path / "weights")
    run = run_of_folder(tmp_path / "weights")
    module, (tokens, labels) = module_of_folder(tmp_path / "weights", run), batch_of(run)
    total, (own, *others) = mean_of_losses(transformers_logits(theirs, tokens, run.model.layers), labels)
    total.backward()
    loss, found = gradients(module, tokens, labels, further=further_tokens(tokens, labels, None, MODULES))
    torch.testing.assert_close(loss, own.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(module.further_losses[0] / (labels != IGNORED).sum(), sum(others).detach() / MODULES, rtol=1e-6, atol=0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    save_folder(theirs, tmp_path / "gradients", run.model.layers)
    expected = dict(read_hf_weights(tmp_path / "gradients", run))
    assert found.keys() == {name for name in expected if not name.endswith("router.bias")}
    largest = max(float(grad.abs().max()) for grad in found.values())
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-6 * largest, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("model_type", MIXTURES)
def test_files_hold_the_modules_as_deepseeks_files_do(model_type: str, tmp_path: Path, transformers: Any) -> None:
    """With a copy of the embedding and of the head for each module; transformers leaves these layers in the folder."""
    random_folder(transformers, model_type, tmp_path / "theirs")
    run = run_of_folder(tmp_path / "theirs")
    module = module_of_folder(tmp_path / "theirs", run)
    write_hf_folder(named_weights(module, run), run, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    layers = [f"model.layers.{run.model.layers + index}" for index in range(MODULES)]
    for layer in layers:
        assert torch.equal(ours.pop(f"{layer}.embed_tokens.weight"), ours["model.embed_tokens.weight"])
        assert torch.equal(ours.pop(f"{layer}.shared_head.head.weight"), ours["lm_head.weight"])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == MODULES
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float64, experts_implementation="eager"
    )
    assert not said["missing_keys"]
    assert not said["mismatched_keys"]
    assert all(name.startswith(tuple(layers)) for name in said["unexpected_keys"])
    tokens, _ = batch_of(run)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, module.logits(tokens), rtol=0, atol=1e-5)


def test_a_folder_may_hold_fewer_modules(tmp_path: Path, transformers: Any) -> None:
    random_folder(transformers, "deepseek_v3", tmp_path)
    found = {name for name, _ in read_hf_weights(tmp_path, run_of_folder(tmp_path, modules=MODULES + 1))}
    assert found == {name for name, _ in read_hf_weights(tmp_path, run_of_folder(tmp_path))}
    assert {name.split(".")[1] for name in found if Mtp.owns(name)} == {"0", "1"}


def test_a_llamas_folder_holds_no_modules(tmp_path: Path, transformers: Any) -> None:
    run = mtp_run("llama")
    module = module_of(run, torch.float32)
    write_hf_folder(named_weights(module, run), run, tmp_path)
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(Mtp.owns(name) for name, _ in read_hf_weights(tmp_path, run))
    tokens, _ = batch_of(run)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, module.logits(tokens), rtol=0, atol=1e-5)


def test_labels_of_another_document_do_not_count_where_a_number_comes_back() -> None:
    """Documents are marked by any number that changes from one to the next."""
    tokens, labels = torch.arange(5)[None], torch.arange(1, 6)[None]
    there_and_back, apart = (torch.tensor([row]) for row in ([0, 1, 0, 0, 0], [0, 1, 2, 2, 2]))
    assert torch.equal(further_tokens(tokens, labels, there_and_back, 2), further_tokens(tokens, labels, apart, 2))


def test_without_further_tokens_modules_do_nothing() -> None:
    """As in evaluation and in generation."""
    run = mtp_run("llama")
    module, (tokens, labels) = module_of(run), batch_of(run)
    plain = build_model(run_of("llama"), device=torch.device("cpu"), dtype=torch.float64)
    load_weights(plain, ((name, each) for name, each in named_weights(module, run) if not Mtp.owns(name)))
    assert torch.equal(module(tokens, labels)[0], plain(tokens, labels)[0])
    assert torch.equal(module.logits(tokens), plain.logits(tokens))
    assert module.further_losses == []


def test_dropout_of_a_modules_layer_is_drawn_apart_from_the_others() -> None:
    run = mtp_run("gpt", model__dropout=0.3)
    module = module_of(run)
    layers = [each.dropout1.address for each in (*module.layers.values(), *(further.layer for further in module.mtp.values()))]
    assert len(set(layers)) == len(layers) == run.model.layers + MODULES
    tokens, labels = batch_of(run)
    further = further_tokens(tokens, labels, None, MODULES)
    losses = [module(tokens, labels, keys=keys_of(step), further=further)[0] for step in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1])
    held = [float(each) for each in module.further_losses]
    assert held[0] == held[1] != held[2]


def test_deepseek_v3s_module_has_the_published_parameters() -> None:
    """11.5 billion of its own (README_WEIGHTS.md of deepseek-ai/DeepSeek-V3), beside the shared embedding and head."""
    runs = [load_recipe("deepseek_v3", [f"model.mtp.layers={many}"]) for many in (0, 1)]
    counts = [parameter_count(op_table(run), run.model.layer_groups) for run in runs]
    assert counts[1] - counts[0] == pytest.approx(11.5e9, rel=0.01)
