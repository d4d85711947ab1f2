"""Text is tokenized once: reused, rebuilt if damaged, and made by one process when several ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distrain.trainer.loop.data import file_hashes as hashing
from distrain.trainer.loop.data.file_hashes import NotCached, digest, file_hashes
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data
from distrain.trainer.system.child_process import end_child

Told = list[tuple[str, int, int]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be\n" * 100)
    return path


def open_corpus(text: Path, *, verify: bool = True, **words: Any) -> tuple[Corpus, Told]:
    """Return the corpus, and the progress reported while it was prepared."""
    told: Told = []
    data = Data(name="text", path=str(text), **words)
    cache = text.parent / "cache"
    corpus = prepare_corpus(data, vocab=300, seq=8, cache=cache, progress=lambda *call: told.append(call), verify=verify)
    return corpus, told


def work(told: Told) -> set[str]:
    return {what for what, _, total in told if total}


def folder(text: Path) -> Path:
    (found,) = (text.parent / "cache").glob("*/manifest.json")
    return found.parent


def tokens(corpus: Corpus) -> list[list[int]]:
    return Batches(corpus, seed=0, seq=8).batch(0, 20).tokens.tolist()


def test_a_second_run_uses_the_cache_of_the_first(text: Path) -> None:
    assert work(open_corpus(text)[1]) == {"hash", "tokenize"}
    assert work(open_corpus(text)[1]) == {"hash"}


def test_progress_counts_up_to_the_size_of_the_text(text: Path) -> None:
    assert ("tokenize", 1900, 1900) in open_corpus(text)[1]


@pytest.mark.parametrize("words", [{"end": 1}, {"text_key": "content"}])
def test_other_data_keys_use_another_cache(text: Path, words: dict[str, Any]) -> None:
    open_corpus(text)
    assert "tokenize" in work(open_corpus(text, **words)[1])


def test_another_validation_share_uses_the_same_cache(text: Path) -> None:
    open_corpus(text)
    assert work(open_corpus(text, validation=0.3)[1]) == {"hash"}


def test_a_changed_text_is_tokenized_again(text: Path) -> None:
    before = open_corpus(text)[0]
    text.write_text("to be or not to bE\n" * 100)
    after, told = open_corpus(text)
    assert "tokenize" in work(told)
    assert after.key != before.key


def flip(path: Path) -> None:
    words = bytearray(path.read_bytes())
    words[len(words) // 2] ^= 1
    path.write_bytes(words)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the tokens": (lambda at: flip(at / "tokens"), "tokens has another hash"),
    "a bit of the bounds": (lambda at: flip(at / "bounds"), "bounds has another hash"),
    "a bit of the counts": (lambda at: flip(at / "counts"), "counts has another hash"),
    "tokens cut short": (lambda at: os.truncate(at / "tokens", 100), "tokens has another size"),
    "tokens gone": (lambda at: (at / "tokens").unlink(), "tokens: No such file or directory"),
    "no manifest": (lambda at: (at / "manifest.json").unlink(), "manifest.json: No such file or directory"),
    "half a manifest": (lambda at: os.truncate(at / "manifest.json", 20), "manifest.json cannot be read"),
    "a manifest of lists": (lambda at: (at / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
    "another's manifest": (
        lambda at: (at / "manifest.json").write_text('{"key": "x", "files": {}}') and None,
        "manifest.json has another key",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_is_reported_and_rebuilt(name: str, text: Path) -> None:
    damage, reason = DAMAGE[name]
    whole = tokens(open_corpus(text)[0])
    at = folder(text)
    damage(at)
    corpus, told = open_corpus(text)
    assert (f"the cache {at} is damaged ({reason}): making it again", 0, 0) in told
    assert "tokenize" in work(told)
    assert tokens(corpus) == whole
    assert work(open_corpus(text)[1]) == {"hash"}


def test_only_sizes_are_checked_if_another_process_verified_the_cache(text: Path) -> None:
    open_corpus(text)
    os.truncate(folder(text) / "tokens", 100)
    assert "tokenize" in work(open_corpus(text, verify=False)[1])
    flip(folder(text) / "tokens")
    assert work(open_corpus(text, verify=False)[1]) == {"hash"}


def test_remains_of_a_killed_process_are_removed(text: Path) -> None:
    open_corpus(text)
    at = folder(text)
    left, old = (at.with_name(f"{at.name}.99999.{state}") for state in ("new", "old"))
    at.rename(left)
    old.mkdir()
    open_corpus(text)
    assert folder(text) == at
    assert not left.exists()
    assert not old.exists()


ASK = """
import json, sys
from pathlib import Path
from typing import Any
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.spec.run import Data
told = []
print("ready", flush=True)
sys.stdin.readline()
data = Data(name="text", path=sys.argv[1])
corpus = prepare_corpus(data, vocab=256, seq=8, cache=Path(sys.argv[2]), progress=lambda *call: told.append(call))
print(json.dumps([corpus.key, corpus.size("train"), sorted({what for what, _, total in told if total})]))
"""


def test_one_of_several_processes_fills_the_cache_and_all_use_it(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be\n" * 100_000)
    command = [sys.executable, "-c", ASK, str(text), str(tmp_path / "cache")]
    asking = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in asking:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in asking:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate()[0]) for process in asking]
    finally:
        for process in asking:
            end_child(process)
    assert answers[0][:2] == answers[1][:2]
    assert sorted(answer[2] for answer in answers) == [["hash"], ["hash", "tokenize"]]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir() if path.name != "hashes") == ["", ".lock"]


def test_hashes_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, large, small = tmp_path / "cache", tmp_path / "large", [tmp_path / "1", tmp_path / "2"]
    large.write_bytes(b"0" * (16 << 20) + b"1")
    for path in small:
        path.write_text(path.name)
    paths = [small[0], large, small[1]]
    true = [digest(path) for path in paths]
    monkeypatch.setattr(hashing, "_SETTLED", 1 << 62)  # all files have just been written, however long this test takes

    def hashes(paths: list[Path], **words: bool) -> list[str]:
        done: list[int] = []
        found = file_hashes(paths, cache, done.append, **words)
        assert done == [path.stat().st_size for path in paths]
        return found

    assert hashes(paths) == true
    assert not list(cache.glob("hashes/*.json")), "a file that was just written may be written again within the same tick of the clock"
    with pytest.raises(NotCached):
        hashes(paths, only_quick=True)
    assert hashes(small, only_quick=True) == [true[0], true[2]]
    monkeypatch.setattr(hashing, "_SETTLED", 0)  # and none has
    assert hashes(paths) == true
    memories = sorted((cache / "hashes").glob("*.json"), key=lambda path: len(json.loads(path.read_text())))
    assert [sorted(json.loads(path.read_text())) for path in memories] == [[str(large)], [str(path) for path in small]]
    for memory in memories:
        rows = json.loads(memory.read_text())
        memory.write_text(json.dumps({path: [version, f"hash of {Path(path).name}"] for path, (version, _) in rows.items()}))
    assert hashes(paths, only_quick=True) == ["hash of 1", "hash of large", "hash of 2"]
    small[1].write_text("x")
    with large.open("r+b") as file:
        file.write(b"x")
    assert hashes(paths) == ["hash of 1", digest(large), digest(small[1])]
    memories[1].write_text("[]no JSON")
    assert hashes(small) == [true[0], digest(small[1])]


def test_a_file_that_was_written_just_before_a_long_hash_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_text("a")
    clock = [file.stat().st_ctime_ns]

    def slow_digest(path: Path) -> str:
        clock[0] += 10**10
        return digest(path)

    monkeypatch.setattr(hashing, "time", SimpleNamespace(time_ns=lambda: clock[0]))
    monkeypatch.setattr(hashing, "digest", slow_digest)
    for remembered in (False, True):
        assert file_hashes([file], cache, lambda size: None) == [digest(file)]
        assert cache.exists() == remembered


def test_an_unwritable_cache_is_refused_in_one_line(text: Path) -> None:
    (text.parent / "cache").write_text("a file")
    with pytest.raises(Unreadable) as refused:
        open_corpus(text)
    assert str(refused.value) == f"the cache {text.parent}/cache cannot be written: File exists: set data.cache to a folder with free space"


def test_one_of_the_processes_of_a_host_hashes_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, as ranks do that start together."""
    file, calls = tmp_path / "a.bin", list[Path]()
    file.write_bytes(b"x" * 2000)
    os.utime(file, (1, 1))
    monkeypatch.setattr(hashing, "REMEMBERED_ALONE", 1000)
    monkeypatch.setattr(hashing, "_SETTLED", -(10**18))

    def slow_digest(path: Path) -> str:
        calls.append(path)
        time.sleep(0.2)
        return digest(path)

    monkeypatch.setattr(hashing, "digest", slow_digest)
    with ThreadPoolExecutor(4) as threads:  # each opens the lock's file for itself, as processes do
        found = list(threads.map(lambda _: file_hashes([file], tmp_path / "cache", lambda size: None), range(4)))
    assert (found, calls) == ([[digest(file)]] * 4, [file])
