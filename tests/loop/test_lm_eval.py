"""lm-evaluation-harness reads an export of each family, and scores text as our own model does (`pip install 'distrain[eval]'`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.tests.fakes.hf_models import NEOX, write_config

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

torch = pytest.importorskip("torch")
pytest.importorskip("lm_eval", reason="lm-eval, which scores exports, is not installed: it brings 44 packages")

from distrain.trainer.loop.offline.export import export  # noqa: E402
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run  # noqa: E402

SMALL = (
    *("data=stdlib", "cluster=1x1", "train.batch=4", "train.microbatch=4", "train.seq=32", "train.steps=2", "optim.warmup=0"),
    *("train.evaluate.every=0", "log.every=2"),
)
KINDS = {
    "gpt": ("model=tiny",),
    "llama with lora": ("model=tiny_llama", "model.lora.rank=4", "optim.lr=0.1"),
    "moe": ("model=tiny_moe",),
    "hf": ("model.dropout=0",),
}
TEXTS = (("def", " main():"), ("import o", "s\n"), ("    return", " x + 1"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_harness_scores_an_export_as_our_model_does(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    words = (*KINDS[kind], *([f"model.hf={write_config(tmp_path / 'neox', NEOX)}"] if kind == "hf" else []))
    folder = ranks.train(tmp_path / "run", "quickstart", *SMALL, *words).folder
    export(folder, tmp_path / "out", "fp32")

    models: Any = import_module("lm_eval.models.huggingface")
    instances: Any = import_module("lm_eval.api.instance")
    harness = models.HFLM(pretrained=str(tmp_path / "out"), device="cpu", dtype="float32", batch_size=1)
    requests = [instances.Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in TEXTS]
    found = load_saved_run(folder)
    module = load_model(found, torch.device("cpu"))
    for (context, continuation), (told, _) in zip(TEXTS, harness.loglikelihood(requests, disable_tqdm=True), strict=True):
        tokens = torch.tensor([list((context + continuation).encode())])
        with torch.no_grad():
            scores = torch.log_softmax(module.logits(tokens[:, :-1]).double(), -1)
        own = scores[0].gather(-1, tokens[0, 1:, None])[-len(continuation) :].sum()
        assert told == pytest.approx(float(own), abs=1e-4)
