"""Text from a run's newest checkpoint.

Run it as `python -m distrain.trainer.loop.offline.generate RUN_DIR OPTIONS`: OPTIONS is JSON, or - to read it from stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ..data.detokenize import speller
from ..data.tokenizer import Tokenizer, tokenizer
from .exit_status import answered, say, tell
from .load_run import load_saved, model_of

if TYPE_CHECKING:
    from ...models.gpt.module import Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What follows what: at most so many tokens, each drawn from softmax(logits / temperature) of the `top_k` likeliest."""

    prompt: str
    tokens: int
    temperature: float  # 0: the likeliest
    top_k: int | None
    seed: int
    tokenizer: str | None  # None: the run's


def main() -> int:
    """Generate as the command line says."""
    folder, options = sys.argv[1:]
    said = sys.stdin.read() if options == "-" else options
    return answered(lambda: generate(Path(folder), Sampling(**json.loads(said))))


def generate(folder: Path, wanted: Sampling) -> None:
    """Print the prompt and what follows it, as it is made; raises Unreadable, LoadFailed."""
    found = load_saved(folder)
    run = found.run
    for remark in found.remarks:
        tell(remark)
    by = _tokenizer(run, wanted)
    prompt = _prompt(run, wanted.prompt, by)
    device = torch.device("cuda" if run.cluster.device.kind == "cuda" and torch.cuda.is_available() else "cpu")
    module = model_of(run, found.checkpoint, device)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    say(wanted.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    spell = speller(by)
    for token in following(module, prompt, _context(run), wanted, size=by.size):
        if token == by.end:
            break
        say(spell.spell(token))
    say(f"{spell.rest()}\n")


def following(module: Transformer, prompt: Tensor, context: int, wanted: Sampling, *, size: int) -> Iterator[int]:
    """Tokens below `size` that follow a prompt [S], each seen by the next as far as the context reaches."""
    drawn = torch.Generator().manual_seed(wanted.seed)  # on the host: the same numbers on any device
    device = next(module.parameters()).device
    window = prompt[-context:].to(device)[None]  # [1, S]
    with torch.inference_mode():
        for _ in range(wanted.tokens):
            last = module.hidden(window, None, None)[:, -1:]  # [1, 1, H]
            logits = module.head(last)[0, 0, :size].float().cpu()  # [V]
            token = choice(logits, wanted.temperature, wanted.top_k, drawn)
            yield token
            window = torch.cat((window, torch.tensor([[token]], device=device)), dim=1)[:, -context:]


def choice(logits: Tensor, temperature: float, top_k: int | None, drawn: torch.Generator) -> int:
    """One of the words by its logits [V]; raises Unreadable where they are no numbers to choose by."""
    if not bool(logits.max().isfinite()):
        raise _refused("the model's logits are not finite: the run has diverged", "take an earlier checkpoint, or a smaller optim.lr")
    if temperature == 0:
        return int(logits.argmax())
    values, words = logits.topk(min(top_k or len(logits), len(logits)))
    shares = torch.softmax((values - values[0]).double() / temperature, dim=0)
    return int(words[torch.multinomial(shares, 1, generator=drawn)])


def _tokenizer(run: Run, wanted: Sampling) -> Tokenizer:
    """The tokenizer that is named, or the run's; raises Unreadable where its ids are not the model's."""
    word = wanted.tokenizer or run.data.tokenizer
    if word == "bytes" and wanted.tokenizer is None and run.data.name in ("tokens", "synthetic") and run.model.vocab != 256:
        raise _refused(f"the run learnt from data={run.data.name}, which names no tokenizer", "say it: --tokenizer PATH")
    return _within(tokenizer(word, run.data.end), run.model.vocab)


def _within(by: Tokenizer, vocab: int) -> Tokenizer:
    if by.size > vocab:
        raise _refused(f"the tokenizer has {by.size:,} tokens and the model {vocab:,}", "name the one that the run learnt by: --tokenizer")
    return by


def _prompt(run: Run, text: str, by: Tokenizer) -> Tensor:
    """The prompt's ids [S], at least one; raises Unreadable. One that is too long is cut, and it is said."""
    try:
        ids = torch.tensor(by.encode(os.fsencode(text)).tolist(), dtype=torch.long)
    except UnicodeDecodeError:
        raise _refused("the prompt is no UTF-8, which the tokenizer reads", "") from None
    context = _context(run)
    if len(ids) > context:
        says = f"the prompt is {len(ids):,} tokens and the model sees {context:,}: its last {context:,} count"
        tell(says)
    if len(ids):
        return ids
    if by.end is None:
        raise _refused("--prompt is empty, and the tokenizer has no token that begins a text", "give a word to begin with")
    return torch.tensor([by.end])


def _context(run: Run) -> int:
    """Tokens that the model sees at once: rows of its position table, or what it was trained on."""
    return (run.model.context if run.model.positions == "learned" else None) or run.train.seq


def _refused(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="generate", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
