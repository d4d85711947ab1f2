"""Reads users' YAML files safely: plain files of limited size, with a limit on the values that anchors and aliases make."""

from __future__ import annotations

import os
import pickle
import re
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent, MarkedYAMLError, NodeEvent, YAMLError, load, parse
from yaml.reader import ReaderError

from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system.regular_file import read_plain
from ..keys.config_files import MOST_BYTES
from .interrupts import raise_if_interrupted
from .yaml_errors import yaml_problem

MAPPING = "a recipe must be a mapping of keys"
SCRIPT = "write the options that it passes behind a recipe, as `distrain plan conf=NAME --lr 1e-4 ...`: each is answered"
PROGRAM = "write the arguments that it sets behind a recipe, as `distrain plan conf=NAME learning_rate=1e-4 ...`: each is answered"
LENGTHS = ("steps", "tokens")  # keys of train, of which a run has one
MOST_NODES = 20_000  # mappings, lists and values, counted again for each alias


class NamedText(StringIO):
    """YAML in memory with the name of its file, for error messages."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read_config(file: Path) -> DictConfig:
    """Return the keys of a recipe or an option, not yet composed; raises Unreadable."""
    config = _read(file)
    if not isinstance(config, DictConfig):
        raise _unreadable_error(f"{file} holds a list", MAPPING)
    if len(config) == 1 and _is_text(config, str(next(iter(config)))):
        raise _unreadable_error(f"{file} holds text", MAPPING)
    if "hydra" in config:
        raise _unreadable_error(f"{file}: no key hydra", "leave it out")
    defaults = config.get("defaults", [])
    if not isinstance(defaults, ListConfig | list) or not all(isinstance(each, str | DictConfig) for each in defaults):
        raise _unreadable_error(f"{file}: defaults is not a list of `GROUP: NAME`", "write each as `- model: NAME`")
    _replace_length(config)
    return config


def _replace_length(config: DictConfig) -> None:
    """Set the length of a recipe's run that its section train leaves out to null: what it sets replaces a length of its defaults."""
    if "train" not in config or OmegaConf.is_interpolation(config, "train") or not isinstance(train := config.get("train"), DictConfig):
        return
    for key, other in (LENGTHS, LENGTHS[::-1]):
        if key in train and other not in train and (OmegaConf.is_interpolation(train, key) or train.get(key) is not None):
            train[other] = None
            return


def _is_text(config: DictConfig, key: str) -> bool:
    """Return whether a file's one key is text that OmegaConf made a key without a value."""
    return key in config and any(map(str.isspace, key)) and not OmegaConf.is_interpolation(config, key) and config.get(key) is None


def _read(file: Path) -> DictConfig | ListConfig:
    """Return a file's YAML; raises Unreadable."""
    text = ""
    try:
        text = read_plain(file, MOST_BYTES).decode("utf-8-sig")
        if file.suffix == ".py":
            raise _unreadable_error(f"{file} is a program, not a recipe", PROGRAM)
        if text.startswith("#!") or file.suffix == ".sh":
            raise _unreadable_error(f"{file} is a script, not a recipe", SCRIPT)
        if "&" in text and "*" in text and _count_nodes(NamedText(text, str(file))) > MOST_NODES:
            raise _unreadable_error(f"{file}: its anchors and aliases make more than {MOST_NODES:,} values", "write the values out")
        config: DictConfig | ListConfig = pickle.loads(_parse_yaml(text, str(file)))
        return config
    except OSError as error:
        raise _unreadable_error(f"{file} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _unreadable_error(f"{file} is not valid UTF-8", "save it as UTF-8") from None
    except RecursionError:
        if "*" in text or "${" in text:
            raise _unreadable_error(f"{file} contains itself", "break the loop of defaults, anchors or ${...}") from None
        raise _unreadable_error(f"{file} is nested too deeply") from None
    except ReaderError as error:
        raise _unreadable_error(f"{file} contains the character {chr(error.character)!r}", "remove it: YAML is plain text") from None
    except MarkedYAMLError as error:
        mark, says, mend = yaml_problem(error, text)
        where = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
        raise _unreadable_error(f"{where}: {says}", mend) from None
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise_if_interrupted(error)
        lines = str(error).splitlines() or [type(error).__name__]
        raise _unreadable_error(f"{file} can't be read: {lines[0].partition('; use sys.')[0]}") from None


@lru_cache(maxsize=128)
def _parse_yaml(text: str, name: str) -> bytes:
    """Parse the text of a file of this name: the recipes of a sweep or a search share most of their files. Raises what yaml raises.

    The result is pickled: each caller reads a copy of its own.
    """
    plain = load(NamedText(text, name), Loader=_yaml_loader())
    if plain is not None and not isinstance(plain, list | dict | str):
        raise _unreadable_error(f"{name} holds one value", MAPPING)
    return pickle.dumps(OmegaConf.create({} if plain is None else plain))


@cache
def _yaml_loader() -> Any:
    """Return OmegaConf's loader of YAML, but for numbers that YAML 1.1 does not write in decimal (0x10, 017, 1:30): they stay text."""
    loader = get_yaml_loader()
    loader.yaml_implicit_resolvers = {
        first: [(tag, _decimal_pattern(tag, pattern)) for tag, pattern in rows] for first, rows in loader.yaml_implicit_resolvers.items()
    }
    return loader


def _decimal_pattern(tag: str, pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern of a tag's text without numbers of bases 2, 8, 16 and 60."""
    match tag.rpartition(":")[2]:
        case "int":
            return re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
        case "float":
            return re.compile(f"(?!.*:)(?:{pattern.pattern})", re.VERBOSE)
    return pattern


def _unreadable_error(says: str, mend: str = "") -> Unreadable:
    return Unreadable([Problem(rule="yaml", says=says, mend=mend)])


class PlainSource(FileConfigSource):
    """Hydra's source of files, but reading them with `read_config`."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file below this source's folder."""
        file = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if not file.exists():
            raise ConfigLoadError(f"Config not found : {file}")
        config = read_config(file)
        head = read_plain(file, MOST_BYTES)[:512].decode("utf-8", errors="replace")
        header = ConfigSource._get_header_dict(head)
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header)


def install_plain_source() -> None:
    """Make Hydra read files with `read_config`."""
    Plugins.instance()
    SourcesRegistry.instance().types["file"] = PlainSource


def _count_nodes(text: NamedText) -> int:
    """Return the number of values in a document, each alias counted as all its values; counting stops above MOST_NODES."""
    total, anchors = 0, dict[str, int]()
    collections: list[tuple[str | None, int]] = []  # for each open collection its anchor and the number of values before it
    for event in parse(text):
        if isinstance(event, AliasEvent):
            total += anchors.get(event.anchor or "", 1)
        elif isinstance(event, CollectionStartEvent):
            collections.append((event.anchor, total))
            total += 1
        elif isinstance(event, CollectionEndEvent):
            anchor, before = collections.pop()
            if anchor is not None:
                anchors[anchor] = total - before
        elif isinstance(event, NodeEvent):
            total += 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        if total > MOST_NODES:
            break
    return total
