"""`distrain export`: a run's newest checkpoint as a folder that transformers loads, checked before it has its name."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from msgspec import json as encoder
from msgspec import to_builtins
from safetensors.torch import load_file, save_file

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.manifest_edits import drop_record, edit_extra
from distrain.trainer.loop.offline.export import export
from distrain.trainer.loop.offline.export_checks import (
    CHECK_BYTES,
    check_export,
    check_logits,
    compare_logits,
    layers_in,
    silent_transformers,
)
from distrain.trainer.loop.offline.export_folder import new_folder
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run
from distrain.trainer.loop.offline.saved_weights import finite_in
from distrain.trainer.models.build import named_weights
from distrain.trainer.models.families import op_table
from distrain.trainer.models.hf_format.weights import write_hf_folder
from distrain.trainer.models.ops.op_table import parameter_count
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.rundir.metric_rows import read_step_rows
from distrain.trainer.spec.problem import Unreadable

SMALL = ("model.layers=2", "data=synthetic", "train.batch=4", "train.microbatch=2", "train.seq=32", "train.steps=4", "optim.warmup=1")
FEW = (*SMALL, "train.evaluate.every=0", "checkpoint.every=2", "log.every=3")
# fmt: off
KINDS = {
    "gpt2":            ("model=tiny",),
    "gpt2 as it fits": ("model=tiny", "model.bias=false", "model.tied=false", "model.vocab_multiple=192", "train.precision=bf16"),
    "llama":           ("model=tiny_llama", "parallel.zero=3"),
    "qwen2":           ("model=tiny_llama", "model.qkv_bias=true", "model.tied=true", "model.vocab=250", "model.vocab_multiple=8"),
    "deepseek_v3":     ("model=tiny_mla", "model.router.score=sigmoid", "model.router.bias=true", "model.router.bias_rate=0.003",
                        "model.mtp.layers=1"),
    "qwen3_next":      ("model=tiny_hybrid", "model.layers=4", "parallel.zero=1"),
}
# fmt: on


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """A trained run of each architecture."""
    top = tmp_path_factory.mktemp("runs")
    return {kind: ranks.train(top / kind.replace(" ", "_"), "quickstart", *FEW, *overrides).folder for kind, overrides in KINDS.items()}


def test_a_run_logs_as_often_as_it_is_told_and_its_last_step(runs: dict[str, Path]) -> None:
    assert [row["step"] for row in read_step_rows(runs["gpt2"])] == [3, 4]


def ours(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a run's newest checkpoint."""
    found = load_saved_run(folder)
    with torch.no_grad():
        return load_model(found, torch.device("cpu")).logits(tokens)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_our_logits(runs, kind: str, tmp_path: Path, capsys) -> None:
    import transformers

    export(runs[kind], tmp_path / "out", "fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert model.config.model_type == kind.split()[0]
    tokens = torch.randint(load_saved_run(runs[kind]).run.model.vocab, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens).logits - ours(runs[kind], tokens)).abs().max() <= 1e-5
    assert f"from those of transformers {transformers.__version__}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_without_transformers_our_own_reader_checks_the_export(runs, kind: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    export(runs[kind], tmp_path / "out", "fp32")
    said = re.search(r"are (\S+) from those of our own reader \(transformers is not installed\)", capsys.readouterr().out)
    assert said
    assert float(said[1]) <= 1e-6


@pytest.mark.parametrize(("dtype", "stored"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_written_in_the_requested_dtype_and_checked_in_it(
    runs, dtype: str, stored: torch.dtype, tmp_path: Path, capsys
) -> None:
    export(runs["gpt2"], tmp_path / "out", dtype)
    assert {each.dtype for each in load_file(tmp_path / "out" / "model.safetensors").values()} == {stored}
    rounded = re.search(r"; computed in (\w+) they are (\S+)% from these \(rms\)$", capsys.readouterr().out, re.MULTILINE)
    if dtype == "fp32" or find_spec("transformers") is None:
        assert rounded is None
    else:
        assert rounded
        assert rounded[1] == dtype
        assert 0 <= float(rounded[2]) < 2


def test_a_weight_that_a_dtype_can_not_hold_is_refused() -> None:
    assert finite_in(torch.bfloat16, "head.weight", torch.tensor([7e4])).dtype == torch.bfloat16
    with pytest.raises(Unreadable, match=r"^head\.weight is not finite as float16: use --dtype fp32$"):
        finite_in(torch.float16, "head.weight", torch.tensor([1.0, 7e4]))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_that_overflows_in_half_precision_is_not_exported_in_it(runs, tmp_path: Path) -> None:
    found = load_saved_run(runs["gpt2"])
    module = load_model(found, torch.device("cpu"))
    with torch.no_grad():
        dict(module.named_parameters())["layers.0.mlp.up.weight"].mul_(2.0**19)  # finite in float16, and what it computes is not
        dict(module.named_parameters())["layers.0.mlp.down.weight"].mul_(2.0**-19)
        for each in module.parameters():
            each.copy_(each.bfloat16())
    for dtype, refused in (("bf16", False), ("fp16", True)):
        weights = ((name, each.to(torch.float32 if refused else torch.bfloat16)) for name, each in named_weights(module, found.run))
        write_hf_folder(weights, found.run, tmp_path / dtype)
        with pytest.raises(Unreadable, match="use --dtype bf16 or fp32") if refused else nullcontext():
            assert check_logits(module, found.run, tmp_path / dtype, dtype)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_model_larger_than_memory_the_first_layers_are_compared(runs, kind: str, tmp_path: Path, capsys) -> None:
    run = load_saved_run(runs[kind]).run
    room = CHECK_BYTES * parameter_count(op_table(run), 2) - 1
    export(runs[kind], tmp_path / "whole", "bf16")
    export(runs[kind], tmp_path / "out", "bf16", memory=room)
    first, every = (many * run.model.layers_in_group for many in (1, 2))
    says = f"; read back equal; of the first {first} of {every} layers, which fit into memory twice, logits on 3 "
    assert says in capsys.readouterr().out
    assert {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()} == {
        each.name: each.read_bytes() for each in (tmp_path / "whole").iterdir()
    }
    for name, each in load_file(tmp_path / "out" / "model.safetensors").items():  # transformers keeps the router's bias in float32
        assert each.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
    export(runs[kind], tmp_path / "unchecked", "bf16", memory=1000)
    assert "; read back equal; logits are not compared: one layer and the embedding take more than" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "unchecked", "whole"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_checkpoint_and_the_mean_of_both_are_exported(runs, kind: str, tmp_path: Path, capsys) -> None:
    export(runs[kind], tmp_path / "two", "fp32", step=2)
    export(runs[kind], tmp_path / "four", "fp32", step=4)
    export(runs[kind], tmp_path / "mean", "fp32", average=2)
    heads = [line.partition(", ")[0] for line in capsys.readouterr().out.splitlines() if "parameters in fp32" in line]
    assert heads == ["step 2", "step 4", "mean of steps 2 and 4"]
    two, four, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "four", "mean"))
    assert any(not torch.equal(two[name], four[name]) for name in two)
    for name, each in mean.items():
        torch.testing.assert_close(each, (two[name] + four[name]) / 2, rtol=0, atol=0)


def test_checkpoints_that_are_not_there_are_refused(runs, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"checkpoints has no checkpoint of step 3: steps 2, 4 are there$"):
        export(runs["gpt2"], tmp_path / "out", "fp32", step=3)
    says = r"of the checkpoints in \S+ up to step 4, 2 can be averaged, not 3: train with checkpoint\.keep=3 and checkpoint\.every, "
    with pytest.raises(Unreadable, match=says):
        export(runs["gpt2"], tmp_path / "out", "fp32", average=3)
    with pytest.raises(Unreadable, match=r"up to step 2, 1 can be averaged, not 2: "):
        export(runs["gpt2"], tmp_path / "out", "fp32", step=2, average=2)
    shutil.copytree(runs["gpt2"], tmp_path / "run")
    shard = next((tmp_path / "run" / "checkpoints" / "step_2").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")
    with pytest.raises(Unreadable, match=r"up to step 4, 1 can be averaged, not 2: "):
        export(tmp_path / "run", tmp_path / "out", "fp32", average=2)
    (tmp_path / "run" / "checkpoints" / "step_2" / "manifest.json").write_text("")
    with pytest.raises(Unreadable, match=r"step_2 does not verify: manifest\.json is empty: restore it, or take another step"):
        export(tmp_path / "run", tmp_path / "out", "fp32", step=2)


@pytest.mark.parametrize(
    ("kind", "tensor", "ours"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", r"layers\.1\.mlp\.down\.weight"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight", r"mtp\.0\.join\.weight"),
    ],
)
def test_a_weight_that_is_written_wrong_is_found(runs, kind: str, tensor: str, ours: str, tmp_path: Path) -> None:
    export(runs[kind], tmp_path / "out", "bf16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[tensor][5, 7] += 2**-9
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unreadable, match=rf"{ours} is another one in the written folder than in .*step_4"):
        check_export(load_saved_run(runs[kind]), tmp_path / "out", "bf16", memory=1000)


def test_logits_may_differ_by_as_much_as_float32_rounds() -> None:
    """A reader's by 2e-4: our own are 5e-4 from those in float64, or only 1e-6."""
    ours = torch.ones(1, 2, 3)

    def compare(rounding: float) -> str:
        return compare_logits(ours, ours + 2e-4, lambda: ours.double() - rounding, "a reader", "of a model", "report it")

    assert compare(5e-4).endswith("are 2.0e-04 from those of a reader")
    with pytest.raises(Unreadable, match=r"the logits of a reader of a model are 2\.0e-04 from ours"):
        compare(1e-6)


def test_layers_are_compared_only_with_one_of_experts_among_them() -> None:
    run = load_recipe("quickstart", ["model=tiny_mla", "model.dense_layers=2"])
    table = op_table(run)
    for layers, compared in ((1, 0), (2, 0), (3, 3), (4, 4)):
        assert layers_in(CHECK_BYTES * parameter_count(table, layers), run) == compared


def test_the_verb_writes_the_export_and_nothing_else(runs, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, "-m", "distrain", "export", str(runs["llama"]), "out"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    checked, wrote, last, following = done.stdout.splitlines()
    facts = make_plan(load_saved_run(runs["llama"]).run).model
    assert facts
    assert checked.startswith(f"step 4, {facts.parameters:,} parameters in fp32; read back equal; logits on 3 sequences of 32 tokens are ")
    assert wrote == "wrote config.json, generation_config.json, model.safetensors"
    assert last == f"done: {tmp_path / 'out'}"
    assert following.startswith("next: ")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert ", ".join(sorted(each.name for each in (tmp_path / "out").iterdir())) == wrote.removeprefix("wrote ")
    assert {each.stat().st_mode for each in (tmp_path / "out").iterdir()} == {(tmp_path / "out" / "config.json").stat().st_mode}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_suggested_command_loads_the_folder(runs, tmp_path: Path, capsys) -> None:
    where = tmp_path / "it's here $HOME"
    export(runs["llama"], where, "fp32")
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LlamaForCausalLM(")


def test_a_broken_checkpoint_is_passed_over(runs, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["gpt2"], folder)
    (folder / "checkpoints" / "step_4" / "manifest.json").write_text("")
    export(folder, tmp_path / "out", "fp32")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "passed over step_4: manifest.json is empty"
    assert second.startswith("step 2, ")


def test_a_failed_export_leaves_no_files(tmp_path: Path) -> None:
    def fails() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "model.safetensors").touch()
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert not list(tmp_path.iterdir())


NO_CLASS = (
    "none of Hugging Face's GPT-2, Llama, Mistral, Qwen, OLMo, Gemma 3, Mixtral, GLM-4.5, DeepSeek, gpt-oss and Qwen3-Next "
    "computes this model"
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model=tiny_moe", "model.shared_experts=1"), NO_CLASS),
        (("model.positions=rope",), NO_CLASS),
        (("model=tiny_hybrid", "model.capacity=2.0"), NO_CLASS),
    ],
)
def test_a_model_that_can_not_be_exported_is_refused(runs, overrides: tuple[str, ...], says: str, tmp_path: Path) -> None:
    shutil.copytree(runs["gpt2"], tmp_path / "run")
    run = to_builtins(load_recipe("quickstart", overrides))
    edit_extra(tmp_path / "run" / "checkpoints" / "step_4", lambda extra: extra.update(run=run))
    with pytest.raises(Unreadable) as wrong:
        export(tmp_path / "run", tmp_path / "out", "fp32")
    (problem,) = wrong.value.problems
    assert problem.says.startswith(says)


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(encoder.encode(load_recipe("quickstart")))
    with pytest.raises(Unreadable, match="has no checkpoint yet: `distrain fit` saves one every "):
        export(tmp_path, tmp_path / "out", "fp32")


@pytest.fixture
def with_another_run_file(runs, tmp_path: Path) -> Path:
    """The folder of a run of two layers whose run.json was replaced by that of a run of one layer with more heads."""
    folder = tmp_path / "run"
    shutil.copytree(runs["gpt2"], folder)
    said = json.loads((folder / "run.json").read_text())
    said["model"] |= {"layers": 1, "heads": 2 * said["model"]["heads"]}
    (folder / "run.json").write_text(json.dumps(said))
    return folder


def test_the_model_is_the_checkpoints_even_if_run_json_differs(runs, with_another_run_file: Path, tmp_path: Path, capsys) -> None:
    for folder, out in ((with_another_run_file, tmp_path / "one"), (runs["gpt2"], tmp_path / "other")):
        export(folder, out, "fp32")
    one, other = ((tmp_path / name) for name in ("one", "other"))
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    shutil.rmtree(with_another_run_file / "ranks")
    (with_another_run_file / "run.json").unlink()
    export(with_another_run_file, tmp_path / "third", "fp32")


def test_a_checkpoint_of_an_earlier_version_is_read_with_run_json_and_a_remark(with_another_run_file: Path, tmp_path: Path, capsys) -> None:
    path = with_another_run_file / "checkpoints" / "step_4"
    drop_record(path)
    with pytest.raises(
        Unreadable, match=r"step_4 holds a weight layers\.1\.\S+, which the model of its run does not have: restore the run\.json"
    ):
        export(with_another_run_file, tmp_path / "out", "fp32")
    assert capsys.readouterr().out == "step_4 was saved by an earlier version and does not name its model: taking run.json's\n"
    (with_another_run_file / "run.json").write_text("{}")
    with pytest.raises(Unreadable, match=r"step_4 does not name its model, and \S+run\.json can't be read: restore the run\.json that"):
        export(with_another_run_file, tmp_path / "out", "fp32")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "full"], "full exists and is not empty: choose a new folder"),
        (["run", "full/file"], "full/file is a file: choose a new folder"),
        (["run", "astray"], "astray is a dangling link: choose a new folder"),
        (["nowhere", "out"], "nowhere does not exist: `distrain ls runs .` lists the runs there"),
        (["full/nowhere", "out"], "full/nowhere does not exist: give the folder of a run, such as runs/quickstart"),
        (["runn", "out"], "runn does not exist: did you mean run?"),
        (["run/run.json", "out"], "run/run.json is not a folder: did you mean run?"),
        (["full", "out"], "full holds no run.json: give the folder of a run, such as runs/quickstart"),
        ([".", "out"], ". holds no run.json: did you mean run?"),
        (["run", "out", "--dtype", "fp8"], "invalid value for '--dtype': 'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
        (["run"], "DEST is missing: write `distrain export RUN_DIR DEST`"),
    ],
)
def test_wrong_arguments_get_one_line(arguments: list[str], line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    for name in ("run/run.json", "full/file"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere" / "at" / "all")
    monkeypatch.chdir(tmp_path)
    assert command(["export", *arguments]) == 2
    assert capsys.readouterr().err == f"distrain: {line}\n"


def test_a_destination_that_can_only_be_read_is_refused_before_the_model_is_loaded(tmp_path: Path, read_only_disk: Path, capsys) -> None:
    (tmp_path / "run.json").touch()
    assert command(["export", str(tmp_path), f"{read_only_disk}/new/out"]) == 2
    says = f"{read_only_disk}/new/out: nothing can be created in {read_only_disk}: choose another folder"
    assert capsys.readouterr().err == f"distrain: {says}\n"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_what_transformers_warns_of_its_own_future_is_not_shown() -> None:
    silent_transformers()
    with warnings.catch_warnings(record=True) as shown:
        for module in ("transformers.modeling_utils", "ours"):
            warnings.warn_explicit("old", FutureWarning, f"{module}.py", 1, module=module)
    assert [each.filename for each in shown] == ["ours.py"]
