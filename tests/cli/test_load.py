"""Loading a run: composition, precedence, the cluster's size, model.hf, this machine's memory, sweeps."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from msgspec import to_builtins

from distrain.cli.config.composition import config_yaml
from distrain.cli.config.load import compose_config, load_recipe, load_sweep
from distrain.cli.keys import config_files
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read_run
from distrain.trainer.spec.run import Run
from distrain.trainer.spec.sections.cluster import Cluster

RECIPES = list(config_files.recipes(None))
GROUPS = {group: list(config_files.options(group, None)) for group in config_files.groups(None)}
# Rows of one option of every group, in which every option occurs.
ROWS = [[f"{group}={names[row % len(names)]}" for group, names in GROUPS.items()] for row in range(max(map(len, GROUPS.values())))]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a user's config folder with an option and a recipe that have built-in names, and a new recipe."""
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "tiny.yaml").write_text("family: gpt\nlayers: 3\nhidden: 48\nheads: 3\nvocab: 99\n")
    (tmp_path / "own" / "mine.yaml").write_text("# my own run\ndefaults:\n  - quickstart\n  - _self_\ntrain: {batch: 4}\n")
    (tmp_path / "own" / "gpt2_124m.yaml").write_text("defaults: [quickstart]\nname: not gpt2\n")
    return tmp_path / "own"


# fmt: off
LENGTHS = (  # the section train of a recipe from quickstart, what is typed, steps, tokens
    ("{tokens: 1e6}",              "",                                None, 1e6),
    ("{steps: 7}",                 "",                                7,    None),
    ("{steps: null, tokens: 1e6}", "train.steps=9",                   9,    None),
    ("{steps: 7}",                 "train.tokens=2e6",                None, 2e6),
    ("{tokens: 1e6}",              "train.steps=9 train.tokens=null", 9,    None),
    ("{tokens: 1e6}",              "train={steps:9}",                 9,    None),
    ("{steps: 7}",                 "train=pretrain",                  7,    None),
    ("{steps: 7, tokens: 1e6}",    "",                                7,    1e6),
    ("{steps: 7}",                 "train.steps=9 train.tokens=2e6",  9,    2e6),
)
# fmt: on


@pytest.mark.parametrize(("section", "words", "steps", "tokens"), LENGTHS)
def test_the_length_that_is_set_last_replaces_the_other_one(
    section: str, words: str, steps: int | None, tokens: float | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [quickstart, _self_]\ntrain: {section}\n")
    train = load_recipe(str(file), words.split()).train
    assert (train.steps, train.tokens) == (steps, tokens)


def test_a_length_replaces_that_of_the_group_in_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    chosen = "".join(f"  - {group}\n" for group in ("model: nano", "cluster: local", "parallel: default", "train: default"))
    file.write_text(f"defaults:\n{chosen}  - _self_\ntrain: {{tokens: 1e6}}\n")
    assert load_recipe(str(file)).train.steps is None


def test_checkpoint_never_saves_nothing() -> None:
    checkpoint = load_recipe("quickstart", ["checkpoint=never"]).checkpoint
    assert (checkpoint.every, checkpoint.final, checkpoint.resume) == (0, False, "never")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_its_yaml_reads_back_as_the_same_run(recipe: str, tmp_path: Path) -> None:
    run = load_recipe(recipe)
    config = to_builtins(read_run(compose_config(recipe)))
    file = tmp_path / "saved, (again)=1.yml"
    file.write_text(config_yaml({key: value for key, value in config.items() if value is not None}))
    assert load_recipe(str(file)) == run


@pytest.mark.parametrize("options", ROWS, ids=range(len(ROWS)))
def test_every_option_of_every_group_composes_into_a_run(options: list[str]) -> None:
    assert isinstance(load_recipe("quickstart", options), Run)


def test_the_last_override_of_a_key_wins() -> None:
    assert load_recipe("quickstart", ["parallel.tp=2", "parallel.tp=4"]).parallel.tp == 4


def test_keys_that_are_in_no_file_can_be_set() -> None:
    run = load_recipe("quickstart", ["log.profile=[2,5]", "model.rope_base=5e5", "parallel={offload:{optimizer:true}}", "data.path='a, b'"])
    assert (run.log.profile, run.model.rope_base, run.parallel.offload.optimizer, run.data.path) == ((2, 5), 5e5, True, "a, b")


def test_a_plus_sets_a_key_and_a_tilde_deletes_one() -> None:
    run = load_recipe("gpt2_124m", ["+model.dropout=0.25", "++train.seed=7", "~optim.warmup"])
    assert (run.model.dropout, run.train.seed, run.optim.warmup) == (0.25, 7, 0)


def test_a_text_key_takes_text_that_hydras_grammar_can_not_read() -> None:
    assert load_recipe("quickstart", ["data.path=~/my (data)/é"]).data.path == "~/my (data)/é"


def test_interpolation_reads_other_keys() -> None:
    assert load_recipe("quickstart", ["train.batch=8", "train.microbatch=${train.batch}"]).train.microbatch == 8


def test_a_chosen_device_replaces_the_clusters_device_and_keeps_its_links() -> None:
    before, after = load_recipe("gpt3_175b").cluster, load_recipe("gpt3_175b", ["device=h100_80g"]).cluster
    assert (before.device.name, after.device.name) == ("A100-80G", "H100-80G")
    assert (before.nodes, before.gpus, before.inside, before.between) == (after.nodes, after.gpus, after.inside, after.between)


def test_a_chosen_cluster_brings_its_own_device() -> None:
    assert load_recipe("gpt2_124m").cluster.device.name == "A100-40G"
    assert load_recipe("gpt2_124m", ["cluster=dgx_h100"]).cluster.device.name == "H100-80G"
    assert load_recipe("gpt2_124m", ["cluster=dgx_h100", "device=h200"]).cluster.device.name == "H200"


PARTLY = """
defaults: [{model: tiny}, {train: default}]
cluster: {nodes: 16, gpus: 4}
parallel: {tp: 8, pp: 2}
optim: {name: sgd, lr: 1.5e-4}
launch: {name: deepspeed, hostfile: hosts}
data: {path: my.txt}
"""


CHOSEN = ("parallel", "optim", "cluster", "launch", "data")


@pytest.mark.parametrize(("places", "form"), [((), ""), (CHOSEN, ""), (CHOSEN, "override /"), (("parallel", "data"), "override /")])
def test_a_recipes_own_keys_stay_over_a_chosen_option_however_its_defaults_name_the_group(
    places: tuple[str, ...], form: str, tmp_path: Path
) -> None:
    defaults = {"parallel": "default", "optim": "adamw", "cluster": "local", "launch": "deepspeed", "data": "text"}
    named = "".join(f", {{{form}{group}: {defaults[group]}}}" for group in places)
    text = PARTLY.replace("}]", f"}}{named}]", 1)
    (tmp_path / "own.yaml").write_text(text.replace("name: sgd, ", "").replace("name: deepspeed, ", "") if places == CHOSEN else text)
    options = ["parallel=zero1", "cluster=dgx_h100", "optim=adamw_gpt3", "launch=torchrun", "data=tokens"]
    run = load_recipe(str(tmp_path / "own.yaml"), options)
    assert (run.parallel.tp, run.parallel.pp, run.parallel.zero) == (8, 2, 1)
    assert (run.cluster.nodes, run.cluster.gpus, run.cluster.device.name) == (16, 4, "H100-80G")
    assert (run.optim.name, run.optim.lr, run.optim.eps) == ("adamw", 1.5e-4, 1e-8)
    assert (run.launch.name, run.launch.hostfile, run.data.name, run.data.path) == ("torchrun", "hosts", "tokens", "my.txt")
    assert run.reading is None


@pytest.mark.parametrize("device", ["device: {name: mine, memory: 1e9, peak: {fp32: 1e12}}", "device: H100"])
def test_a_chosen_cluster_brings_its_own_device_where_the_recipe_writes_another(device: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        f"defaults: [{{model: tiny}}, {{train: default}}]\nparallel: {{}}\ncluster: {{nodes: 3, {device}}}\n"
    )
    cluster = load_recipe(str(tmp_path / "own.yaml"), ["cluster=dgx_h100"]).cluster
    assert (cluster.nodes, cluster.device.name) == (3, "H100-80G")
    changed = load_recipe(str(tmp_path / "own.yaml"), ["cluster=dgx_h100", "device=h200", "cluster.device.units=7"]).cluster
    assert (changed.device.name, changed.device.units) == ("H200", 7)


OWN_DEVICE = "cluster: {nodes: 3, price: 4.0, mtbf: 1e7, device: {name: mine, memory: 1e9, peak: {fp32: 1e12}}}"
DEFAULT_DEVICE = "cluster: {nodes: 3, gpus: 8, price: 4.0, mtbf: 1e7}"
OTHERS = [("", OWN_DEVICE), (", {cluster: dgx_a100}", OWN_DEVICE), (", {device@cluster.device: h100_96g}", DEFAULT_DEVICE)]


@pytest.mark.parametrize(("default", "own"), OTHERS, ids=["section", "cluster in defaults", "device in defaults"])
def test_a_chosen_device_takes_the_place_of_the_recipes_own_and_a_chosen_cluster_says_what_goes_with_it(
    default: str, own: str, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(f"defaults: [{{model: tiny}}, {{train: default}}{default}]\nparallel: {{}}\n{own}\n")
    load = partial(load_recipe, str(tmp_path / "own.yaml"))
    if "gpus" in own or default:
        device = load(["device=b200"])
        assert (device.cluster.device.name, device.cluster.nodes, device.cluster.price, device.cluster.mtbf) == (
            "B200",
            3,
            None,
            Cluster.mtbf,
        )
        before = load([]).cluster.device.name
        left_out = f"device=b200: leaves out cluster.price and cluster.mtbf of {before}"
        assert str(device.reading).endswith(left_out)
        priced = load(["device=b200", "cluster.price=7"]).cluster
        assert (priced.price, priced.mtbf) == (7.0, Cluster.mtbf)
    both, cluster = load(["cluster=dgx_h100", "device=b200"]), load(["cluster=dgx_h100"])
    assert (both.cluster.device.name, cluster.cluster.device.name) == ("B200", "H100-80G")
    for run in (both, cluster):
        assert (run.cluster.nodes, run.cluster.price) == (3, None)
        assert "cluster=dgx_h100: leaves out cluster.price and cluster.mtbf of the recipe, which are another" in str(run.reading)


@pytest.mark.parametrize("cluster", ["", ", {cluster: dgx_a100}"])
def test_the_line_that_chooses_a_device_composes_with_a_cluster_in_the_defaults_and_without(cluster: str, tmp_path: Path) -> None:
    defaults = f"[{{model: tiny}}, {{train: default}}{cluster}, {{override /device@cluster.device: h100_80g}}]"
    (tmp_path / "own.yaml").write_text(f"defaults: {defaults}\ncluster: {{nodes: 2, gpus: 4, inside: null}}\n")
    run = load_recipe(str(tmp_path / "own.yaml"))
    assert (run.cluster.nodes, run.cluster.gpus, run.cluster.device.name) == (2, 4, "H100-80G")
    assert load_recipe(str(tmp_path / "own.yaml"), ["device=h200"]).cluster.device.name == "H200"
    assert load_recipe(str(tmp_path / "own.yaml"), ["cluster=dgx_b200"]).cluster.device.name == "B200"


def test_a_recipe_without_parallel_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [{model: tiny}, {cluster: local}, {train: default}]\n")
    assert load_recipe(str(tmp_path / "own.yaml")).parallel == load_recipe(str(tmp_path / "own.yaml"), ["parallel=default"]).parallel


def test_a_section_that_is_written_as_a_whole_is_replaced_and_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(config_yaml(compose_config("tiny_2x2x2")) + "reading: null\n")
    run = load_recipe(str(tmp_path / "flat.yaml"), ["parallel=zero1", "model=tiny_moe", "cluster=1x8"])
    assert (run.parallel.tp, run.parallel.zero) == (1, 1)
    assert run.reading == (
        "parallel=zero1: replaces section parallel of the recipe, which sets all of it. "
        "model=tiny_moe: replaces section model of the recipe, which sets all of it. "
        "cluster=1x8: 1 node x 8 processes = 8 processes"
    )


def test_a_chosen_option_replaces_keys_that_the_recipe_sets_itself(tmp_path: Path) -> None:
    config = compose_config("quickstart")
    config["model"] |= {"layers": 5, "dropout": 0.5}
    (tmp_path / "flat.yaml").write_text(config_yaml(config))
    file = str(tmp_path / "flat.yaml")
    assert load_recipe(file).model.layers == 5
    assert load_recipe(file, ["model=tiny_llama"]).model == load_recipe("quickstart", ["model=tiny_llama"]).model
    assert load_recipe(file, ["device=a100_80g"]).cluster.device == load_recipe("gpt3_175b").cluster.device


# A recipe by path, and the user's own folder


def test_a_recipe_by_path_uses_builtin_groups_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    text = "defaults:\n  - model: tiny\n  - cluster: local\n  - parallel: default\n  - train: default\n"
    (tmp_path / "a b" / "my run (2).yaml").write_text(text + "parallel: {tp: 2}\n")
    monkeypatch.chdir(tmp_path)
    run = load_recipe("a b/my run (2).yaml")
    assert (run.name, run.parallel.tp) == ("my run (2)", 2)
    assert load_recipe("./a b/my run (2)") == run
    monkeypatch.chdir("/")
    assert load_recipe(f"{tmp_path}/a b/my run (2).yaml") == run


def test_a_recipe_can_extend_another_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("defaults: [quickstart, _self_]\nname: base\ntrain: {batch: 2}\n")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nname: mine\n")
    run = load_recipe(str(tmp_path / "mine.yaml"))
    assert (run.name, run.train.batch) == ("mine", 2)


def test_the_users_folder_wins_over_built_in_files_of_the_same_name(own: Path) -> None:
    assert load_recipe("quickstart", ["model=tiny"], own).model.layers == 3
    assert load_recipe("tiny_2x2x2", (), own).model.layers == 3
    assert load_recipe("gpt2_124m", (), own).name == "not gpt2"
    assert load_recipe("gpt2_124m").name == "gpt2_124m"
    assert load_recipe("mine", (), own).train.batch == 4


def test_the_users_recipes_may_be_in_a_folder_called_recipes(own: Path) -> None:
    (own / "recipes").mkdir()
    (own / "recipes" / "other.yml").write_text("defaults: [mine]\nname: other\n")
    assert load_recipe("other", (), own).train.batch == 4


def test_a_relative_config_dir_is_relative_to_the_current_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    assert load_recipe("mine", (), Path("own")).train.batch == 4


# cluster=384x8 and cluster=6x8x64


def test_nodes_by_gpus_does_not_change_the_mesh() -> None:
    before, after = load_recipe("gpt3_175b"), load_recipe("gpt3_175b", ["cluster=384x8"])
    assert (after.cluster.nodes, after.cluster.gpus, after.cluster.device) == (384, 8, before.cluster.device)
    assert after.parallel == before.parallel
    assert after.reading == "cluster=384x8: 384 nodes x 8 GPUs = 3072 GPUs"


def test_data_by_tensor_by_pipeline_sets_nodes_and_mesh() -> None:
    run = load_recipe("gpt3_175b", ["cluster=6x8x64"])
    assert (run.cluster.nodes, run.cluster.gpus) == (384, 8)
    assert (run.parallel.dp, run.parallel.tp, run.parallel.pp) == (6, 8, 64)
    assert run.reading == "cluster=6x8x64: data 6 x tensor 8 x pipeline 64 = 3072 GPUs, 384 nodes x 8, each stage on 6 nodes"


@pytest.mark.parametrize("override", ["parallel.tp=4", "parallel={tp:4}"])
def test_a_size_does_not_change_a_degree_that_the_user_sets(override: str) -> None:
    run = load_recipe("gpt3_175b", ["cluster=6x8x64", override])
    assert (run.parallel.dp, run.parallel.tp, run.parallel.pp) == (6, 4, 64)
    assert run.reading is not None
    assert run.reading.endswith("; parallel.tp=4 as you set it")


def test_a_size_applies_to_a_cluster_chosen_on_the_same_command_line() -> None:
    run = load_recipe("gpt3_175b", ["cluster=dgx_h100", "cluster=2x8x2"])
    assert (run.cluster.device.name, run.cluster.nodes) == ("H100-80G", 4)


def test_fewer_ranks_than_a_node_has_use_part_of_one_node() -> None:
    run = load_recipe("tiny_2x2x2", ["cluster=2x2x1"])
    assert (run.cluster.nodes, run.cluster.gpus) == (1, 4)
    assert run.reading == "cluster=2x2x1: data 2 x tensor 2 x pipeline 1 = 4 processes, 1 node x 4"


def test_a_size_needs_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("defaults:\n  - model: tiny\n  - train: default\n  - parallel: default\n")
    with pytest.raises(Unreadable, match=r"the recipe has none: add one"):
        load_recipe(str(tmp_path / "none.yaml"), ["cluster=2x8"])


@pytest.mark.parametrize(("size", "hint"), [("7x3x5", "8x3x5"), ("1x1x9", "8x1x9"), ("3x4x5", "4x4x5"), ("9x1x1", "8x1x1")])
def test_the_suggested_size_fills_whole_nodes(size: str, hint: str) -> None:
    with pytest.raises(Unreadable, match=f"cluster={hint} is"):
        load_recipe("gpt3_175b", [f"cluster={size}"])
    assert load_recipe("gpt3_175b", [f"cluster={hint}"]).cluster.gpus == 8


# model.hf


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return a Hugging Face folder with a config.json of a small Llama."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 688, "vocab_size": 1000,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return tmp_path / "llama"


def test_hugging_face_sizes_replace_the_recipes_model(llama: Path) -> None:
    model = load_recipe("quickstart", [f"model.hf={llama}"]).model
    assert (model.family, model.layers, model.kv_heads, model.hf) == ("llama", 6, 2, str(llama))


def test_a_price_is_that_of_the_device_it_was_set_for() -> None:
    load = partial(load_recipe, "llama3_8b_1node")
    assert load(["cluster=cloud_8xh100"]).cluster.price == load(["cluster=cloud_8xh100", "device=h100_80g"]).cluster.price == 10.08
    other = load(["cluster=cloud_8xh100", "device=h200"])
    assert (other.cluster.price, other.reading) == (None, f"{LINKS_STAY}. device=h200: leaves out cluster.price of H100-80G")


LINKS_STAY = (
    "device=h200: links stay those of the cluster of H100-80G where no key sets them: 450 GB/s inside a node and 50 GB/s between nodes, "
    "for each device"
)


def test_a_chosen_device_says_which_links_stay_where_it_is_another_than_the_clusters() -> None:
    load = partial(load_recipe, "llama3_8b_1node")
    assert load(["device=h200"]).reading == LINKS_STAY
    assert load(["device=h100_80g"]).reading == load(["cluster=dgx_h200"]).reading is None


def test_a_price_stays_where_the_recipe_names_no_device(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cluster: {nodes: 1, gpus: 8, price: 2.0}\ntrain: {batch: 8, seq: 1024, steps: 10}\n")
    run = load_recipe(str(file), ["device=h100_80g", "model=llama3_2_1b"])
    assert (run.cluster.device.name, run.cluster.price, run.reading) == ("H100-80G", 2.0, None)


def test_hf_sizes_leave_the_recipes_lora_and_say_that_its_weights_go(llama: Path) -> None:
    """The command of docs/fine_tuning.md trains LoRA additions."""
    tuned = load_recipe("finetune_llama", [f"model.hf={llama}", f"model.weights={llama}", "cluster=local"])
    assert (tuned.model.layers, tuned.model.lora.rank, tuned.model.lora.alpha, tuned.reading) == (6, 16, 32, None)
    drawn = load_recipe("finetune_llama", [f"model.hf={llama}", "model.lora.rank=4", "cluster=local"])
    assert (drawn.model.lora.rank, drawn.model.lora.alpha, drawn.model.weights) == (4, 32, None)
    says = f"model.hf={llama}: leaves out model.weights of the recipe: set model.weights={llama} to begin with its weights"
    assert drawn.reading == says
    assert load_recipe("finetune_llama", [f"model.hf={llama}", "model.lora.rank=0", "cluster=local"]).model.lora.rank == 0


def test_overrides_win_over_the_sizes_of_hf(llama: Path) -> None:
    model = load_recipe("quickstart", ["model.layers=4", f"model.hf={llama}/config.json"]).model
    assert (model.layers, model.hidden) == (4, 256)


def test_hf_in_a_recipe_is_read_from_the_recipes_folder(llama: Path) -> None:
    (llama / "mine.yaml").write_text("defaults: [quickstart, _self_]\nmodel: {hf: config.json, layers: 2}\n")
    model = load_recipe(str(llama / "mine.yaml")).model
    assert (model.family, model.layers, model.hf) == ("llama", 2, str(llama / "config.json"))


def test_hf_sizes_that_contradict_another_file_are_a_problem(llama: Path) -> None:
    (llama / "base.yaml").write_text("defaults: [quickstart, _self_]\nmodel: {hf: config.json}\n")
    (llama / "mine.yaml").write_text("defaults: [base]\n")
    with pytest.raises(Unreadable, match=r"has family=llama, but another file sets family=gpt: set model.hf in the recipe itself"):
        load_recipe(str(llama / "mine.yaml"))


SIZELESS = (
    "defaults: [{cluster: local}, {parallel: default}, {train: default}, {optim: adamw}, {data: synthetic}, {log: default}, "
    "{checkpoint: default}, {launch: local}, _self_]\ntrain: {batch: 2, seq: 16, steps: 1}\noptim: {lr: 1e-3}\n"
)


@pytest.mark.parametrize("text", ["", "model: {weights: llama}\n", "model: {dropout: 0.1}\n"])
def test_a_folder_of_weights_gives_the_sizes_that_nothing_else_does(text: str, llama: Path) -> None:
    (llama.parent / "mine.yaml").write_text(SIZELESS + text)
    given = [] if "weights" in text else [f"model.weights={llama}"]
    model = load_recipe(str(llama.parent / "mine.yaml"), [*given, "model.layers=4"]).model
    assert (model.family, model.layers, model.kv_heads, model.hf, model.weights) == ("llama", 4, 2, str(llama), str(llama))
    assert model.dropout == (0.1 if "dropout" in text else 0)


def test_a_folder_of_weights_leaves_the_sizes_that_are_there(llama: Path) -> None:
    """Files that differ are refused by name when the run starts."""
    model = load_recipe("quickstart", [f"model.weights={llama}"]).model
    assert (model.family, model.hf) == ("gpt", None)
    (llama / "mine.yaml").write_text(SIZELESS)
    with pytest.raises(Unreadable, match=r"model\.layers is not set"):
        load_recipe(str(llama / "mine.yaml"), ["model.family=llama", f"model.weights={llama}"])


def test_sizes_of_hf_win_over_those_of_weights(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SIZELESS)
    model = load_recipe(str(tmp_path / "mine.yaml"), [f"model.hf={llama}", "model.weights=/elsewhere"]).model
    assert (model.layers, model.hf) == (6, str(llama))


@pytest.mark.parametrize("key", ["model.hf", "model.weights"])
def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(SIZELESS)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    said = {}
    for name in ("Qwen/Qwen3-0.6B", "there/Qwen3-0.6B", "/no/Qwen3", "Qwen 3/a", "nowhere"):
        with pytest.raises(Unreadable) as refused:
            load_recipe("mine.yaml", [f"{key}='{name}'"])
        (problem,) = refused.value.problems
        assert problem.says == f"{key}={tmp_path / name}: No such file or directory"
        said[name] = problem.mend
    wanted = f"run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, and set {key}=Qwen3-0.6B"
    assert said.pop("Qwen/Qwen3-0.6B") == wanted
    assert set(said.values()) == {"name a config.json or its folder"}


# This machine


def test_automatic_memory_is_this_machines_divided_by_its_processes() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert load_recipe("quickstart", ["cluster.gpus=4"]).cluster.device.memory == machine // 4
    assert compose_config("quickstart")["cluster"]["device"]["memory"] == "auto"


# Sweeps


def test_a_sweep_has_every_combination_with_the_last_argument_varying_fastest() -> None:
    layouts = load_sweep("gpt3_175b", ["parallel.tp=4,8", "train.seed=5", "parallel.zero=range(0,2)"])
    assert [each.swept for each in layouts] == [
        ("parallel.tp=4", "parallel.zero=0"),
        ("parallel.tp=4", "parallel.zero=1"),
        ("parallel.tp=8", "parallel.zero=0"),
        ("parallel.tp=8", "parallel.zero=1"),
    ]
    assert [(each.run.parallel.tp, each.run.parallel.zero) for each in layouts] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    assert all(each.run == load_recipe("gpt3_175b", [*each.swept, "train.seed=5"]) for each in layouts)


def test_recipes_options_and_sizes_can_be_swept() -> None:
    swept = [each.swept for each in load_sweep("gpt2_124m,gpt3_175b", ["cluster=2x8,4x8", "model=glob(gpt2_7*)"])]
    assert swept[0] == ("conf=gpt2_124m", "cluster=2x8", "model=gpt2_774m")
    assert len(swept) == 4


def test_a_sweep_without_swept_values_is_one_layout() -> None:
    (only,) = load_sweep("quickstart")
    assert (only.swept, only.run) == ((), load_recipe("quickstart"))


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("cluster: 1x2", "cluster=1x2 names no cluster"),
        ('cluster: {inside: "${nope}"}', "cluster.inside=${nope} can't be resolved"),
        ('cluster: {inside: {bandwidth: "${nope}"}}', "cluster.inside.bandwidth=${nope} can't be resolved"),
        ('cluster: "${nope}"', "cluster=${nope} can't be resolved"),
    ],
)
def test_a_typed_device_leaves_the_problem_of_a_clusters_section(cluster: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [quickstart]\n{cluster}\n")
    with pytest.raises(Unreadable, match=re.escape(says)):
        load_recipe(str(tmp_path / "mine.yaml"), ["device=h200"])


def test_a_typed_device_replaces_one_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, {override /device@cluster.device: nonesuch}]\n")
    assert load_recipe(str(tmp_path / "mine.yaml"), ["device=h200"]).cluster.device.name == "H200"
