"""A random legal recipe: a tiny model and options of every group, and keys that are added as long as the project's rules allow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from random import Random

from ...cli.keys.config_files import options
from ...trainer.prove.trials.layouts import ONE_PROCESS
from ...trainer.spec.read import value_text
from ...trainer.spec.run import Run
from .data_files import DataFiles
from .drawn_values import NO_VALUE, drawn_value, leaf_keys
from .legal_trials import LegalTrials
from .typed_recipe import DrawnRecipe

RANKS = 8  # the most of a layout
STEPS = (3, 3, 4, 4, 5)
MICROBATCHES = (
    1,
    2,
    2,
    4,
)  # of one process in a step: their passes take most of a proof's time, and layouts have micro-batches of their own
TRIES, MOST_ADDED = 16, 10  # bundles of keys that are tried for a recipe, and that it keeps
MOST_TOGETHER = 3  # keys of one section that are tried at once: many have an effect only together

# Sections of which every key is drawn by its type, but for LEFT_OUT.
SECTIONS = ("model", "train", "optim", "data", "parallel")
LEFT_OUT: Mapping[str, str] = {  # by its beginning -> why
    "model.family": "conf/model has the families",
    "model.hf": "a path",
    "model.parameters": "written by distrain",
    "model.weights": "a path",
    "model.lora.weights": "a path",
    "model.layers": "the drawn models have as many as their stages need",
    "train.batch": "drawn for every recipe",
    "train.seq": "drawn for every recipe",
    "train.microbatch": "drawn for every recipe",
    "train.steps": "prove sets it",
    "train.tokens": "prove sets the steps",
    "train.evaluate": "prove sets it",
    "train.rampup": "drawn as a whole",
    "train.compile": "a layer compiles for minutes here",
    "train.precision": "drawn for every recipe",
    "train.skip": "no step of these runs is skipped but spikes",
    "optim.gradient_copy": "only planned",
    "data.name": "conf/data has the names",
    "data.path": "drawn with the data",
    "data.weights": "drawn with the data",
    "data.stages": "drawn with the data",
    "data.validate": "drawn with the data",
    "data.tokenizer": "a path",
    "data.cache": "a path",
    "parallel.dp": "of a layout", "parallel.tp": "of a layout", "parallel.pp": "of a layout", "parallel.cp": "of a layout",
    "parallel.ep": "of a layout", "parallel.zero": "of a layout", "parallel.shard": "of a layout", "parallel.gather": "of a layout",
    "parallel.schedule": "of a layout", "parallel.actions": "of a layout", "parallel.chunks": "of a layout",
    "parallel.stages": "of a layout", "parallel.sequence": "of a layout", "parallel.reduce": "of a layout",
    "parallel.servers": "of a layout", "parallel.staleness": "of a layout", "parallel.sync.every": "of a layout",
    "parallel.compress.name": "of a layout", "parallel.compress.rank": "of a layout", "parallel.offload": "of a layout",
    "parallel.scatter": "only planned",
    "parallel.ep_load": "only planned",
    "parallel.bucket": "drawn for every recipe",
}  # fmt: skip
NARROWED = {"model.init.std": (0.01, 0.02, 0.05)}  # at 1.5 rounding grew a thousandfold a step, in float64 too
# Tried on some recipes for themselves, as one key of many is seldom drawn.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "model.dropout": ("0.1", "0.3"),
    "model.window": ("4", "8"),
    "model.mtp.layers": ("1", "2"),
    "model.lora.rank": ("2", "4"),
    "data.documents": ("true",),
    "train.loss_chunks": ("2", "4"),
    "optim.ema": ("0.5", "0.9"),
    "optim.moments": ("bf16", "int8"),
    "optim.mup": ("16", "32"),
}
DOCUMENT_END = "7"  # the token that ends a document of tokens
FEATURE_SHARE = 0.2  # of the recipes that try each
PRECISIONS = ("fp32",) * 9 + ("bf16", "fp16", "fp8")
MOSTLY = 0.8  # share of draws that take the common choice


def drawn_keys() -> dict[str, object]:
    """Return the type of every key that is drawn by it."""
    found = leaf_keys(Run)
    return {
        key: hint
        for key, hint in found.items()
        if key.partition(".")[0] in SECTIONS and not any(key == start or key.startswith(f"{start}.") for start in LEFT_OUT)
    }


def draw_recipe(random: Random, files: DataFiles, trials: LegalTrials, folder: str) -> DrawnRecipe:
    """Draw a legal recipe whose run folders are in `folder`; `trials` says what is legal, and counts what is refused."""
    while not trials.is_legal(recipe := _begin(random, files, folder), ONE_PROCESS):
        pass
    keys, wanted = drawn_keys(), random.randint(1, MOST_ADDED)
    for key, values in FEATURES.items():
        changed = recipe.with_words({key: random.choice(values)})
        if random.random() < FEATURE_SHARE and trials.is_legal(changed, ONE_PROCESS, idle=False):
            recipe = changed
    for _ in range(TRIES):
        changed = recipe.with_words(_bundle(random, keys, recipe))
        if changed.words == recipe.words or not trials.is_legal(changed, ONE_PROCESS, idle=False):
            continue
        recipe, wanted = changed, wanted - 1
        if not wanted:
            break
    if recipe.words["data"] == "tokens" and recipe.words.get("data.documents") == "true":
        recipe = recipe.with_words({"data.end": DOCUMENT_END})  # the files do not say it
    return recipe.with_words(_parallel_words(random, keys))


def _begin(random: Random, files: DataFiles, folder: str) -> DrawnRecipe:
    """A recipe's options of each group, its sizes and its data."""
    nodes = random.choice((1, 2))
    batch = random.choice((8, 8, 8, 12, 16))
    words = {
        "model": random.choice([each for each in options("model", None) if each.startswith("tiny")]),
        "optim": random.choice(list(options("optim", None))),
        "train": random.choice(list(options("train", None))),
        "parallel": random.choice(list(options("parallel", None))),
        "cluster.nodes": str(nodes),
        "cluster.gpus": str(RANKS // nodes),
        **{f"parallel.{axis}": "1" for axis in ("tp", "pp")},
        "parallel.dp": "auto",
        "train.batch": str(batch),
        "train.seq": str(random.choice((16, 24, 32, 48, 64))),
        "train.microbatch": str(batch // random.choice(MICROBATCHES)),
        "train.precision": random.choice(PRECISIONS),
        "train.tokens": "null",
        "optim.lr": random.choice(("1e-3", "5e-3", "2e-2")),
        "optim.warmup": random.choice(("0", "2")),
        "parallel.bucket": random.choice(("50000000", "20000", "3000")),
        "log.dir": folder,
    }
    recipe = DrawnRecipe(words=words, steps=random.choice(STEPS))
    recipe = recipe.with_words(_data_words(random, files, batch * int(words["train.seq"]) * recipe.steps))
    return recipe.with_words(_rampup_words(random, batch, int(words["train.seq"]), recipe.steps))


def _data_words(random: Random, files: DataFiles, tokens: int) -> dict[str, str]:
    """The data of a run of so many tokens: its files, their shares, in stages, and validation sets."""
    name = random.choice(list(options("data", None)))
    words = {"data": name}
    if name not in files.paths:
        return words
    one, two, held = (str(each) for each in files.paths[name])
    words["data.validation"] = random.choice(("0.05", "0.2"))
    if random.random() < 0.5:
        words["data.path"] = f"[{one},{two}]"
        words["data.weights"] = "[0.7,0.3]"
        if random.random() < 0.5:
            words["data.stages"] = f"[{{weights:[0.9,0.1],until:{tokens // 2}}},{{weights:[0.2,0.8]}}]"
    else:
        words["data.path"] = one
    if random.random() < 0.5:
        words["data.validate"] = f"{{held: {held}}}"
        words["data.validation"] = random.choice(("0", "0.05"))
    return words


def _rampup_words(random: Random, batch: int, seq: int, steps: int) -> dict[str, str]:
    """A batch that grows in the first half of the steps, of some recipes."""
    if random.random() < MOSTLY:
        return {}
    first = batch // 2
    until = {"train.rampup.batch": str(first), "train.rampup.until": str(first * seq * random.randint(1, max(1, steps - 2)))}
    if random.random() < 0.5:
        return {**until, "train.microbatch": str(first // random.choice((1, 2)))}
    by = random.choice((1, 2, batch // 4))
    return {**until, "train.rampup.by": str(by), "train.microbatch": str(gcd(first, by))}


def _bundle(random: Random, keys: Mapping[str, object], recipe: DrawnRecipe) -> dict[str, str]:
    """Values of one to three keys of one section."""
    run = recipe.recipe.run_on(1)
    section = random.choice(sorted({name for key in keys if (name := key.rpartition(".")[0]).partition(".")[0] != "parallel"}))
    names = sorted(key for key in keys if key.rpartition(".")[0] == section)
    chosen = random.sample(names, min(len(names), random.randint(1, MOST_TOGETHER)))
    return _words(random, keys, chosen, run)


def _parallel_words(random: Random, keys: Mapping[str, object]) -> dict[str, str]:
    """Values of keys of `parallel` that a layout keeps of the recipe: which of them have an effect depends on the layout."""
    if random.random() < 0.5:
        return {}
    names = sorted(key for key in keys if key.startswith("parallel."))
    return _words(random, keys, random.sample(names, random.randint(1, len(names) // 2)), None)


def _words(random: Random, keys: Mapping[str, object], chosen: Sequence[str], run: Run | None) -> dict[str, str]:
    """Words that set drawn values of keys; `run` has the present ones."""
    values = {
        key: random.choice(NARROWED[key]) if key in NARROWED else drawn_value(keys[key], _present(run, key), random) for key in chosen
    }
    return {key: value_text(value) for key, value in values.items() if value is not NO_VALUE}


def _present(run: Run | None, key: str) -> object:
    value: object = run
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
