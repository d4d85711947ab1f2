"""YAML as users write it: read from plain files of a sane size, whose anchors do not multiply it."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent, YAMLError, parse

from ..trainer.spec.plain_file import read_plain
from .library import MOST_BYTES

MOST_NODES = 20_000  # mappings, lists and values, those of each alias counted again


class Text(StringIO):
    """YAML in memory that errors name by its file."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read_yaml(file: Path) -> DictConfig | ListConfig:
    """What a file says; raises OSError, UnicodeDecodeError, YAMLError, and what OmegaConf raises on values that it can't hold."""
    text = read_plain(file, MOST_BYTES).decode("utf-8-sig")
    if "&" in text and "*" in text and _nodes(Text(text, str(file))) > MOST_NODES:
        raise YAMLError(f"{file}: its anchors and aliases make more than {MOST_NODES:,} values of it")
    return OmegaConf.load(Text(text, str(file)))


class PlainSource(FileConfigSource):
    """Hydra's source of files, which reads them by `read_yaml`."""

    def load_config(self, config_path: str) -> ConfigResult:
        """A file below this source's folder."""
        file = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if not file.exists():
            raise ConfigLoadError(f"Config not found : {file}")
        config = read_yaml(file)
        head = read_plain(file, MOST_BYTES)[:512].decode("utf-8", errors="replace")
        header = ConfigSource._get_header_dict(head)
        return ConfigResult(config=config, path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header)


def read_plainly() -> None:
    """Have Hydra read files by `read_yaml`."""
    Plugins.instance()
    SourcesRegistry.instance().types["file"] = PlainSource


def _nodes(text: Text) -> int:
    """The values of a document, each alias counted as all that it stands for; counting ends where they are too many."""
    total, anchors = 0, dict[str, int]()
    open_: list[tuple[str | None, int]] = []  # of each collection that is open its anchor and the values before it
    for event in parse(text):
        if isinstance(event, AliasEvent):
            total += anchors.get(event.anchor or "", 1)
        elif isinstance(event, CollectionStartEvent):
            open_.append((event.anchor, total))
            total += 1
        elif isinstance(event, CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                anchors[anchor] = total - before
        elif isinstance(event, NodeEvent):
            total += 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        if total > MOST_NODES:
            break
    return total
