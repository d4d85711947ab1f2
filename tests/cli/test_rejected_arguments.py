"""Wrong arguments and recipes: the exact lines on stderr for each kind, and exit status 2."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.trainer.spec.problem import Unreadable

SIZES = "NODESxGPUS as 384x8, or DATAxTENSORxPIPELINE as 6x8x64"
AUTO = "cluster.device.memory=auto works for a CPU only, not for A100-80G: set it in bytes, as cluster.device.memory=80e9"
TABLE: list[tuple[str, list[str]]] = [
    # verbs and options
    ("plann conf=quickstart", ["no verb plann: did you mean plan?"]),
    (
        "foo conf=quickstart",
        ["no verb foo: known: calibrate, cp, doctor, evaluate, export, fit, generate, ls, plan, prove, report, search, show, simulate"],
    ),
    (
        "train conf=quickstart",
        ["no verb train: write distrain fit conf=NAME, which trains, and goes on from the newest checkpoint of its run folder"],
    ),
    ("eval runs/x", ["no verb eval: write distrain evaluate RUN_DIR"]),
    ("diff a b", ["no verb diff: write distrain plan -m conf=A,B for plans, distrain report RUN_DIR RUN_DIR for runs"]),
    ("profile", ["no verb profile: write distrain fit conf=NAME log.profile=[FIRST_STEP,LAST_STEP]"]),
    ("tensorboard", ["no verb tensorboard: write distrain fit conf=NAME log.sinks=[console,jsonl,tensorboard]"]),
    ("help", ["no verb help: write distrain --help"]),
    ("help plan", ["no verb help: write distrain plan --help"]),
    ("help nothing", ["no verb help: write distrain --help"]),
    ("--json plan conf=quickstart", ["no option --json: write it after the verb, as distrain plan conf=quickstart --json"]),
    ("--config-dir own fit conf=a", ["no option --config-dir: write it after the verb, as distrain fit conf=a --config-dir own"]),
    ("--tokens generate runs/x", ["no option --tokens: write it after the verb, as distrain generate runs/x --tokens"]),
    ("--json doctor_", ["no option --json: did you mean --version?"]),
    ("--conf=quickstart plan", ["no option --conf: write conf=quickstart, without dashes"]),
    ("plan --conf quickstart", ["no option --conf: write conf=quickstart, without dashes"]),
    ("report", ["RUN_DIR is missing: write `distrain report RUN_DIR`; `distrain ls runs` lists the runs"]),
    ("generate", ["RUN_DIR is missing: write `distrain generate RUN_DIR`; `distrain ls runs` lists the runs"]),
    ("conf=quickstart train.seq=8", ["conf=quickstart comes after a verb: distrain plan conf=quickstart train.seq=8"]),
    ("plan conf=quickstart --jsn", ["no option --jsn: did you mean --json?"]),
    ("plan conf=quickstart --parallel.tp=2", ["no option --parallel.tp: write parallel.tp=2, without dashes"]),
    ("plan conf=quickstart --config-dir", ["option '--config-dir' requires an argument"]),
    ("plan conf=quickstart --config-dir=/nowhere", ["--config-dir=/nowhere is not a folder: name one that exists"]),
    ("ls modle", ["no group modle: did you mean model?"]),
    ("ls modle=tiny", ["no group modle: did you mean model?"]),
    ("ls model=tinny", ["model=tinny names no model: did you mean tiny?"]),
    ("ls conf=quikstart", ["no recipe quikstart: did you mean quickstart?"]),
    # conf=
    ("plan", ["conf=NAME is missing: write `distrain plan conf=NAME`; `distrain ls` lists the recipes"]),
    ("show train.seq=8", ["conf=NAME is missing: write `distrain show conf=NAME`; `distrain ls` lists the recipes"]),
    ("plan quickstart", ["quickstart is neither conf=NAME nor KEY=VALUE: write conf=quickstart"]),
    ("plan quikstart", ["quikstart is neither conf=NAME nor KEY=VALUE: did you mean conf=quickstart?"]),
    ("plan conf=", ["conf= names no recipe: `distrain ls` lists them"]),
    (
        "plan conf=quickstart conf=gpt2_124m",
        ["conf is given 2 times (quickstart, gpt2_124m): give it once, or compare them with distrain plan -m conf=quickstart,gpt2_124m"],
    ),
    ("plan conf=quickstart conf=quickstart", ["conf is given 2 times (quickstart, quickstart): give it once"]),
    ("fit conf=quickstart conf=gpt2_124m", ["conf is given 2 times (quickstart, gpt2_124m): give it once"]),
    ("plan conf=quikstart", ["no recipe quikstart: did you mean quickstart?"]),
    ("plan conf=gpt3", ["no recipe gpt3: did you mean gpt3_175b?"]),
    ("plan conf=./nowhere/mine.yaml", ["conf=./nowhere/mine.yaml: no such file: there is no folder nowhere"]),
    ("plan conf=/", ["conf=/ is a folder: name a YAML file in it"]),
    # syntax of overrides
    ("plan conf=quickstart parallel.tp", ["parallel.tp has no value: write parallel.tp=VALUE"]),
    ("plan conf=quickstart parallel.tp=", ["parallel.tp= has no value: write parallel.tp=VALUE"]),
    ("plan conf=quickstart model", ["model has no value: write model=NAME; `distrain ls model` lists the names"]),
    ("plan conf=quickstart nonsense", ["'nonsense' is neither conf=NAME nor KEY=VALUE"]),
    ("plan conf=quickstart parallel.tp==2", ["parallel.tp==2 has two equals signs: write parallel.tp=2"]),
    ("plan conf=quickstart =2", ["=2 has no key: write KEY=VALUE"]),
    ("plan conf = quickstart", ["conf=quickstart is typed with a space beside =: leave it out"]),
    ("plan conf=quickstart parallel.tp= 2", ["parallel.tp=2 is typed with a space beside =: leave it out"]),
    ("plan conf=quickstart optim.lr 1e-4", ["optim.lr 1e-4 has no equals sign: write optim.lr=1e-4"]),
    (
        "plan conf quickstart device h200",
        ["conf quickstart has no equals sign: write conf=quickstart", "device h200 has no equals sign: write device=h200"],
    ),
    ("plan -c quickstart", ["no option -c: write conf=quickstart, without dashes"]),
    ("plan conf=gpt3_13b", ["no recipe gpt3_13b: it is a model: write model=gpt3_13b behind conf=RECIPE"]),
    ("plan conf=quickstart cluster=2\u00d78", ["cluster=2\u00d78: the value can't be read: write cluster=2x8"]),
    ("plan conf=quickstart optim.lr=3e\u22124", ["optim.lr=3e\u22124: the value can't be read: write optim.lr=3e-4"]),
    ("plan conf=quickstart optim.betas=[0.9,0.99", ["optim.betas=[0.9,0.99: the value can't be read: close every bracket and quote"]),
    (
        "plan conf=quickstart optim.betas=[0.9,,0.99]",
        ["optim.betas=[0.9,,0.99]: the value can't be read: write one comma between two entries"],
    ),
    # unknown keys
    ("plan conf=quickstart model.layer=12", ["no key model.layer: did you mean model.layers?"]),
    ("plan conf=quickstart +model.layer=12", ["no key model.layer: did you mean model.layers?"]),
    ("plan conf=quickstart paralel.tp=2", ["no key paralel.tp: did you mean parallel.tp?"]),
    ("plan conf=quickstart tp=2", ["no key tp: write parallel.tp=2"]),
    ("plan conf=quickstart schedule=1f1b", ["no key schedule: did you mean parallel.schedule or optim.schedule?"]),
    ("plan conf=quickstart modle=tiny", ["no key modle: did you mean model?"]),
    ("plan conf=quickstart cluster.device.peak.bf61=1e12", ["no key cluster.device.peak.bf61: did you mean bf16?"]),
    ("plan conf=quickstart hydra.run.dir=x", ["no key hydra.run.dir: distrain does not use Hydra's settings"]),
    (
        "plan conf=quickstart ~cluster.device.peak.fp8",
        ["~cluster.device.peak.fp8 removes a key that the recipe does not set: leave it out"],
    ),
    # options of groups
    ("plan conf=quickstart model=tinny", ["model=tinny names no model: did you mean tiny?"]),
    ("plan conf=quickstart device=h100", ["device=h100 names no device: did you mean h100_80g or h100_96g?"]),
    ("plan conf=quickstart cluster.device=h200", ["cluster.device=h200 names a device: write device=h200"]),
    (
        "plan conf=llama3_8b cluster.device.name=h200",
        ["cluster.device.name=h200 changes only the name of the device, not its figures: write device=h200"],
    ),
    ("plan conf=quickstart size/model=tiny", ["size/model=tiny: no group size/model: did you mean model?"]),
    # values
    ("plan conf=quickstart parallel.tp=two", ["parallel.tp=two is not a whole number, at least 1"]),
    ("plan conf=quickstart checkpoint.every=10min", ["checkpoint.every=10min is not a whole number, at least 0 (steps)"]),
    (
        "plan conf=quickstart checkpoint.accept=optim.name",
        ["checkpoint.accept=optim.name is not a list of text: write checkpoint.accept=[optim.name]"],
    ),
    ("plan conf=quickstart data.end='<|end|>'", ["data.end=<|end|> is not a whole number, at least 0: give the token's id"]),
    ("plan conf=quickstart train.batch=-8", ["train.batch=-8 is not a whole number, at least 1"]),
    ("plan conf=quickstart parallel.zero=4", ["parallel.zero=4 is not one of 0, 1, 2, 3"]),
    ("plan conf=quickstart parallel.recompute=ful", ["parallel.recompute=ful is not one of none, selective, full: did you mean full?"]),
    ("plan conf=quickstart parallel.sequence=1", ["parallel.sequence=1 is not true or false: write true"]),
    ("plan conf=quickstart optim.lr=0", ["optim.lr=0 is not a number, above 0"]),
    (
        "plan conf=quickstart log.sinks=wandb",
        ["log.sinks=wandb is not a list, each one of console, jsonl, wandb, tensorboard: write log.sinks=[console,jsonl,wandb]"],
    ),
    ("plan conf=quickstart optim.betas=[0.9]", ["optim.betas=[0.9] is not a list of 2, each a number, at least 0, below 1"]),
    ("plan conf=quickstart train.seq=${train.sq}", ["train.seq=${train.sq} can't be resolved: Interpolation key 'train.sq' not found"]),
    ("plan conf=quickstart model.hf=/nowhere", ["model.hf=/nowhere: No such file or directory: name a config.json or its folder"]),
    # a cluster's size
    ("plan conf=gpt3_175b cluster=7x8x3x2", [f"cluster=7x8x3x2 has 4 numbers: write {SIZES}"]),
    (
        "plan conf=gpt3_175b cluster=4x8xH100",
        ["cluster=4x8xH100 names no cluster: write cluster=4x8 device=NAME; `distrain ls device` lists the names"],
    ),
    ("plan conf=gpt3_175b parallel=fsdp", ["parallel=fsdp names no parallel: write parallel=zero3"]),
    (
        "plan conf=gpt3_175b model=org/name",
        ["model=org/name names no model: run `hf download org/name --local-dir name`, and set model.hf=name"],
    ),
    ("plan conf=gpt3_175b cluster=128", [f"cluster=128 names no cluster: a size is {SIZES}"]),
    ("plan conf=gpt3_175b cluster=0x8", ["cluster=0x8 has a 0: every number is at least 1"]),
    ("plan conf=gpt3_175b cluster=7x3x5", ["cluster=7x3x5 is 105 GPUs, not a multiple of the 8 in a node: cluster=8x3x5 is 120"]),
    (
        "plan conf=gpt3_175b cluster=64x8 cluster.nodes=4",
        ["cluster=64x8 means cluster.nodes=64, but cluster.nodes=4 is set too: remove one of them"],
    ),
    (
        "plan conf=gpt3_175b cluster.device.memory=auto",
        [AUTO],
    ),
    # sweeps
    ("plan conf=quickstart parallel.tp=1,2", ["parallel.tp=1,2 is a sweep: add -m to plan or fit each"]),
    (
        "plan conf=quickstart optim.betas=0.9,0.99",
        ["optim.betas=0.9,0.99 is a sweep: add -m to plan or fit each, or write optim.betas=[0.9,0.99] for a list"],
    ),
    (
        "plan conf=quickstart parallel.tp=interval(1,3)",
        ["parallel.tp=interval(1,3) is not a finite list of values: write parallel.tp=range(START,STOP,STEP)"],
    ),
    ("plan conf=quickstart -m parallel.zero=0,5", ["parallel.zero=5 is not one of 0, 1, 2, 3"]),
    ("plan conf=quickstart -m train.batch=range(1,100000)", ["the sweep has more than 10,000 layouts: sweep fewer values"]),
    ("plan conf=quickstart -m model=glob(no*)", ["model=glob(no*) matches nothing: `distrain ls model` lists the names"]),
    # several problems at once
    (
        "plan conf=quickstart modle=tiny parallel.tpp=2 parallel.tp=1,2 a==b train.batch=many",
        [
            "no key modle: did you mean model?",
            "no key parallel.tpp: did you mean parallel.tp?",
            "parallel.tp=1,2 is a sweep: add -m to plan or fit each",
            "a==b has two equals signs: write a=b",
            "train.batch=many is not a whole number, at least 1",
        ],
    ),
    (
        "plan quickstart parallel.zero model=tinny",
        [
            "quickstart is neither conf=NAME nor KEY=VALUE: write conf=quickstart",
            "parallel.zero has no value: write parallel.zero=VALUE",
            "model=tinny names no model: did you mean tiny?",
        ],
    ),
]

FILES: list[tuple[str, list[str]]] = [
    ("name: x\nmodel: [1\n", ["FILE, line 2, column 8: a [ opens here and does not close: close it, and put commas between its entries"]),
    (
        "train: {steps: 1\nname: x\n",
        ["FILE, line 1, column 8: a { opens here and does not close: close it, and put commas between its keys"],
    ),
    ("model: {hidden: 64 layers: 2}\n", ["FILE, line 1, column 26: a comma is missing before this: put commas between the entries"]),
    ("model: {hidden: 64 {a: 1}}\n", ["FILE, line 1, column 20: a comma is missing before this {: put commas between the entries"]),
    ('name: "x" 3\n', ["FILE, line 1, column 11: text stands behind a quoted value: put all of it inside the quotes"]),
    ("a: [1,,2]\n", ["FILE, line 1, column 7: nothing stands before this comma: write an entry there, or leave the comma out"]),
    ("a: {, b: 2}\n", ["FILE, line 1, column 5: nothing stands before this comma: write an entry there, or leave the comma out"]),
    ("a: [1, {b: ]\n", ["FILE, line 1, column 12: a [ or { before this is not closed: close it"]),
    ("a: ]\n", ["FILE, line 1, column 4: no [ opens here: leave ] out, or put the text in quotes"]),
    ("a: [1, }\n", ["FILE, line 1, column 8: a [ or { before this is not closed: close it"]),
    ("a: @b\n", ["FILE, line 1, column 4: no value begins with this character: put the value in quotes"]),
    ("a: *b\n", ["FILE, line 1, column 4: * names an anchor, and none here is called so: put a text that begins with * in quotes"]),
    ("a: !b c\n", ["FILE, line 1, column 4: ! begins a tag, and recipes have none: put a text that begins with ! in quotes"]),
    ('a: "\\q"\n', ["FILE, line 1, column 6: a backslash and no letter that YAML knows behind it: put the text in single quotes"]),
    ("a: |b\n", ["FILE, line 1, column 5: | or > begins a text on lines of its own: put a text that begins with it in quotes"]),
    ("name: 'x\ntrain:\n  steps: 1\n", ["FILE, line 1, column 7: a quote opens here and does not close: close it"]),
    ("train:\n  seq: 2\n  steps:1\n", ["FILE, line 3, column 3: this is not `KEY: VALUE`: write a colon and a space after the key"]),
    (
        "train:\n steps: 5\n   seq: 4\n",
        ["FILE, line 3, column 7: a second key in one value: indent keys alike, a space after each colon; quote a text with `: `"],
    ),
    (
        "train:\n    steps: 5\n  seq: 4\n",
        ["FILE, line 3, column 3: the line does not fit those above it: indent all keys of a section alike, and none below a value"],
    ),
    (
        "train: [1, 2]\n  steps: 5\n",
        ["FILE, line 2, column 3: the line does not fit those above it: indent all keys of a section alike, and none below a value"],
    ),
    (
        "defaults:\n  model: tiny\n  - train: default\n",
        ["FILE, line 3, column 3: a list entry stands where a key belongs: indent the list below its key, or leave out `- `"],
    ),
    ("name: x\n\tmodel: y\n", ["FILE, line 2, column 1: the line begins with a tab: indent with spaces"]),
    ("name: x\nname: y\n", ["FILE, line 2, column 1: found duplicate key name: keep one"]),
    ("- name\n", ["FILE holds a list: a recipe must be a mapping of keys"]),
    ("42\n", ["FILE holds one value: a recipe must be a mapping of keys"]),
    ("root:x:0 and more\nbin:x:1\n", ["FILE holds text: a recipe must be a mapping of keys"]),
    (
        "family: gpt\nlayers: 2\n",
        ["FILE holds keys of model alone: it is an option, not a recipe: name it as model=NAME, beside conf=RECIPE"],
    ),
    ("name: x\n---\nname: y\n", ["FILE, line 2, column 1: a second document begins: leave out the line ---"]),
    ("a: &a [*a]\n", ["FILE contains itself: break the loop of defaults, anchors or ${...}"]),
    ("defaults: [mine]\n", ["FILE contains itself: break the loop of defaults, anchors or ${...}"]),
    ("defaults: quickstart\n", ["FILE: defaults is not a list of `GROUP: NAME`: write each as `- model: NAME`"]),
    ("defaults: [quikstart]\n", ["FILE: its defaults name recipe quikstart, which does not exist: did you mean quickstart?"]),
    ("defaults: [model: tinny]\n", ["FILE: its defaults name model tinny, which does not exist: did you mean tiny?"]),
    ("defaults: [modle: tiny]\n", ["FILE: its defaults name group modle, which does not exist: did you mean model?"]),
    (
        "defaults: [quickstart, model: nano]\n",
        ["FILE: model is chosen twice: keep one, or write `- override model: nano` where another recipe chooses it"],
    ),
    (
        "defaults: [quickstart]\ntrain: {batch: '8', seq: 1:30, microbatch: 0x10}\noptim: {lr: '1e-3', warmup: 010, eps: 1:30.5}\n",
        [
            "train.batch='8' is text, not a whole number, at least 1: leave the quotes out",
            "train.seq=1:30 is not a whole number, at least 1 (tokens)",
            "train.microbatch=0x10 is not a whole number, at least 1 (sequences)",
            "optim.lr='1e-3' is text, not a number, above 0: leave the quotes out",
            "optim.eps=1:30.5 is not a number, above 0",
            "optim.warmup=010 is not a whole number, at least 0 (steps)",
        ],
    ),
    ("defaults: [quickstart]\nhydra: {}\n", ["FILE: no key hydra: leave it out"]),
    ("defaults: [quickstart]\nmodle: tiny\n", ["no key modle: did you mean model?"]),
    ("defaults: [quickstart]\ntrain: {batch: ${train.batch}}\n", ["FILE, line 2, column 17: ${...} inside { } or [ ]: put it in quotes"]),
    (
        "name: x\n",
        [
            f"{each} is not set: choose {each}=NAME{example}; `distrain ls {each}` lists the names"
            for each, example in (("model", ""), ("cluster", ", as cluster=dgx_h100, or cluster=local for this machine"), ("train", ""))
        ],
    ),
    (
        "defaults: [model: tiny, train: default]\ncluster: {nodes: 2, gpus: 8}\n",
        [
            (
                "cluster.device is not set: choose cluster=NAME, as cluster=dgx_h100, or cluster=local for this machine; "
                "`distrain ls cluster` lists the names"
            ),
        ],
    ),
    (
        "defaults: [model: tiny, train: default]\ncluster: {nodes: 2, gpus: 8, device: H100}\n",
        [
            (
                "cluster.device=H100 names no device: did you mean h100_80g or h100_96g? "
                "Write `- override /device@cluster.device: NAME` in the recipe's defaults instead"
            ),
        ],
    ),
    (
        "defaults: [model: tiny, cluster: dgx_h100, train: default]\noptim: xyz\ncluster: {device: h200}\n",
        [
            (
                "cluster.device=h200 is not a mapping of keys: to choose an option, "
                "write `- override /device@cluster.device: h200` in the recipe's defaults instead"
            ),
            (
                "optim=xyz names no optim: known: adamw, adamw_gpt3, adamw_llama, muon, sgd. "
                "Write `- optim: NAME` in the recipe's defaults instead"
            ),
        ],
    ),
]


@pytest.mark.parametrize(("arguments", "lines"), TABLE, ids=[row[0] for row in TABLE])
def test_each_wrong_argument_prints_one_line(arguments: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = command(shlex.split(arguments))
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"distrain: {line}" for line in lines]
    assert (status, out) == (2, "")


@pytest.mark.parametrize(("text", "lines"), FILES, ids=repr)
def test_each_problem_of_a_file_prints_one_line(text: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    status = command(["plan", f"conf={file}"])
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"distrain: {line.replace('FILE', str(file))}" for line in lines]
    assert (status, out) == (2, "")


def test_a_file_that_calls_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: !!python/object/apply:os.mkdir ['made']\n")
    assert command(["plan", f"conf={file}"]) == 2
    assert "! begins a tag, and recipes have none" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_recipe_in_other_case_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("chk.yaml", "CHI.yaml", "CHKS.yaml"):
        (tmp_path / name).write_text("defaults: [quickstart]\n")
    assert command(["plan", f"conf={tmp_path}/CHK.yaml"]) == 2
    assert capsys.readouterr().err == f"distrain: conf={tmp_path}/CHK.yaml: no such file: did you mean chk.yaml?\n"


def test_the_message_names_a_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert command(["plan", f"conf={file}"]) == 2
    assert capsys.readouterr().err == f"distrain: {file} is not valid UTF-8: save it as UTF-8\n"


def test_the_message_names_an_option_with_wrong_yaml_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("family: gpt\nlayers: ]\n")
    assert command(["plan", "conf=quickstart", "model=mine", "--config-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"distrain: {tmp_path}/model/mine.yaml, line 2, column 9: ")


INSIDE = (  # the file of an option or a recipe, what it holds, what is typed, and the mend
    ("cluster/mine.yaml", "defaults: [{device: b200}]\n", "conf=quickstart cluster=mine", "write `- /device@device: b200`"),
    ("model/mine.yaml", "defaults: [{optim: adamw}]\n", "conf=quickstart model=mine", "choose optim=adamw in the recipe"),
    ("model/mine.yaml", "defaults: [{model: tiny}]\n", "conf=quickstart model=mine", "write `- tiny`"),
    ("mine.yaml", "defaults: [quickstart, {cluster/device: b200}]\n", "conf=mine", "write `- override /device@cluster.device: b200`"),
)


@pytest.mark.parametrize(("file", "text", "words", "mend"), INSIDE)
def test_a_group_inside_another_is_told_how_it_is_written(
    file: str, text: str, words: str, mend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert command(["plan", *words.split(), "--config-dir", str(tmp_path)]) == 2
    says = capsys.readouterr().err.strip()
    assert says.startswith(f"distrain: {tmp_path / file}: ")
    assert says.endswith(f": {mend}")


def test_a_misspelt_path_gets_the_closest_file_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert command(["plan", f"conf={tmp_path}/mien.yaml"]) == 2
    assert capsys.readouterr().err == f"distrain: conf={tmp_path}/mien.yaml: no such file: did you mean mine.yaml?\n"


def test_a_recipe_in_the_current_folder_needs_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert command(["plan", "conf=mine"]) == 2
    assert capsys.readouterr().err == "distrain: no recipe mine: write conf=./mine.yaml for the file in this folder\n"


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=quick\nstart\x1b[31m"]) == 2
    assert capsys.readouterr().err.startswith("distrain: no recipe quick\\nstart\\x1b[31m: ")


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 2
    assert capsys.readouterr().out.startswith("Usage: distrain ")


KEYS = ["parallel.tp", "parallel", "model", "model.layers", "cluster", "cluster.device.peak.bf16", "optim.betas", "name", "device"]
VALUES = ["1", "null", "[]", "{}", "tiny", "${name}", "${", "x=y", "2x2x2", "???", "''", "~/x", "1,2", "a b", "inf", "{a: 1}", "0x0"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "+", "++", "~"]),
            st.sampled_from(KEYS) | st.text(max_size=4),
            st.sampled_from(["=", "", "@x="]),
            st.sampled_from(VALUES) | st.text(max_size=6),
        ).map("".join),
        max_size=3,
    )
)
def test_any_override_is_read_or_is_a_problem(overrides: list[str]) -> None:
    try:
        result = load_recipe("quickstart", overrides).name
    except Unreadable as error:
        result = str(error)
    assert result


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = shlex.join([sys.executable, "-P", "-m", "distrain", "plan", "conf=quickstart"])
    done = subprocess.run(["bash", "-c", f"rmdir {shlex.quote(str(gone))} && exec {words}"], cwd=gone, capture_output=True, text=True)
    said = "distrain: the current folder was removed: change to one that exists\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
