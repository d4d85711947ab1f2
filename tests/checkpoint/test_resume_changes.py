"""What a run may change before it goes on from a checkpoint: every key has a policy, and a change is refused, said or free by it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.keys.keys import config_keys
from distrain.trainer.rundir.checkpoints import newest_saved, seal
from distrain.trainer.rundir.effective_values import moment_kinds
from distrain.trainer.rundir.resume import check_resume
from distrain.trainer.rundir.resume_changes import POLICIES, Changes, acceptable_keys, compare_runs, key_policy
from distrain.trainer.rundir.run_in_manifest import run_from_record, run_record
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import DataStage, Run

Stage = tuple[tuple[float, ...], float | None]  # weights, until

DECIDED = ("model", "data", "optim", "train")  # sections of which every key has a row of its own in POLICIES


def run(*words: str) -> Run:
    return load_recipe("quickstart", words)


def changes(before: Run, *change: tuple[str, object], same_data: bool | None = True) -> Changes:
    return compare_runs(before, with_changes(before, change), step=7, same_data=same_data)


@pytest.mark.parametrize("key", [key for key in config_keys() if key.partition(".")[0] in DECIDED])
def test_every_key_of_model_data_optim_and_train_has_a_policy(key: str) -> None:
    assert any(key == name or (name.endswith(".") and key.startswith(name)) for name, _ in POLICIES)


def test_every_row_of_policies_names_a_key() -> None:
    known = {*config_keys(), "model.parameters"}
    assert not [name for name, _ in POLICIES if name not in known and not any(key.startswith(name) for key in known)]


@pytest.mark.parametrize("key", [key for key in config_keys() if key.partition(".")[0] not in DECIDED])
def test_layout_engine_launch_log_and_checkpoint_are_free(key: str) -> None:
    train_another_curve = ("parallel.compress.", "parallel.staleness")
    assert key_policy(key) == ("reported" if key.startswith(train_another_curve) else "free")


# A value for each key that the quickstart recipe does not have.
# fmt: off
OTHERS: dict[str, Any] = {
    "model.family": "llama", "model.layers": 5, "model.hidden": 512, "model.heads": 4, "model.vocab": 300, "model.kv_heads": 2,
    "model.head_dim": 64, "model.ffn": 512, "model.context": 256, "model.tied": False, "model.bias": False, "model.qkv_bias": False,
    "model.norm": "rmsnorm", "model.norm_eps": 1e-6, "model.norm_place": "after", "model.qk_norm": True,
    "model.act": "relu", "model.positions": "rope", "model.sinks": True,
}
# fmt: on


@pytest.mark.parametrize("key", OTHERS)
def test_a_different_model_is_refused_with_the_name_of_its_key(key: str) -> None:
    found = changes(run(), (key, OTHERS[key]))
    assert [problem.says.split()[0] for problem in found.problems if problem.says.startswith(f"{key} ")] == [key]
    assert all("checkpoint.accept" not in problem.mend for problem in found.problems)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.rope_base", 5e5),
        ("model.rope_share", 0.5),
        ("model.experts", 8),
        ("model.top_k", 1),
        ("model.expert_ffn", 64),
        ("model.expert_bias", True),
        ("model.capacity", 1.5),
        ("model.router.score", "sigmoid"),
        ("model.router.normalize", False),
        ("model.router.groups", 2),
        ("model.router.bias", True),
    ],
)
def test_a_different_mixture_is_refused(key: str, value: object) -> None:
    before = load_recipe("quickstart", ["model=tiny_moe"])
    assert [problem.says.split()[0] for problem in changes(before, (key, value)).problems] == [key]


@pytest.mark.parametrize(
    "change",
    [
        ("model.qk_norm_over", "all"),
        ("model.rope_local_base", 5e4),
        ("model.layer_types", ("sliding_attention", "full_attention")),
        ("model.query_pre_attn_scalar", 8),
        ("model.scale_embedding", True),
    ],
)
def test_norms_local_positions_and_scales_cannot_change(change: tuple[str, Any]) -> None:
    """Also where the window covers the sequence: layers that have one rotate by a base of their own."""
    words = ["model.qk_norm=true", "model.window=1024", "model.rope_local_base=1000"]
    before = load_recipe("quickstart", ["model=tiny_llama", *words, "model.layer_types=[full_attention, sliding_attention]"])
    assert [problem.says.split()[0] for problem in changes(before, change).problems] == [change[0]]
    same = ("model.layer_types", ("full_attention", "sliding_attention") * 2)
    assert changes(before, same, ("model.query_pre_attn_scalar", 16)) == Changes()


def test_latent_attention_reads_no_share_of_a_head() -> None:
    assert changes(load_recipe("quickstart", ["model=tiny_mla"]), ("model.rope_share", 0.5)) == Changes()


def test_the_feed_forward_of_dense_layers_cannot_change() -> None:
    """Without them all feed-forwards are experts', which model.expert_ffn sizes."""
    for layers, refused in ((0, False), (1, True)):
        before = load_recipe("quickstart", ["model=tiny_moe", f"model.dense_layers={layers}", "model.expert_ffn=192"])
        assert bool(changes(before, ("model.ffn", 64)).problems) == refused


def test_another_weight_of_further_tokens_is_reported_and_more_modules_are_refused() -> None:
    before = load_recipe("quickstart", ["model=tiny_llama", "model.mtp.layers=1"])
    found = changes(before, ("model.mtp.weight", 0.1))
    assert (found.problems, [each.text for each in found.reported]) == ((), ["model.mtp.weight 0.3 -> 0.1"])
    assert changes(before, ("model.mtp.layers", 2)).problems
    assert changes(load_recipe("quickstart", ["model=tiny_llama"]), ("model.mtp.weight", 0.1)) == Changes()


def test_another_rate_of_a_routers_bias_is_reported() -> None:
    found = changes(load_recipe("quickstart", ["model=tiny_moe", "model.router.bias=true"]), ("model.router.bias_rate", 0.001))
    assert (found.problems, [each.text for each in found.reported]) == ((), ["model.router.bias_rate 0.0 -> 0.001"])


@pytest.mark.parametrize(("key", "value"), [("train.seed", 8), ("model.init.std", 0.01), ("model.weights", "/hf"), ("optim.mup", 64)])
def test_what_draws_the_weights_that_lora_adds_to_cannot_change(key: str, value: object) -> None:
    """No checkpoint of LoRA holds them: they are drawn again when the run resumes."""
    before = load_recipe("quickstart", ["model.lora.rank=4"])
    (problem,) = changes(before, (key, value)).problems
    assert problem.says.startswith(f"{key} was ")
    assert changes(before, (key, value), ("checkpoint.accept", (key,))).problems
    weights = with_changes(before, [("model.weights", "/hf")])
    assert not changes(weights, ("train.seed", 8)).problems
    assert not changes(weights, ("model.weights", "/moved")).problems


def test_targets_of_lora_cannot_change_but_their_names_can() -> None:
    before = load_recipe("quickstart", ["model=tiny_mla", "model.lora.rank=4"])
    every = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "out", "gate", "up", "down_proj")
    assert changes(before, ("model.lora.targets", every)) == Changes()
    assert changes(before, ("model.lora.targets", every[1:])).problems


@pytest.mark.parametrize(
    "change",
    [
        ("model.rope_base", 5e5),
        ("model.rope_share", 0.5),
        ("model.qk_norm_over", "all"),
        ("model.kv_heads", 8),
        ("model.ffn", None),
        ("model.top_k", 3),
        ("model.expert_bias", True),
        ("model.router.scale", 2.0),
    ],
)
def test_a_value_with_the_same_meaning_is_no_change(change: tuple[str, object]) -> None:
    assert with_changes(run(), [change]) != run()
    assert changes(run(), change) == Changes()


def test_a_key_that_follows_from_a_changed_key_is_not_reported() -> None:
    (problem,) = changes(run("model.ffn=null"), ("model.hidden", 512)).problems
    assert problem.says == "model.hidden was 256 when step 7 was saved, and is 512 now"


def test_rows_of_a_position_table_that_follow_from_the_sequence_are_refused() -> None:
    found = changes(run(), ("train.seq", 64))
    assert [problem.says.split()[0] for problem in found.problems] == ["model.context"]
    kept = changes(run("model.context=128"), ("train.seq", 64))
    assert (kept.problems, [each.text for each in kept.reported]) == ((), ["train.seq 128 -> 64"])


def test_a_longer_sequence_than_the_position_table_has_rows_is_mended_by_the_old_length() -> None:
    (problem,) = changes(run(), ("train.seq", 256)).problems
    assert problem.says == "train.seq was 128 when step 7 was saved, and is 256 now"
    assert problem.mend.startswith("set train.seq=128 to go on")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optim.lr", 5e-4, "optim.lr 0.001 -> 0.0005"),
        ("optim.betas", (0.8, 0.9), "optim.betas [0.9,0.99] -> [0.8,0.9]"),
        ("train.batch", 32, "train.batch 16 -> 32"),
        ("train.rampup.until", 2e6, "train.rampup.until null -> 2000000.0"),
        ("train.clip", 0.0, "train.clip 1.0 -> 0.0"),
        ("train.seed", 1, "train.seed 1234 -> 1"),
        ("train.precision", "bf16", "train.precision fp32 -> bf16"),
        ("train.gradients", "fp32", "train.gradients auto -> fp32"),
        ("train.steps", 400, "train.steps 300 -> 400"),
        ("model.dropout", 0.1, "model.dropout 0.0 -> 0.1"),
    ],
)
def test_a_permitted_change_is_reported(key: str, value: object, words: str) -> None:
    found = changes(run(), (key, value))
    order = "windows come in another order: of an epoch that is under way some tokens are read twice, and as many are left out"
    assert (found.problems, list(found.remarks(7))) == ((), [f"changed since step 7: {words}", *([order] if key == "train.seed" else [])])


def test_permitted_changes_are_one_line() -> None:
    assert list(changes(run(), ("optim.lr", 5e-4), ("train.z_loss", 1e-5), ("train.batch", 32)).remarks(7)) == [
        "changed since step 7: train.batch 16 -> 32, train.z_loss 0.0 -> 1e-05, optim.lr 0.001 -> 0.0005"
    ]


@pytest.mark.parametrize(
    "change",
    [
        ("parallel.tp", 2), ("parallel.zero", 3), ("engine", "zero"), ("launch.restarts", 3), ("launch.spares", 1), ("log.every", 1),
        ("checkpoint.every", 5), ("name", "other"), ("cluster.gpus", 4), ("train.microbatch", 4), ("train.attention", "math"),
        ("train.compile", True), ("train.loss_chunks", 8), ("model.vocab_multiple", 64), ("data.cache", "elsewhere"),
    ],
)  # fmt: skip
def test_a_free_change_is_not_reported(change: tuple[str, object]) -> None:
    assert changes(run(), change) == Changes()


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer"])
def test_another_path_to_the_same_tokens_is_no_change(key: str) -> None:
    before = run("data=text", "data.path=a.txt", "data.tokenizer=a")
    assert changes(before, (key, "b"), same_data=True) == Changes()
    assert changes(before, (key, "b"), same_data=None) == Changes(), "whether they are the same is not known yet"


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "data.end", "data.validation", "data.text_key"])
def test_different_data_are_refused_unless_accepted(key: str) -> None:
    before = run("data=text", "data.path=a.txt")
    change = (key, {"data.end": 1, "data.validation": 0.5}.get(key, "b"))
    (problem,) = changes(before, change, same_data=False).problems
    assert problem.says.startswith(f"{key} was ")
    assert problem.mend.endswith(f"or checkpoint.accept=[{key}] to go on all the same")
    found = changes(before, change, ("checkpoint.accept", (key,)), same_data=False)
    assert (found.problems, found.other_data) == ((), True)
    accepted, others = found.remarks(7)
    assert accepted.startswith(f"changed since step 7, as checkpoint.accept allows: {key} ")
    assert others == "the data are different: the run reads them from their first sample on"


WEIGHTS, LATER = (0.9, 0.1), (0.5, 0.5)


def blended(*stages: Stage, weights: tuple[float, ...] | None = None) -> tuple[tuple[str, object], ...]:
    made = tuple(DataStage(weights=weights, until=until) for weights, until in stages) or None
    return ("data.weights", weights), ("data.stages", made)


# What a run that had read 1,000 tokens of 10 samples may make of its stages, the first of which ends at 1,200 tokens.
# fmt: off
ALIKE: list[tuple[Stage, ...]] = [
    ((WEIGHTS, 1200.0), (LATER, 1500.0), (WEIGHTS, None)),
    ((WEIGHTS, 1000.0), (LATER, None)),
    ((WEIGHTS, 1200.0), ((0.0, 1.0), None)),
    ((WEIGHTS, None),),
]
OTHERS_BEFORE: list[tuple[Stage, ...]] = [
    ((WEIGHTS, 900.0), (LATER, None)),
    (((0.8, 0.2), 1200.0), (LATER, None)),
    ((WEIGHTS, 500.0), (WEIGHTS, None)),
]
# fmt: on


@pytest.mark.parametrize("stages", ALIKE, ids=str)
@pytest.mark.parametrize("same_data", [True, None])
def test_stages_to_come_may_change_and_are_named(stages: tuple[Stage, ...], same_data: bool | None) -> None:
    before = with_changes(run("data=text", "data.path=[a,b]", "train.seq=100"), blended((WEIGHTS, 1200.0), (LATER, None)))
    found = compare_runs(before, with_changes(before, blended(*stages)), step=7, samples=10, same_data=same_data)
    assert (found.problems, found.other_data) == ((), False)
    (said,) = found.remarks(7)
    assert said.startswith("changed since step 7: data.stages [{weights:[0.9,0.1],until:1200},{weights:[0.5,0.5]}] -> [{weights:[0.9,0.1]")


@pytest.mark.parametrize("stages", OTHERS_BEFORE, ids=str)
def test_stages_that_were_read_may_not_change(stages: tuple[Stage, ...]) -> None:
    before = with_changes(run("data=text", "data.path=[a,b]", "train.seq=100"), blended((WEIGHTS, 1200.0), (LATER, None)))
    for same_data in (True, False, None):
        (problem,) = compare_runs(before, with_changes(before, blended(*stages)), step=7, samples=10, same_data=same_data).problems
        assert problem.says.startswith(
            "data.stages was [{weights:[0.9,0.1],until:1200},{weights:[0.5,0.5]}] when step 7 was saved, and is "
        )
        assert problem.mend.endswith("or checkpoint.accept=[data.stages] to go on all the same")
    accepted = with_changes(before, (*blended(*stages), ("checkpoint.accept", ("data.stages",))))
    found = compare_runs(before, accepted, step=7, samples=10, same_data=False)
    assert (found.problems, found.other_data) == ((), True)


def test_constant_weights_may_go_on_as_a_first_stage_and_back() -> None:
    constant = with_changes(run("data=text", "data.path=[a,b]", "train.seq=100"), blended(weights=WEIGHTS))
    staged = with_changes(constant, blended((WEIGHTS, 1000.0), (LATER, None)))
    for before, now, samples, keys in ((constant, staged, 10, 2), (staged, constant, 10, 2), (staged, constant, 11, 0)):
        found = compare_runs(before, now, step=7, samples=samples, same_data=True)
        assert len(found.reported) == keys
        assert bool(found.problems) == (keys == 0)
    (problem,) = compare_runs(constant, with_changes(constant, blended(weights=LATER)), step=7, samples=10, same_data=False).problems
    assert problem.says == "data.weights was [0.9,0.1] when step 7 was saved, and is [0.5,0.5] now"


def test_without_a_count_of_samples_every_step_had_the_batch_of_the_run() -> None:
    before = with_changes(run("data=text", "data.path=[a,b]", "train.seq=100", "train.batch=4"), blended((WEIGHTS, 1200.0), (LATER, None)))
    sooner = with_changes(before, blended((WEIGHTS, 800.0), (LATER, None)))
    assert [bool(compare_runs(before, sooner, step=step, same_data=True).problems) for step in (2, 3)] == [False, True]


def test_other_validation_sets_are_no_change() -> None:
    assert changes(run("data=text", "data.path=a.txt"), ("data.validate", {"wiki": "w.txt"})) == Changes()


def test_a_relative_path_is_no_other_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that saved a checkpoint has absolute ones."""
    monkeypatch.chdir(tmp_path)
    now = run("data=text", "data.path=a.txt", "data.validation=0.2")
    saved_by(tmp_path, with_changes(now, [("data.path", str(tmp_path / "a.txt")), ("data.validation", 0.1)]))
    assert [each.says.split()[0] for each in check_resume(now, tmp_path, data_key="another").problems] == ["data.validation"]


def test_a_file_whose_tokens_have_changed_is_refused() -> None:
    before = run("data=text", "data.path=a.txt")
    (problem,) = changes(before, same_data=False).problems
    assert str(problem) == (
        "data.path=a.txt holds other tokens than when step 7 was saved: bring those back to go on, or name=NEW to train another run, "
        "or checkpoint.accept=[data.path] to go on all the same"
    )
    assert list(changes(before, ("checkpoint.accept", ("data.path",)), same_data=False).remarks(7)) == [
        "changed since step 7, as checkpoint.accept allows: other tokens in data.path=a.txt",
        "the data are different: the run reads them from their first sample on",
    ]


def test_a_change_of_documents_keeps_the_samples() -> None:
    assert [each.says.split()[0] for each in changes(run(), ("data.documents", True)).problems] == ["data.documents"]
    found = changes(run(), ("data.documents", True), ("checkpoint.accept", ("data.documents",)))
    assert (found.problems, found.other_data) == ((), False)


def test_a_different_optimizer_starts_with_new_moments_and_says_so() -> None:
    before = run()
    assert [each.says.split()[0] for each in changes(before, ("optim.name", "sgd")).problems] == ["optim.name"]
    found = changes(before, ("optim.name", "sgd"), ("optim.momentum", 0.9), ("checkpoint.accept", ("optim.name",)))
    assert list(found.remarks(7)) == [
        "changed since step 7: optim.momentum 0.0 -> 0.9",
        "changed since step 7, as checkpoint.accept allows: optim.name adamw -> sgd",
        "optimizer moments that start at zero: momentum_buffer",
        "moments in the checkpoint that this optimizer does not use: exp_avg, exp_avg_sq",
    ]


def test_new_momentum_starts_at_zero_and_says_so() -> None:
    before = run("optim=sgd", "optim.momentum=0")
    assert list(changes(before, ("optim.momentum", 0.9)).remarks(7))[1:] == ["optimizer moments that start at zero: momentum_buffer"]
    assert moment_kinds(before.optim) == ()


def test_acceptable_keys_are_those_of_data_and_optimizer() -> None:
    assert set(acceptable_keys()) == {key for key in config_keys() if key_policy(key) == "acceptable"}
    assert not [key for key in acceptable_keys() if key.startswith("model.")]


def test_a_record_gives_the_same_run() -> None:
    one = run("model=tiny_moe", "optim=sgd", "log.profile=[1,2]")
    assert run_from_record(run_record(one)) == one
    assert run_from_record({}) is None
    assert run_from_record({"run": {"name": 3}}) is None


def flatten(part: Any, at: str = "") -> set[str]:
    rows = ((f"{at}{row.name}", getattr(part, row.name)) for row in fields(part))
    return {name for key, value in rows for name in (flatten(value, f"{key}.") if is_dataclass(value) else {key})}


def test_no_key_is_left_out_of_a_comparison() -> None:
    assert flatten(run()) >= {key for key in config_keys() if key.partition(".")[0] in DECIDED}


def test_one_fix_accepts_all_acceptable_keys() -> None:
    found = changes(
        run("data=synthetic", "data.validation=0.5"),
        ("data.name", "stdlib"),
        ("data.validation", 0.1),
        ("optim.name", "sgd"),
        same_data=False,
    )
    (mend,) = {problem.mend.partition("checkpoint.accept=")[2].partition(" ")[0] for problem in found.problems}
    assert sorted(mend.strip("[]").split(",")) == ["data.name", "data.validation", "optim.name"]


def test_a_different_family_is_reported_without_the_keys_that_follow_from_it() -> None:
    found = changes(run(), ("model.family", "llama"), ("model.positions", "rope"), ("model.norm", "rmsnorm"), ("optim.name", "sgd"))
    assert [problem.says.split()[0] for problem in found.problems] == ["model.family", "optim.name"]


# Before any rank is started: RUN_DIR as the manifest of its newest checkpoint describes it.
def saved_by(folder: Path, before: Run | None, step: int = 7) -> None:
    """A checkpoint without tensors, saved by a run."""
    from msgspec import json

    path = folder / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True)
    body = {"version": 1, "step": step, "extra": run_record(before) if before else {}, "files": {}, "tensors": []}
    (path / "manifest.json").write_bytes(seal(json.encode(body)[1:]))


def test_a_change_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    saved_by(tmp_path, run())
    (problem,) = check_resume(run("model.heads=4"), tmp_path).problems
    assert (
        str(problem)
        == "model.heads was 8 when step 7 was saved, and is 4 now: set model.heads=8 to go on, or name=NEW to train another run"
    )
    assert check_resume(run("parallel.zero=3"), tmp_path).problems == ()


@pytest.mark.parametrize(("key", "mend"), [("data.paht", "did you mean data.path?"), ("model.heads", "known: data.chosen_key, ")])
def test_a_key_that_can_not_be_accepted_is_named(tmp_path: Path, key: str, mend: str) -> None:
    (problem,) = check_resume(run(f"checkpoint.accept=[{key}]"), tmp_path).problems
    assert problem.says == f"checkpoint.accept=[{key}] is not a key that can be accepted"
    assert problem.mend.startswith(mend)


@pytest.mark.parametrize(("mode", "says"), [("never", "checkpoint.resume=never, but "), ("must", "")])
def test_the_resume_mode_is_judged_before_any_rank_is_started(tmp_path: Path, mode: str, says: str) -> None:
    saved_by(tmp_path, run())
    found = check_resume(run(f"checkpoint.resume={mode}"), tmp_path).problems
    assert [each.says.startswith(says) for each in found] == ([True] if says else [])


def test_resume_must_needs_a_checkpoint(tmp_path: Path) -> None:
    assert check_resume(run(), tmp_path).problems == ()
    (problem,) = check_resume(run("checkpoint.resume=must"), tmp_path).problems
    assert problem.says == f"checkpoint.resume=must, but no checkpoint in {tmp_path}/checkpoints verifies"


def test_a_run_that_begins_again_though_it_has_logged_steps_says_so(tmp_path: Path) -> None:
    """As in a folder that was copied without its checkpoints."""
    assert check_resume(run(), tmp_path).remarks == ()
    (tmp_path / "metrics.jsonl").write_text('{"step": 300, "loss": 2.0}\n{"step": 300, "save_pause": 1.0}\n')
    says = f"{tmp_path} has logged 300 steps and no checkpoint to go on from: the run begins again at step 0"
    assert check_resume(run(), tmp_path).remarks == (says,)


def test_a_checkpoint_that_names_no_run_is_read_with_run_json_and_says_so(tmp_path: Path) -> None:
    from msgspec import json

    saved_by(tmp_path, None)
    (tmp_path / "run.json").write_bytes(json.encode(run()))
    found = check_resume(run("model.heads=4"), tmp_path)
    assert [each.says.split()[0] for each in found.problems] == ["model.heads"]
    assert found.remarks == ("step_7 was written by an earlier version and does not name its run: run.json is used instead",)
    found = check_resume(run("optim.lr=5e-4"), tmp_path)
    assert (found.problems, found.remarks[1:]) == ((), ("changed since step 7: optim.lr 0.001 -> 0.0005",))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: b"", "manifest.json is empty"),
        (lambda text: text[:-1], "manifest.json is not as it was written (its hash differs)"),
        (lambda text: text.replace(b"heads", b"hands"), "manifest.json is not as it was written (its hash differs)"),
        (lambda text: seal(b'"version":9}'), "manifest.json is of another version of this format: "),
        (lambda text: seal(b'"version":1,"step":8,"extra":{},"files":{},"tensors":[]}'), "it is of step 8"),
        (lambda text: seal(b'"version":1,"step":7,"extra":{},"files":{"a":{"bytes":3}},"tensors":[]}'), "a is missing"),
    ],
)
def test_a_damaged_manifest_is_passed_over_with_its_reason(tmp_path: Path, damage: Any, reason: str) -> None:
    saved_by(tmp_path, run())
    saved_by(tmp_path, run(), step=3)
    file = tmp_path / "checkpoints" / "step_7" / "manifest.json"
    file.write_bytes(damage(file.read_bytes()))
    saved, (passed,) = newest_saved(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.step == 3
    assert passed.startswith(f"step_7: {reason}")


def test_a_run_goes_on_from_the_plain_config_of_quantized_weights() -> None:
    """A config.json says there how weights are stored, which a checkpoint holds plain."""
    plain = {"model_type": "stablelm", "hidden_size": 32}
    packed = plain | {"quantization_config": {"quant_method": "fp8"}}
    assert not compare_runs(run(), run(), step=7, configs=(packed, plain)).problems
    (problem,) = compare_runs(run(), run(), step=7, configs=(packed, plain | {"hidden_size": 64})).problems
    assert problem.says == "model.hf: hidden_size was 32 when step 7 was saved, and is 64 now"
