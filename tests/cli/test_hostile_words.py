"""What a user writes, or has in the environment, reaches a shell, here or on a host, as itself or not at all.

The commands that a run is started with are stand-ins, which note how they were called. Those of ssh and pdsh have a shell of this
machine read what the host's would, so that a word which means more than itself would be seen to act.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec import json as encoder

from distrain.cli.app import command
from distrain.cli.config.keys import config_keys, text_keys
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.hosts_page import run_preflight_and_show
from distrain.tests.fakes.hostile_words import ONCE, environments, hostile, plain, tame_but_one
from distrain.tests.fakes.path_commands import PDSH, PYTHON, QUIET, SBATCH, SCONTROL, SRUN, SSH, FakeCommands
from distrain.trainer.launch.agent.token import FILE, JoinToken
from distrain.trainer.launch.commands.command import RANK_VARIABLES, forwarded_variables
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.shell_safe import SAFE, SAFE_CHARACTERS, SSH_OPTIONS, require_shell_safe
from distrain.trainer.launch.hosts.upload import UPLOAD_REMOTE, connect_hosts, on_every_host
from distrain.trainer.launch.preflight.preflight import _program
from distrain.trainer.launch.resolve import BOOTSTRAP_MODULE, RANK_MODULE, launch_commands, resolve_hosts
from distrain.trainer.launch.script import script_lines
from distrain.trainer.plan.changed_run import with_changes
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.result import Plan
from distrain.trainer.rundir.files import run_folder
from distrain.trainer.rundir.paths import with_absolute_paths
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Run


@pytest.fixture(scope="module", autouse=True)
def handlers() -> Iterator[None]:
    """DeepSpeed's runner, which is called in this process, takes signals for itself."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


# One word


@given(hostile | plain)
def test_a_word_crosses_as_it_is_or_not_at_all(word: str) -> None:
    try:
        assert require_shell_safe(word, "the word", "choose another") == word
    except Unreadable as error:
        (problem,) = error.problems
        assert not SAFE.fullmatch(word) or word.startswith("-")
        assert SAFE_CHARACTERS in problem.says or "sent to other hosts" in problem.says
    else:
        assert SAFE.fullmatch(word)
        assert not word.startswith("-")


@settings(max_examples=40)
@given(environment=environments, further=some.lists(some.sampled_from(["MLFLOW_X", "AWS_SECRET", "PYTHONPATH"]), max_size=2))
def test_what_ranks_are_told_travels_in_a_file_whatever_it_is(
    environment: dict[str, str], further: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    told = forwarded_variables(environment, further)
    assert told == {key: value for key, value in environment.items() if key in told}
    assert {"WANDB_API_KEY", "NCCL__X"} & set(environment) <= set(told)
    assert set(further) & set(environment) <= set(told)
    file = tmp_path_factory.mktemp("ticket") / "ticket"
    file.write_text(JoinToken(secret="5", controllers=[], hostnames=[], slots=[], command=[], environment=told).text())
    assert JoinToken.read(file).environment == told


@settings(max_examples=40)
@given(order=some.dictionaries(hostile, hostile, max_size=3))
def test_what_a_host_is_asked_is_data_of_the_program_that_asks_it(order: dict[str, str]) -> None:
    """Rounds of preflight are programs on the stdin of Python."""
    last = ast.parse(_program(order)).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    assert json.loads(ast.literal_eval(last.value.args[0])) == order


# A run over hosts, from its words to the shells of its hosts


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> FakeCommands:
    """All that a launch calls."""
    made = FakeCommands(tmp_path_factory.mktemp("stand-ins"))
    does = {"ssh": SSH, "pdsh": PDSH, "python": PYTHON, "scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH}
    for name in (*does, "mpirun", "ompi_info", "sinfo", "distrain"):
        made.put(name, does.get(name, QUIET))
    return made


@pytest.fixture(scope="module")
def run() -> Run:
    return load_recipe(
        "quickstart", ("model=tiny", "model.layers=2", "train.batch=8", "train.seq=16", "train.microbatch=2", "train.steps=2")
    )


@contextmanager
def place(stand_ins: FakeCommands, top: Path, environment: Mapping[str, str], python: str) -> Iterator[None]:
    """In a folder, with the stand-ins and an environment, under another Python."""
    stand_ins.forget()
    known = {"PATH": stand_ins.path(), "HOME": str(stand_ins.home), "DS_ACCELERATOR": "cpu", "SLURM_JOB_NODELIST": "w[1-2]", **environment}
    with chdir(top), mock.patch.dict(os.environ, known, clear=True), mock.patch.object(sys, "executable", python):
        yield


def begun(run: Run, plan: Plan, runner: Any) -> Sequence[Host]:
    """As `distrain fit` begins a run over hosts: they are asked, its files are laid there, the launcher is started."""
    found, folder = resolve_hosts(run), run_folder(run)
    run_preflight_and_show(found, run, plan, lambda line: None)
    made = launch_commands(run, found)
    ticket = JoinToken(
        secret="5", controllers=[], hostnames=[], slots=[], command=[], environment=forwarded_variables(os.environ, run.launch.environment)
    )
    with connect_hosts([host.name for host in found]) as landed:
        on_every_host(landed, lambda each: each.upload(folder, {"run.json": encoder.encode(run).decode(), FILE: ticket.text()}))
    for file in made.files:
        file.path.write_text(file.text)
    (launcher,) = made.commands
    assert launcher.folder is not None
    known = launcher.full_environment(os.environ)
    read = mock.patch.object(runner, "DEEPSPEED_ENVIRONMENT_NAME", known["DS_ENV_FILE"])  # by a launcher of its own, at import
    with chdir(launcher.folder), mock.patch.dict(os.environ, known, clear=True), read:
        runner.main(list(launcher.argv[3:]))
    return found


# What DeepSpeed's launcher may have a remote shell read: its own few words around ours.
REMOTE = re.compile(r"(export [A-Z_]+=[A-Za-z0-9._/=:-]*; )+ ?cd [A-Za-z0-9._/=:-]+;( ([A-Za-z0-9._/=:-]+|--node_rank=%n))+")


def tame(calls: Sequence[dict[str, Any]], run: Run, python: str) -> Iterator[str]:
    """What each call of ssh and pdsh said to a host; fails where one holds a word that is not ours."""
    for call in calls:
        name, *argv = call["argv"]
        match Path(name).name:
            case "ssh":
                *options, dashes, host, said = argv
                assert (tuple(options), dashes) == (SSH_OPTIONS, "--")
                assert SAFE.fullmatch(host)
                assert said in (f"{python} -", f"{python} -I -S {UPLOAD_REMOTE}")
                assert SAFE.fullmatch(python)
                yield said
            case "pdsh":
                at = argv.index("-w")
                assert SAFE.fullmatch(argv[at + 1].replace(",", ""))
                said = " ".join(argv[at + 2 :])
                assert REMOTE.fullmatch(said), said
                yield said
            case "mpirun" | "srun":
                assert all(re.fullmatch(r"[A-Za-z0-9._/=:,^-]+", word) for word in argv), argv


@settings(max_examples=40, phases=ONCE)
@given(
    said=some.dictionaries(
        some.sampled_from(sorted(text_keys(config_keys()) - {"launch.hostfile", "log.dir", "name"})), hostile, max_size=3
    ),
    named=some.lists(some.sampled_from(["AWS_SECRET", "PYTHONSTARTUP"]) | hostile, max_size=2),
    tamed=tame_but_one(5),
    file=hostile.filter(lambda name: name not in ("", ".", "..")),
    filtered=some.booleans(),
    runner=some.sampled_from(["pdsh", "pdsh", "pdsh", "openmpi", "slurm"]),
    environment=environments,
)
def test_no_hostile_word_reaches_the_shell_of_a_host(
    said: dict[str, str],
    named: list[str],
    tamed: list[str],
    file: str,
    filtered: bool,
    runner: str,
    environment: dict[str, str],
    run: Run,
    stand_ins: FakeCommands,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every key that takes a text, the hostfile and its path, the environment, the paths of Python and of the run folder."""
    from deepspeed.launcher import runner as theirs

    top = tmp_path_factory.mktemp("run") / "in"
    top.mkdir()
    name, folder, inside, *lines = tamed
    lines = [f"h{number}{line}" for number, line in enumerate(lines)]
    (top / file).write_text("".join(f"{line} slots=2\n" for line in lines))
    python = f"{stand_ins.folder}/python" if inside.startswith("w") else f"{stand_ins.folder}/{inside}/python"
    told: dict[str, Any] = {"cluster.nodes": len(lines), "cluster.gpus": 2, **said, "name": name, "log.dir": str(top / folder)}
    told |= {"launch.name": "deepspeed", "launch.hostfile": str(top / file), "launch.runner": runner, "launch.environment": tuple(named)}
    if filtered and runner == "pdsh":
        told |= {"cluster.gpus": 1, "launch.include": "@".join(f"{line}:1" for line in lines), "launch.exclude": None}
    asked = with_changes(run, told.items())
    found: Sequence[Host] = ()
    with place(stand_ins, top, environment, python), suppress(Unreadable):
        found = begun(asked, make_plan(run), theirs)
    calls = stand_ins.calls
    crossed = list(tame(calls, asked, python))
    assert not list(top.parent.rglob("pwned*")), crossed
    if not found:
        return
    assert encoder.decode((run_folder(asked) / "run.json").read_bytes(), type=Run) == asked
    assert JoinToken.read(run_folder(asked) / FILE).environment == forwarded_variables(environment, named)
    started = [call for call in calls if call["argv"][:4] == [python, "-u", "-m", "deepspeed.launcher.launch"]]
    assert len(started) == (len(found) if runner == "pdsh" else 0)
    for number, call in enumerate(started):
        words = dict(word.lstrip("-").partition("=")[::2] for word in call["argv"][4:8])
        assert json.loads(urlsafe_b64decode(words["world_info"])) == {host.name: list(host.slots) for host in found}
        assert words["node_rank"] == str(number)
        assert words["master_addr"] == (asked.launch.address or found[0].name)
        assert call["argv"][8:] == [
            "--module",
            "--no_local_rank",
            "--enable_each_rank_log=None",
            BOOTSTRAP_MODULE,
            f"{run_folder(asked)}/run.json",
        ]
        assert call["folder"] == str(run_folder(asked) / "launch")
        assert RANK_VARIABLES.items() <= call["environment"].items()


def test_a_run_folder_that_is_a_link_to_a_hostile_place_is_refused(run: Run, stand_ins: FakeCommands, tmp_path: Path) -> None:
    """DeepSpeed's launcher pastes the path that the system tells it of the folder that it is started in."""
    from deepspeed.launcher import runner as theirs

    (tmp_path / "$(touch pwned)").mkdir()
    (tmp_path / "link").symlink_to("$(touch pwned)")
    (tmp_path / "hosts").write_text("w1 slots=2\n")
    asked = with_changes(run, [("log.dir", f"{tmp_path}/link"), ("launch.name", "deepspeed"), ("launch.hostfile", f"{tmp_path}/hosts")])
    python = str(stand_ins.folder / "python")
    with place(stand_ins, tmp_path, {}, python), pytest.raises(Unreadable, match=r"\$\(touch pwned\)/quickstart/launch holds '\$'"):
        begun(asked, make_plan(asked), theirs)
    assert len(list(tame(stand_ins.calls, asked, python))) == 1
    assert not list(tmp_path.rglob("pwned*"))


def test_preflight_asks_about_a_hostile_folder_itself(
    run: Run, stand_ins: FakeCommands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`distrain doctor`, with the real program on the other side."""
    folder, file = tmp_path / "a b;$(touch pwned)", tmp_path / "`touch pwned` '\"#"
    file.write_text("w1 slots=2\n")
    words = [f"log.dir={folder}", f"launch.hostfile={file}", "name=$(touch pwned) ;", "data.path=;touch pwned", "launch=deepspeed"]
    with place(stand_ins, tmp_path, {}, sys.executable):
        command(["doctor", "conf=quickstart", "cluster=1x2", *words])  # whose data are not there
    assert capsys.readouterr().out.splitlines()[1].startswith("w1 ")
    assert [each.name for each in folder.iterdir()] == ["$(touch pwned) ;"]
    assert list(tame(stand_ins.calls, run, sys.executable)) == [f"{sys.executable} -"]
    assert not list(tmp_path.rglob("pwned*"))


# What `show --launch` prints


@pytest.mark.parametrize("launch", ["local", "torchrun", "slurm", "deepspeed"])
@settings(max_examples=20, phases=ONCE)
@given(
    said=some.dictionaries(some.sampled_from(["data.path", "data.text_key", "model.hf", "cluster.device.name"]), hostile, max_size=2),
    wild=some.tuples(hostile, hostile),
    tamed=tame_but_one(3),
    environment=environments,
)
def test_a_script_does_nothing_but_what_it_says(
    launch: str,
    said: dict[str, str],
    wild: tuple[str, str],
    tamed: list[str],
    environment: dict[str, str],
    run: Run,
    stand_ins: FakeCommands,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On one machine the name and the run folder may be anything; what others start is of harmless words, or there is no script."""
    top = tmp_path_factory.mktemp("at") / "in"
    top.mkdir()
    (top / "hosts").write_text("w1 slots=2\nw2 slots=1\n")
    name, folder = wild if launch == "local" else tamed[:2]
    told: dict[str, Any] = {**said, "name": name, "log.dir": str(top / folder), "launch.name": launch}
    if launch in ("torchrun", "deepspeed"):
        told |= {"launch.hostfile": str(top / "hosts"), "launch.include": "w1:1@w2", "launch.address": tamed[2]}
        told |= {"cluster.nodes": 2, "cluster.gpus": 1, "launch.environment": ("AWS_SECRET",)}
    asked = with_changes(run, told.items())
    with place(stand_ins, top, environment, str(stand_ins.folder / "python")):
        try:
            made = launch_commands(asked, resolve_hosts(asked))
        except Unreadable:
            assert launch != "local"
            return
        plan = make_plan(asked)
        text = "\n".join(script_lines(asked, plan, made))
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
        hosts_of_it = [str(number) for number in range(len(made.commands))] if len(made.commands) > 1 else [""]
        for number in hosts_of_it:
            done = subprocess.run(["bash", "-c", text, "bash", number], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
        handed_over = with_absolute_paths(asked)
    assert not list(top.parent.rglob("pwned*"))
    assert encoder.decode((run_folder(asked) / "run.json").read_bytes(), type=Run) == handed_over
    assert json.loads((run_folder(asked) / "plan.json").read_bytes()) == json.loads(encoder.encode(plan))
    for file in made.files:
        assert file.path.read_text() == file.text
    started = [call for call in stand_ins.calls if Path(call["argv"][0]).name == "python"]
    if launch in ("local", "slurm"):
        assert [call["argv"][1:] for call in started] == [["-m", RANK_MODULE, f"{run_folder(asked)}/run.json"]] * 2
        ranks = {tuple(call["environment"][key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")) for call in started}
        assert ranks == {(str(rank), str(rank), "2", "127.0.0.1") for rank in range(2)}
        return
    assert [tuple(call["argv"]) for call in started] == [each.argv for each in made.commands]
    for call, each in zip(started, made.commands, strict=True):
        assert each.environment.items() <= call["environment"].items()
        assert not set(each.unset) & set(call["environment"])
        assert call["folder"] == str(each.folder or top)
