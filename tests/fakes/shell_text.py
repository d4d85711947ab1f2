"""Names, paths and values with text that a shell would execute; text that is executed creates the file `pwned`."""

from __future__ import annotations

from hypothesis import Phase
from hypothesis import strategies as some

from distrain.trainer.launch.commands.deepspeed import PASTED_PREFIXES, PYTHON_PATHS

EVIL = (
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "'\"",
    "a b",
    "\ntouch pwned\n",
    "\r\ntouch pwned",
    "|touch pwned",
    "&& touch pwned",
    "> pwned",
    ";>pwned;",
    "$(>pwned)",
    "'$(touch pwned)'",
    "\\",
    "-oProxyCommand=touch pwned",
    "END\ntouch pwned\n",
    "*",
    "!! %h%n",
    "${IFS}",
    "~",
    "# é",
)
hostile = some.builds(
    "".join,
    some.lists(
        some.sampled_from(EVIL) | some.text(some.characters(codec="utf-8", exclude_characters="\0/"), max_size=8), min_size=1, max_size=3
    ),
)
ONCE = (Phase.generate,)  # no shrinking: an example starts several processes
plain = some.text("abz09._-", min_size=1, max_size=8).map(lambda word: f"w{word}")
variables = some.builds(
    "".join, some.tuples(some.sampled_from([*PASTED_PREFIXES, "NCCL_", "WANDB_", "HF_", ""]), some.just("_X") | hostile)
)
environments = some.builds(
    lambda paths, others: {**paths, **others},
    some.fixed_dictionaries({}, optional=dict.fromkeys(PYTHON_PATHS, plain))
    | some.dictionaries(some.sampled_from(PYTHON_PATHS), hostile, max_size=1),
    some.dictionaries(
        some.sampled_from(["PYTHONSTARTUP", "WANDB_API_KEY", "AWS_SECRET"]) | variables.filter(lambda name: name and "=" not in name),
        hostile,
        max_size=8,
    ),
)


def tame_but_one(count: int) -> some.SearchStrategy[list[str]]:
    """Draw `count` plain words; in half of the draws one of them is hostile."""
    words = some.lists(plain, min_size=count, max_size=count)
    return some.builds(
        lambda words, at, word: [word if number == at else each for number, each in enumerate(words)],
        words,
        some.integers(0, 2 * count - 1),
        hostile,
    )
