"""Reading a Hugging Face config.json into the keys of our `model`.

Keys that change no logit are ignored (harmless_keys.py lists them). Everything else that our families do not have is refused, by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...spec.problem import Problem, Unreadable, shorten
from ...system.regular_file import read_plain
from ..families import FAMILIES
from ..hf.quantization import KEY as QUANTIZATION_KEY
from ..hf.quantization import quantization_problems
from .config_kinds import CONFIG_KINDS, SAME_MODELS, AllowedValues, ConfigKind, is_rotary
from .config_rope import json_text, local_rope_problems, read_rope, rope_keys, rope_problems, with_one_rope
from .config_rows import REQUIRED
from .config_windows import read_window, window_problems
from .dense_layers import dense_problems, read_dense_layers
from .harmless_keys import is_harmless
from .hub_name import download_mend
from .layer_groups import group_problems, read_groups

ROUTER: Final = "router."  # the section of `model` whose keys rows name whole
FIXES = {
    "auto_map": "it names code of the model's own, which is not run here: take it out if the model is transformers' own",
}


def read_hf_config(path: str | Path) -> dict[str, object]:
    """Return the keys of `model` that a config.json, or the folder that holds it, states; raises Unreadable with every problem."""
    file = config_file(path)
    config = read_json(file)
    model_type = _known_model_type(config, file)
    kind, family = CONFIG_KINDS[model_type], family_of_type(model_type)
    ropes = tuple(local_rope_problems(config, kind.only_base)) if kind.local_rope else ()
    if kind.local_rope and not ropes:
        config = with_one_rope(config)
    if kind.default_rope and not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": kind.default_rope}
    flat = _with_synonyms({**config, **rope_keys(config)}, kind)
    found = (
        *ropes,
        *_type_problems(flat, kind),
        *_disagreements(flat, kind),
        *_unsupported_keys(flat, kind, family),
        *_unknown_keys(config, kind, family),
        *quantization_problems(config),
        *(rope_problems(config, family, partial=kind.has_key("rope_share")) if is_rotary(kind) and not ropes else ()),
        *(dense_problems(config, kind.dense, family) if kind.dense else ()),
        *(window_problems(config, kind.window) if kind.window else ()),
        *(group_problems(config) if kind.grouped else ()),
    )
    if found:
        raise Unreadable([Problem(rule="hf", says=f"{file}: {says}", mend=fix) for says, fix in found])
    stated = {row: flat.get(row.theirs[0], row.default) for row in kind.rows}
    values = {row.ours: row.null if value is None else value for row, value in stated.items()}
    if flat.get("topk_method") == "greedy":  # of DeepSeek-V2, which then reads no groups
        values |= {"router.groups": 1, "router.top_groups": 1}
    act = kind.acts[str(flat.get(kind.act) or next(iter(kind.acts)))]
    positions: dict[str, object] = {"rope": read_rope(config)} if is_rotary(kind) else {}
    positions |= read_window({**config, "num_hidden_layers": values["layers"]}, kind.window) if kind.window else {}
    dense = read_dense_layers(config, kind.dense) if kind.dense else {}
    dense |= read_groups(config) if kind.grouped else {}
    keys: dict[str, object] = {"family": family, **values, **dense, **kind.fixed, **positions, "act": act, "hf": str(path)}
    router = {key.removeprefix(ROUTER): value for key, value in keys.items() if value is not None and key.startswith(ROUTER)}
    plain = {key: value for key, value in keys.items() if value is not None and not key.startswith(ROUTER)}
    return plain | ({"router": router} if router else {})


def _with_synonyms(config: dict[str, Any], kind: ConfigKind) -> dict[str, Any]:
    """Return a config in which all synonyms of a key that it states have its value."""
    stated = ((row.theirs, config[name]) for row in kind.rows if row.synonyms for name in row.theirs if name in config)
    return {name: value for names, value in stated for name in names} | config


def needs_family_hf(path: str | Path) -> bool:
    """Whether only transformers has the model_type of a config.json, so that it is of family hf; raises Unreadable for a bad file."""
    model_type = read_json(config_file(path)).get("model_type")
    return isinstance(model_type, str) and model_type not in CONFIG_KINDS and model_type not in SAME_MODELS


def family_of_type(model_type: str) -> str:
    """Return the name of the family that a model_type of CONFIG_KINDS is read as."""
    return next(name for name, family in FAMILIES.items() if model_type in family.model_types)


def config_file(path: str | Path) -> Path:
    """Return the config.json that a path names, or that lies in the folder that it names."""
    return Path(path) / "config.json" if os.path.isdir(path) else Path(path)


def read_json(file: Path) -> dict[str, Any]:
    """Read a config.json; raises Unreadable where it is missing or holds no mapping."""
    try:
        config = json.loads(read_plain(file).decode("utf-8-sig"))
    except OSError as error:
        mend = download_mend(file, "model.hf") or "name a config.json or its folder"
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {error.strerror}", mend=mend)]) from None
    except json.JSONDecodeError as error:
        at = f"{file}, line {error.lineno}, column {error.colno}"
        raise Unreadable([Problem(rule="hf", says=f"{at}: {error.msg}", mend="it has to be JSON")]) from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise Unreadable([Problem(rule="hf", says=f"{file} is not a config.json", mend="it has to be JSON")]) from None
    if not isinstance(config, dict):
        raise Unreadable([Problem(rule="hf", says=f"{file} does not hold a mapping of keys", mend="it has to be a model's config.json")])
    return config


def _known_model_type(config: Mapping[str, Any], file: Path) -> str:
    """Return a file's model_type or, where it has none, that of its architecture; raises Unreadable for one that is not known."""
    named = config.get("model_type")
    stated = SAME_MODELS.get(named, named) if isinstance(named, str) else named
    listed = config.get("architectures")
    architectures = listed if isinstance(listed, list) else []
    for model_type, kind in CONFIG_KINDS.items():
        if stated == model_type or (stated is None and kind.architecture in architectures):
            return model_type
    says = f"{file}: model_type={json_text(stated)} has no family here" if stated is not None else f"{file}: model_type is missing"
    fix = f"known: {', '.join((*CONFIG_KINDS, *SAME_MODELS))}; any other model type of transformers is family hf"
    raise Unreadable([Problem(rule="hf", says=says, mend=fix)])


def _unknown_keys(config: Mapping[str, Any], kind: ConfigKind, family: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys that may change what the model computes; one that is null, false or empty switches nothing on."""
    known = kind.known_keys | {QUANTIZATION_KEY}
    for key, value in config.items():
        if value and key not in known and not is_harmless(key) and not (key == "auto_map" and _names_known_code(value, kind)):
            says = f"{key}={shorten(json_text(value))} is not known to family {family}, and may change what the model computes"
            yield says, FIXES.get(key, "take it out if it changes nothing")


def _names_known_code(auto_map: object, kind: ConfigKind) -> bool:
    """Whether an auto_map names the class that transformers' own, and ours, compute like."""
    return bool(kind.own_class) and isinstance(auto_map, Mapping) and auto_map.get("AutoModelForCausalLM") == kind.own_class


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def _type_problems(config: Mapping[str, Any], kind: ConfigKind) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys that are missing or of the wrong type."""
    for key, row in ((name, each) for each in kind.rows for name in each.theirs):
        value = config.get(key)
        if key not in config:
            if row.default == REQUIRED:
                yield f"{key} is missing", f"set it to {_TYPE_NAMES[row.kind]}"
        elif not _has_type(value, row.kind) and not (value is None and (row.nullable or row.default is None)):
            yield f"{key}={json.dumps(value)} is not {_TYPE_NAMES[row.kind]}", ""


def _has_type(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int) or (kind is float and isinstance(value, float))


def _disagreements(config: Mapping[str, Any], kind: ConfigKind) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for keys of the file that are one key here and differ."""
    for row in kind.rows:
        values = [config.get(key, row.default) for key in row.theirs]
        if any(value != values[0] for value in values):
            pairs = ", ".join(f"{key}={json_text(value)}" for key, value in zip(row.theirs, values, strict=True))
            yield f"{pairs} differ, but model.{row.ours} is a single value", "set them to the same value"


def _unsupported_keys(config: Mapping[str, Any], kind: ConfigKind, family: str) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for values that our family does not have."""
    for row in (*kind.allowed, AllowedValues(kind.act, tuple(kind.acts))):
        value = config.get(row.theirs)
        if value is not None and value not in row.values:
            yield f"family {family} does not have {row.theirs}={json_text(value)}", f"it has {' or '.join(map(json_text, row.values))}"
