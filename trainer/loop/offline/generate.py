"""Text generation from a run's newest checkpoint.

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
from ..data.tokenize.detokenize import detokenizer
from ..data.tokenize.tokenizer import Tokenizer, load_tokenizer
from .chat_prompt import chat_prompt
from .load_run import load_model, load_saved_run
from .verb_process import run_verb, write_problem, write_stdout

if TYPE_CHECKING:
    from ...layers.transformer.transformer import Transformer
    from ...models.hf.module import CausalLM


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The prompt, and how each of at most `tokens` is drawn: from softmax(logits / temperature) of the `top_k` likeliest."""

    prompt: str
    tokens: int
    temperature: float  # 0: always the likeliest
    top_k: int | None
    seed: int
    tokenizer: str | None  # None: the run's
    step: int | None = None  # of the checkpoint; None: the newest
    ema: bool = False  # with the average of the weights
    chat: bool = False  # the prompt is a user's turn, rendered by the tokenizer's chat template, and the answer alone is printed


def main() -> int:
    """Generate with the arguments of the command line."""
    folder, options = sys.argv[1:]
    text = sys.stdin.read() if options == "-" else options
    return run_verb(lambda: generate(Path(folder), Sampling(**json.loads(text))))


def generate(folder: Path, wanted: Sampling) -> None:
    """Print the prompt and the generated text, of a chat the answer alone, token by token; raises Unreadable, LoadFailed."""
    found = load_saved_run(folder, step=wanted.step, ema=wanted.ema)
    run = found.run
    for remark in found.remarks:
        write_problem(remark)
    tokenizer = _tokenizer(run, wanted)
    text, ends = wanted.prompt, frozenset({tokenizer.end})
    if wanted.chat:
        text, ends = chat_prompt(_shown_text(text), wanted.tokenizer or run.data.tokenizer, tokenizer)
    prompt = _prompt(run, text, tokenizer)
    device = torch.device("cuda" if run.cluster.device.kind == "cuda" and torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention is planned anew for each length, and every token has its own
    module = load_model(found, device)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not wanted.chat:
        write_stdout(_shown_text(wanted.prompt))
    decoder = detokenizer(tokenizer)
    for token in generate_tokens(module, prompt, _context(run), wanted, size=tokenizer.size):
        if token in ends:
            break
        write_stdout(decoder.decode(token))
    write_stdout(f"{decoder.flush()}\n")


def _shown_text(words: str) -> str:
    """Return words of the command line, the bytes of which may be no UTF-8, as text."""
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def generate_tokens(module: Transformer | CausalLM, prompt: Tensor, context: int, wanted: Sampling, *, size: int) -> Iterator[int]:
    """Yield tokens below `size` that follow a prompt [S]; the model sees the last `context` tokens."""
    drawn = torch.Generator().manual_seed(wanted.seed)  # on the host: the same numbers on every device
    device = next(module.parameters()).device
    window = prompt[-context:].to(device)[None]  # [1, S]
    with torch.inference_mode():
        cache = None
        for _ in range(wanted.tokens):
            logits, cache = module.next_logits(window, cache)
            token = sample_token(logits[:size].float().cpu(), wanted.temperature, wanted.top_k, drawn)
            yield token
            window = torch.cat((window, torch.tensor([[token]], device=device)), dim=1)
            if window.shape[1] > context:  # the cache is of other positions
                window, cache = window[:, -context:], None


def sample_token(logits: Tensor, temperature: float, top_k: int | None, drawn: torch.Generator) -> int:
    """Draw a token by its logits [V]; raises Unreadable where they are not finite."""
    if not bool(logits.max().isfinite()):
        raise _refusal(
            "the model's logits are not finite: the run has diverged", "use an earlier checkpoint, or train with a smaller optim.lr"
        )
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax((values - values[0]).double() / temperature, dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=drawn)])


def _tokenizer(run: Run, wanted: Sampling) -> Tokenizer:
    """Return the tokenizer that the user names, or the run's; raises Unreadable where its ids do not fit the model."""
    name = wanted.tokenizer or run.data.tokenizer
    if name == "bytes" and wanted.tokenizer is None and run.data.name in ("tokens", "synthetic") and run.model.vocab != 256:
        raise _refusal(f"the run was trained on data={run.data.name}, which names no tokenizer", "name one: --tokenizer PATH")
    return _fitting_tokenizer(load_tokenizer(name, run.data.end), run.model.vocab)


def _fitting_tokenizer(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    if tokenizer.size > vocab:
        raise _refusal(
            f"the tokenizer has {tokenizer.size:,} tokens and the model {vocab:,}",
            "name the one that the run was trained with: --tokenizer PATH",
        )
    return tokenizer


def _prompt(run: Run, text: str, tokenizer: Tokenizer) -> Tensor:
    """Return the prompt's ids [S], at least one; raises Unreadable. Warn of a prompt longer than the context, which is cut."""
    try:
        ids = torch.tensor(tokenizer.encode(os.fsencode(text)).tolist(), dtype=torch.long)
    except UnicodeDecodeError:
        raise _refusal("the prompt is not UTF-8, which the tokenizer needs", "encode it as UTF-8") from None
    context = _context(run)
    if len(ids) > context:
        write_problem(f"the prompt has {len(ids):,} tokens and the model sees {context:,}: only the last {context:,} count")
    if len(ids):
        return ids
    if tokenizer.end is None:
        raise _refusal("--prompt is empty, and the tokenizer has no token that starts a text", "give a prompt of at least one word")
    return torch.tensor([tokenizer.end])


def _context(run: Run) -> int:
    """Return the tokens that the model sees at once: the rows of its position table, or the sequence length of its training."""
    return (run.model.context if run.model.positions == "learned" else None) or run.train.seq


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="generate", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
