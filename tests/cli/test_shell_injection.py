"""Text from the user or the environment reaches a shell, on this machine or a host, unchanged or not at all.

The commands that start a run are fakes that record their calls. The fake ssh and pdsh pass their command to a shell on this machine,
as the host would, so text that a shell executes takes effect here.
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
from distrain.cli.config.load import load_recipe
from distrain.cli.keys.keys import config_keys, takes_text
from distrain.cli.pages.hosts_page import run_preflight_and_show
from distrain.tests.fakes.path_commands import PDSH, PYTHON, QUIET, SBATCH, SCONTROL, SRUN, SSH, FakeCommands
from distrain.tests.fakes.shell_text import ONCE, environments, hostile, plain, tame_but_one
from distrain.trainer.launch.agent.join_token import JOIN_TOKEN_FILE, JoinToken
from distrain.trainer.launch.commands.command import RANK_ENVIRONMENT, forwarded_variables
from distrain.trainer.launch.commands.deepspeed import PROGRAM_MODULE
from distrain.trainer.launch.hosts.hostfile import Host
from distrain.trainer.launch.hosts.shell_safe import SAFE_CHARACTERS, SSH_OPTIONS, require_shell_safe
from distrain.trainer.launch.hosts.upload import UPLOAD_REMOTE, connect_hosts, on_every_host
from distrain.trainer.launch.hosts_and_commands import BOOTSTRAP_MODULE, RANK_MODULE, launch_commands, resolve_hosts
from distrain.trainer.launch.launch_script import script_lines
from distrain.trainer.launch.preflight.preflight import _program
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.rundir.absolute_paths import with_absolute_paths
from distrain.trainer.rundir.files import run_folder, start_file
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Run

SAFE = re.compile(r"[A-Za-z0-9._/=:-]+")  # what every shell reads as one plain word


@pytest.fixture(scope="module", autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers that DeepSpeed's runner replaces, because it is called in this process."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


# One argument


@given(hostile | plain)
def test_text_is_sent_unchanged_or_refused(text: str) -> None:
    try:
        assert require_shell_safe(text, "the text", "choose another") == text
    except Unreadable as error:
        (problem,) = error.problems
        assert not SAFE.fullmatch(text) or text.startswith("-")
        assert SAFE_CHARACTERS in problem.says or "sent to other hosts" in problem.says
    else:
        assert SAFE.fullmatch(text)
        assert not text.startswith("-")


@settings(max_examples=40)
@given(environment=environments, further=some.lists(some.sampled_from(["MLFLOW_X", "AWS_SECRET", "PYTHONPATH"]), max_size=2))
def test_any_forwarded_variables_travel_in_a_file(
    environment: dict[str, str], further: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    variables = forwarded_variables(environment, further)
    assert variables == {key: value for key, value in environment.items() if key in variables}
    assert {"WANDB_API_KEY", "NCCL__X"} & set(environment) <= set(variables)
    assert set(further) & set(environment) <= set(variables)
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(JoinToken(secret="5", controllers=[], hostnames=[], slots=[], command=[], environment=variables).text())
    assert JoinToken.read(file).environment == variables


@settings(max_examples=40)
@given(request=some.dictionaries(hostile, hostile, max_size=3))
def test_a_preflight_request_is_data_in_its_program(request: dict[str, str]) -> None:
    """A preflight round is a program on the stdin of Python."""
    last = ast.parse(_program(request)).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    assert json.loads(ast.literal_eval(last.value.args[0])) == request


# A run over hosts, from its arguments to the shells of its hosts


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> FakeCommands:
    """Return fakes of every command that a launch calls."""
    fakes = FakeCommands(tmp_path_factory.mktemp("fakes"))
    programs = {"ssh": SSH, "pdsh": PDSH, "python": PYTHON, "scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH}
    for name in (*programs, "mpirun", "ompi_info", "sinfo", "distrain"):
        fakes.put(name, programs.get(name, QUIET))
    return fakes


@pytest.fixture(scope="module")
def run() -> Run:
    return load_recipe(
        "quickstart", ("model=tiny", "model.layers=2", "train.batch=8", "train.seq=16", "train.microbatch=2", "train.steps=2")
    )


@contextmanager
def patched_machine(fakes: FakeCommands, top: Path, environment: Mapping[str, str], python: str) -> Iterator[None]:
    """Run the block in a folder, with the fake commands, an environment and another path of Python."""
    fakes.forget()
    known = {"PATH": fakes.path(), "HOME": str(fakes.home), "DS_ACCELERATOR": "cpu", "SLURM_JOB_NODELIST": "w[1-2]", **environment}
    with chdir(top), mock.patch.dict(os.environ, known, clear=True), mock.patch.object(sys, "executable", python):
        yield


def start_over_hosts(run: Run, plan: Plan, runner: Any) -> Sequence[Host]:
    """Start a run over hosts as `distrain fit` does: check the hosts, upload files, start the launcher; return the hosts."""
    hosts, folder = resolve_hosts(run).hosts, run_folder(run)
    run_preflight_and_show(hosts, (), run, plan, lambda line: None)
    launch = launch_commands(run, hosts)
    token = JoinToken(
        secret="5", controllers=[], hostnames=[], slots=[], command=[], environment=forwarded_variables(os.environ, run.launch.environment)
    )
    with connect_hosts([host.name for host in hosts]) as uploads:
        on_every_host(uploads, lambda each: each.upload(folder, {"run.json": encoder.encode(run).decode(), JOIN_TOKEN_FILE: token.text()}))
    for file in launch.files:
        file.path.write_text(file.text)
        file.path.chmod(file.mode)
    (launcher,) = launch.commands
    assert launcher.folder is not None
    known = launcher.full_environment(os.environ)
    read = mock.patch.object(runner, "DEEPSPEED_ENVIRONMENT_NAME", known["DS_ENV_FILE"])  # the launcher reads it at import
    with chdir(launcher.folder), mock.patch.dict(os.environ, known, clear=True), read:
        runner.main(list(launcher.argv[4:]))
    return hosts


# The commands that DeepSpeed's launcher may send to a remote shell.
REMOTE = re.compile(r"(export [A-Z_]+=[A-Za-z0-9._/=:-]*; )+ ?cd [A-Za-z0-9._/=:-]+;( ([A-Za-z0-9._/=:-]+|--node_rank=%n))+")


def remote_commands(calls: Sequence[dict[str, Any]], run: Run, python: str) -> Iterator[str]:
    """Yield the command of each call of ssh and pdsh; fail if one contains text that is not ours."""
    for call in calls:
        name, *argv = call["argv"]
        match Path(name).name:
            case "ssh":
                *options, dashes, host, line = argv
                assert (tuple(options), dashes) == (SSH_OPTIONS, "--")
                assert SAFE.fullmatch(host)
                assert line in (f"{python} -", f"{python} -I -S {UPLOAD_REMOTE}")
                assert SAFE.fullmatch(python)
                yield line
            case "pdsh":
                at = argv.index("-w")
                assert SAFE.fullmatch(argv[at + 1].replace(",", ""))
                line = " ".join(argv[at + 2 :])
                assert REMOTE.fullmatch(line), line
                yield line
            case "mpirun" | "srun":
                assert all(re.fullmatch(r"[A-Za-z0-9._/=:,^-]+", word) for word in argv), argv


@settings(max_examples=40, phases=ONCE)
@given(
    user_texts=some.dictionaries(
        some.sampled_from(
            sorted({key for key, hint in config_keys().items() if takes_text(hint)} - {"launch.hostfile", "log.dir", "name"})
        ),
        hostile,
        max_size=3,
    ),
    named=some.lists(some.sampled_from(["AWS_SECRET", "PYTHONSTARTUP"]) | hostile, max_size=2),
    texts=tame_but_one(5),
    file=hostile.filter(lambda name: name not in ("", ".", "..")),
    filtered=some.booleans(),
    runner=some.sampled_from(["pdsh", "pdsh", "pdsh", "openmpi", "slurm"]),
    environment=environments,
)
def test_no_hostile_text_reaches_the_shell_of_a_host(
    user_texts: dict[str, str],
    named: list[str],
    texts: list[str],
    file: str,
    filtered: bool,
    runner: str,
    environment: dict[str, str],
    run: Run,
    fakes: FakeCommands,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Covers text keys, the hostfile and its path, the environment, and the paths of Python and of the run folder."""
    from deepspeed.launcher import runner as deepspeed_runner

    top = tmp_path_factory.mktemp("run") / "in"
    top.mkdir()
    name, folder, inside, *lines = texts
    lines = [f"h{number}{line}" for number, line in enumerate(lines)]
    (top / file).write_text("".join(f"{line} slots=2\n" for line in lines))
    python = f"{fakes.folder}/python" if SAFE.fullmatch(inside) else f"{fakes.folder}/{inside}/python"
    values: dict[str, Any] = {"cluster.nodes": len(lines), "cluster.gpus": 2, **user_texts, "name": name, "log.dir": str(top / folder)}
    values |= {"launch.name": "deepspeed", "launch.hostfile": str(top / file), "launch.runner": runner, "launch.environment": tuple(named)}
    if filtered and runner == "pdsh":
        values |= {"cluster.gpus": 1, "launch.include": "@".join(f"{line}:1" for line in lines), "launch.exclude": None}
    hostile_run = with_changes(run, values.items())
    hosts: Sequence[Host] = ()
    with patched_machine(fakes, top, environment, python), suppress(Unreadable):
        hosts = start_over_hosts(hostile_run, make_plan(run), deepspeed_runner)
    calls = fakes.calls
    sent = list(remote_commands(calls, hostile_run, python))
    assert not list(top.parent.rglob("pwned*")), sent
    if not hosts:
        return
    assert encoder.decode((run_folder(hostile_run) / "run.json").read_bytes(), type=Run) == hostile_run
    assert JoinToken.read(run_folder(hostile_run) / JOIN_TOKEN_FILE).environment == forwarded_variables(environment, named)
    launches = [call for call in calls if call["argv"][:5] == [python, "-u", "-m", PROGRAM_MODULE, "deepspeed.launcher.launch"]]
    assert len(launches) == (len(hosts) if runner == "pdsh" else 0)
    for number, call in enumerate(launches):
        options = dict(each.lstrip("-").partition("=")[::2] for each in call["argv"][5:9])
        assert json.loads(urlsafe_b64decode(options["world_info"])) == {host.name: list(host.slots) for host in hosts}
        assert options["node_rank"] == str(number)
        assert options["master_addr"] == (hostile_run.launch.address or hosts[0].name)
        assert call["argv"][9:] == [
            "--module",
            "--no_local_rank",
            "--enable_each_rank_log=None",
            BOOTSTRAP_MODULE,
            f"{run_folder(hostile_run)}/run.json",
        ]
        assert call["folder"] == str(run_folder(hostile_run) / "launch")
        assert RANK_ENVIRONMENT.items() <= call["environment"].items()


def test_a_run_folder_that_links_to_a_hostile_path_is_refused(run: Run, fakes: FakeCommands, tmp_path: Path) -> None:
    """DeepSpeed's launcher inserts the real path of its current folder into a command."""
    from deepspeed.launcher import runner as deepspeed_runner

    (tmp_path / "$(touch pwned)").mkdir()
    (tmp_path / "link").symlink_to("$(touch pwned)")
    (tmp_path / "hosts").write_text("w1 slots=2\n")
    hostile_run = with_changes(
        run, [("log.dir", f"{tmp_path}/link"), ("launch.name", "deepspeed"), ("launch.hostfile", f"{tmp_path}/hosts")]
    )
    python = str(fakes.folder / "python")
    with (
        patched_machine(fakes, tmp_path, {}, python),
        pytest.raises(Unreadable, match=r"\(touch pwned\)/quickstart/launch contains '\$'"),
    ):
        start_over_hosts(hostile_run, make_plan(hostile_run), deepspeed_runner)
    assert len(list(remote_commands(fakes.calls, hostile_run, python))) == 1
    assert not list(tmp_path.rglob("pwned*"))


def test_preflight_checks_a_folder_with_a_hostile_name(
    run: Run, fakes: FakeCommands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `distrain doctor` with the real program on the host."""
    folder, file = tmp_path / "a b;$(touch pwned)", tmp_path / "`touch pwned` '\"#"
    file.write_text("w1 slots=2\n")
    arguments = [f"log.dir={folder}", f"launch.hostfile={file}", "name=$(touch pwned) ;", "data.path=;touch pwned", "launch=deepspeed"]
    with patched_machine(fakes, tmp_path, {}, sys.executable):
        command(["doctor", "conf=quickstart", "cluster=1x2", *arguments])  # its data do not exist
    assert capsys.readouterr().out.splitlines()[1].startswith("w1 ")
    assert [each.name for each in folder.iterdir()] == ["$(touch pwned) ;"]
    assert list(remote_commands(fakes.calls, run, sys.executable)) == [f"{sys.executable} -"]
    assert not list(tmp_path.rglob("pwned*"))


# The output of `show --launch`


@pytest.mark.parametrize("launch", ["local", "torchrun", "slurm", "deepspeed"])
@settings(max_examples=20, phases=ONCE)
@given(
    user_texts=some.dictionaries(some.sampled_from(["data.path", "data.text_key", "model.hf", "cluster.device.name"]), hostile, max_size=2),
    names=some.tuples(hostile, hostile),
    texts=tame_but_one(3),
    environment=environments,
)
def test_a_launch_script_executes_no_hostile_text(
    launch: str,
    user_texts: dict[str, str],
    names: tuple[str, str],
    texts: list[str],
    environment: dict[str, str],
    run: Run,
    fakes: FakeCommands,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On one machine any name and run folder work; for other launchers, hostile text is refused."""
    top = tmp_path_factory.mktemp("at") / "in"
    top.mkdir()
    (top / "hosts").write_text("w1 slots=2\nw2 slots=1\n")
    name, folder = names if launch == "local" else texts[:2]
    values: dict[str, Any] = {**user_texts, "name": name, "log.dir": str(top / folder), "launch.name": launch}
    if launch in ("torchrun", "deepspeed"):
        values |= {"launch.hostfile": str(top / "hosts"), "launch.include": "w1:1@w2", "launch.address": texts[2]}
        values |= {"cluster.nodes": 2, "cluster.gpus": 1, "launch.environment": ("AWS_SECRET",)}
    hostile_run = with_changes(run, values.items())
    with patched_machine(fakes, top, environment, str(fakes.folder / "python")):
        try:
            commands = launch_commands(hostile_run, resolve_hosts(hostile_run).hosts)
        except Unreadable:
            assert launch != "local"
            return
        text = "\n".join(script_lines(hostile_run, commands))
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
        host_numbers = [str(number) for number in range(len(commands.commands))] if len(commands.commands) > 1 else [""]
        for number in host_numbers:
            process = subprocess.run(["bash", "-c", text, "bash", number], capture_output=True, text=True)
            assert (process.returncode, process.stderr) == (0, "")
        expected, (read, _) = with_absolute_paths(hostile_run), start_file(hostile_run)
    assert not list(top.parent.rglob("pwned*"))
    assert launch == "deepspeed" or encoder.decode(read.read_bytes(), type=Run) == expected
    for file in commands.files:
        assert file.path.read_text() == file.text
    starts = [call for call in fakes.calls if Path(call["argv"][0]).name == "python"]
    if launch in ("local", "slurm"):
        assert [call["argv"][1:] for call in starts] == [["-m", RANK_MODULE, f"{run_folder(hostile_run)}/run.json", str(read)]] * 2
        ranks = {tuple(call["environment"][key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")) for call in starts}
        assert ranks == {(str(rank), str(rank), "2", "127.0.0.1") for rank in range(2)}
        return
    assert [tuple(call["argv"]) for call in starts] == [each.argv for each in commands.commands]
    for call, each in zip(starts, commands.commands, strict=True):
        assert each.environment.items() <= call["environment"].items()
        assert not set(each.unset) & set(call["environment"])
        assert call["folder"] == str(each.folder or top)
