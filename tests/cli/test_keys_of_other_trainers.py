"""Keys of other trainers: the message has our key, and the value if there is an equivalent."""

import json
import re
import shlex
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.arguments.arguments import key_instead_of_option
from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files
from distrain.cli.keys.keys import WRITTEN_KEYS, config_keys
from distrain.cli.keys.synonym import Synonym
from distrain.cli.keys.synonym_rows import ROWS
from distrain.cli.keys.synonyms import TOP_LEVEL_ONLY, synonym_problem
from distrain.trainer.spec.problem import Unreadable

KNOWN = config_keys()
MODEL_KEYS = sum(key.startswith("model.") and key not in WRITTEN_KEYS for key in KNOWN)
NAMES = [name for row in ROWS for name in row.names]

# fmt: off
MESSAGES: list[tuple[str, str]] = [
    ("batch_size=8", "no key batch_size: write train.batch=8 (sequences in a step, over all GPUs)"),
    ("per_device_train_batch_size=4",
        ("no key per_device_train_batch_size: write train.microbatch=4 (sequences that a GPU computes at once; "
         "train.batch counts those of a whole step, over all GPUs)")),
    ("gradient_accumulation_steps=4",
        "no key gradient_accumulation_steps: train.batch = dp x train.microbatch x accumulation steps"),
    ("learning_rate=1e-4", "no key learning_rate: write optim.lr=0.0001"),
    ("lr=1e-3", "no key lr: write optim.lr=0.001"),
    ("parallel.tensor=8", "no key parallel.tensor: write parallel.tp=8"),
    ("parallel.context=2", "no key parallel.context: write parallel.cp=2"),
    ("gpus=64", "no key gpus: write cluster=VALUE (NODESxGPUS, as cluster=8x8 for 64)"),
    ("nodes=4", "no key nodes: write cluster.nodes=4"),
    ("infiniband=200", "no key infiniband: write cluster.between.bandwidth=VALUE (of each GPU, with a unit: 200Gb/s)"),
    ("gpus=4", "no key gpus: write cluster=1x4 (NODESxGPUS, as cluster=8x8 for 64)"),
    ("n_gpus=4", "no key n_gpus: write cluster.gpus=4 (GPUs in a node)"),
    ("patience=3", "no key patience: launch.patience is of hangs, in seconds; a run does not stop early: it goes on to its length"),
    ("log.csv=true", "no key log.csv: each run folder has metrics.jsonl, a row for each logged step"),
    ("train.lr=1e-3", "no key train.lr: write optim.lr=0.001"),
    ("outer.lr=1", "no key outer.lr: did you mean parallel.sync.outer.lr or optim.lr?"),
    ("recompute_activations=true",
        "no key recompute_activations: write parallel.recompute=selective (as --recompute-granularity=selective)"),
    ("hidden_act=silu", "no key hidden_act: write model.act=swiglu"),
    ("disable_bias_linear=true", "no key disable_bias_linear: write model.bias=false"),
    ("training.dtype=float32",
        "no key training.dtype: weights that are stepped are fp32; train.precision is what layers compute in"),
    ("training.mixed_precision_reduce=float32", "no key training.mixed_precision_reduce: write train.gradients=fp32"),
    ("pipeline_parallel_schedule=ZBVZeroBubble", "no key pipeline_parallel_schedule: write parallel.schedule=zb_v"),
    ("offload_optimizer.device=nvme",
        "no key offload_optimizer.device: write parallel.offload.optimizer=VALUE (in the host's memory, not on NVMe)"),
    ("load_in_4bit=true",
        "no key load_in_4bit: weights that train are not quantized: quantized folders are read as bf16"),
    ("lr_warmup_samples=1000", "no key lr_warmup_samples: write optim.warmup=VALUE (in steps: SAMPLES / train.batch)"),
    ("mock_data=true", "no key mock_data: write data=synthetic (random tokens)"),
    ("packing=true",
        "no key packing: always: text is cut into full sequences, whole examples are packed into one"),
    ("ema_decay=0.9", "no key ema_decay: write optim.ema=0.9 (the decay of an average of the weights)"),
    ("use_ema=true", "no key use_ema: write optim.ema=VALUE (the decay of an average of the weights, 0.999)"),
    ("model.name_or_path=x",
        ("no key model.name_or_path: write model.weights=VALUE (a folder of Hugging Face weights, with model.hf for its config.json; "
         "without it weights are random)")),
    ("eval_strategy=no", "no key eval_strategy: write train.evaluate.every=0 (steps; 0: never)"),
    ("optim=adamw_llama_x", "optim=adamw_llama_x names no optim: did you mean adamw_llama?"),
    ("optim=adamw_torch", "optim=adamw_torch names no optim: write optim=adamw"),
    ("optim=adamw_8bit", "optim=adamw_8bit names no optim: write optim=adamw optim.moments=int8"),
    ("weight_decay=0.1", "no key weight_decay: write optim.weight_decay=0.1"),
    ("betas=x", "no key betas: did you mean optim.betas?"),
    ("trainer.max_steps=100", "no key trainer.max_steps: write train.steps=100"),
    ("tensor-model-parallel-size=8", "no key tensor-model-parallel-size: write parallel.tp=8"),
    ("lr_scheduler.lr_min=0.1", "no key lr_scheduler.lr_min: write optim.min_lr=VALUE (a rate, not a share of optim.lr)"),
    ("zero_optimization.stage=2", "no key zero_optimization.stage: write parallel.zero=2 (0 to 3)"),
    ("fsdp=full_shard", "no key fsdp: write parallel.zero=3 (3 shards weights, gradients and the optimizer)"),
    ("output_dir=out", "no key output_dir: write log.dir=out (the run folder is log.dir/name)"),
    ("num_train_epochs=3 data=text",
        "no key num_train_epochs: train.steps or train.tokens sets the length of a run"),
    ("model.lora.r=4", "no key model.lora.r: write model.lora.rank=4 (0: no LoRA)"),
    ("lora_dropout=0.1", "no key lora_dropout: write model.lora.dropout=0.1 (of A's inputs)"),
    ("model.lora.targets=all-linear",
        ("model.lora.targets=all-linear is not a list, each one of query, key, value, out, gate, up, down, q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, in_proj_qkvz, in_proj_ba, out_proj, "
        "shared_expert_gate: leave it out: model.lora.targets=null, the default, is all linear layers but routers")),
    ("model.lora.targets=[all]",
        ("model.lora.targets=[all] is not a list, each one of query, key, value, out, gate, up, down, q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, in_proj_qkvz, in_proj_ba, out_proj, "
        "shared_expert_gate: leave it out: model.lora.targets=null, the default, is all linear layers but routers")),
    ("assistant_only_loss=true", "no key assistant_only_loss: data=pairs trains on completions and assistant turns alone"),
    ("bf16=true", "no key bf16: write train.precision=bf16"),
    ("bf16=false", "no key bf16: write train.precision=VALUE"),
    ("mixed_precision=bf16", "no key mixed_precision: write train.precision=bf16"),
    ("lr_scheduler_type=cosine", "no key lr_scheduler_type: write optim.schedule=cosine"),
    ("gradient_checkpointing=true",
        "no key gradient_checkpointing: write parallel.recompute=full (none, selective or full)"),
    ("warmup_ratio=0.1", "no key warmup_ratio: write optim.warmup=VALUE (in steps: SHARE x train.steps)"),
    ("resume_from_checkpoint=true",
        "no key resume_from_checkpoint: write checkpoint.resume=must (auto, must or never)"),
    ("nproc_per_node=8", "no key nproc_per_node: write cluster.gpus=8 (GPUs in a node)"),
    ("n_layer=12", "no key n_layer: write model.layers=12"),
    ("untie_embeddings_and_output_weights=true",
        "no key untie_embeddings_and_output_weights: write model.tied=false"),
    ("model.seed=1", "no key model.seed: did you mean train.seed?"),
    ("config=quickstart", "no key config: write conf=quickstart (the recipe)"),
    ("training.enable_cpu_offload=true",
        ("no key training.enable_cpu_offload: write parallel.offload.optimizer=true parallel.offload.parameters=true "
         "(FSDP offloads weights and optimizer)")),
    ("window_size=128", "no key window_size: write model.window=VALUE (tokens with its own: LEFT + 1 of Megatron-LM's LEFT,0)"),
    ("model.no_rope_layers=[0,1]", "no key model.no_rope_layers: every layer has the positions of model.positions"),
    ("model.foo_bar_baz=1", f"no key model.foo_bar_baz: known: the {MODEL_KEYS} keys that `distrain ls model` explains"),
    ("limit_val_batches=0", "no key limit_val_batches: write train.evaluate.batches=VALUE (at least 1)"),  # 0 is refused here
    ("seq_length=8k", "no key seq_length: write train.seq=VALUE (tokens in a sequence)"),
    ("validation.dataset=c4", "no key validation.dataset: write data.validate=VALUE (a set by a name of yours: {NAME: PATH})"),
    # as options
    ("--batch-size=8", "no option --batch-size: write train.batch=8 (sequences in a step, over all GPUs)"),
    ("--learning_rate 1e-4", "no option --learning_rate: write optim.lr=1e-4"),
    ("--num-gpus 8", "no option --num-gpus: write cluster.gpus=8 (GPUs in a node)"),
    ("--fp16", "no option --fp16: write train.precision=fp16"),
    ("--bf16 train.batch=8", "no option --bf16: write train.precision=bf16"),
    ("--untie-embeddings-and-output-weights", "no option --untie-embeddings-and-output-weights: write model.tied=false"),
    ("--use-torch-fsdp2", "no option --use-torch-fsdp2: write parallel.zero=3 (3 shards weights, gradients and the optimizer)"),
    ("--weight-decay 0.1", "no option --weight-decay: write optim.weight_decay=0.1"),
    ("--training.seed 3", "no option --training.seed: write train.seed=3"),
    ("--batch=8", "no option --batch: did you mean train.batch or train.rampup.batch?"),
    ("--optim=adamw", "no option --optim: write optim=adamw, without dashes"),
    ("--optim.lrr=3", "no option --optim.lrr: did you mean optim.lr?"),
    ("--wandb-project mine",
        ("no option --wandb-project: log=wandb turns it on; the variables WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP and WANDB_TAGS are "
         "wandb's own")),
    ("--wandb true", "no option --wandb: write log=wandb (log=wandb turns it on)"),
    # without a value
    ("gradient_checkpointing",
        "no key gradient_checkpointing: write parallel.recompute=VALUE (none, selective or full)"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "line"), MESSAGES, ids=[arguments for arguments, _ in MESSAGES])
def test_a_key_of_another_trainer_prints_our_key(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=quickstart", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"distrain: {line}\n"


def test_all_options_of_another_trainer_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those with one answer share a line, and what nothing here means comes last."""
    options = "--use-x --num-layers 4 --adam-beta1 0.9 --no-load-optim --lr 1e-3 --adam-beta2 0.95 --no-load-rng --use-y"
    assert command(["plan", "conf=quickstart", *options.split()]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "distrain: no option --num-layers: write model.layers=4",
        "distrain: no option --adam-beta1, --adam-beta2: write optim.betas=VALUE (both, as optim.betas=[0.9,0.95])",
        "distrain: no option --no-load-optim, --no-load-rng: model.weights begins with weights alone, from a Hugging Face folder",
        "distrain: no option --lr: write optim.lr=1e-3",
        "distrain: nothing here means --use-x, --use-y: leave them out",
    ]


def test_settings_are_printed_in_one_line_to_paste_and_keys_without_an_answer_in_another(capsys: pytest.CaptureFixture[str]) -> None:
    """As pasted from a call of TrainingArguments, with its commas; a value that is left to the user is not in the line."""
    pasted = ["max_steps=90,", "bf16=True,", "zzz=2,", "warmup_ratio=0.1,", "report_to=wandb,", "optim=adamw_8bit,", "qqq=1"]
    assert command(["plan", "conf=quickstart", *pasted]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "distrain: 6 arguments end with a comma, the first is max_steps=90,: leave the commas out"
    assert lines[-2] == "distrain: nothing here means zzz, qqq: leave them out"
    says, _, settings = lines[-1].partition(", to paste: ")
    assert says == "distrain: those with a value"
    assert settings == "train.steps=90 train.precision=bf16 'log.sinks=[console,jsonl,wandb]' optim=adamw optim.moments=int8"
    assert command(["show", "conf=quickstart", *shlex.split(settings)]) == 0


def test_options_have_that_line_too_with_the_last_value_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--batch-size=8 --lr 1e-3 --bf16 --fp8-format hybrid --optim.eps=1e-7"
    assert command(["plan", "conf=quickstart", *options.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "distrain: those with a value, to paste: train.batch=8 optim.lr=1e-3 train.precision=fp8 optim.eps=1e-7"


def test_a_value_with_a_space_and_a_parenthesis_is_whole_in_that_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=quickstart", "--lr", "1e-3", "--seed", "1", "--output-dir=my runs (2)"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(last.partition(", to paste: ")[2]) == ["optim.lr=1e-3", "train.seed=1", "log.dir=my runs (2)"]


def test_a_chosen_config_json_is_in_that_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    pasted = [f"model={tmp_path}", "learning_rate=1e-3", "seed=1", "max_steps=10"]
    assert command(["plan", "conf=quickstart", *pasted]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert set(shlex.split(last.partition(", to paste: ")[2])) == {
        f"model.hf={tmp_path}",
        "optim.lr=0.001",
        "train.seed=1",
        "train.steps=10",
    }


def test_a_wrong_key_in_a_section_of_ours_keeps_its_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    pasted = ["max_steps=90", "bf16=True", "per_device_train_batch_size=2", "model.foo_bar_baz=1", "zzz=1"]
    assert command(["plan", "conf=quickstart", *pasted]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("distrain: no key model.foo_bar_baz: known: ") for line in lines)
    assert lines[-2] == "distrain: nothing here means zzz: leave it out"


def test_one_argument_with_a_comma_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=quickstart", "optim.lr=3,"]) == 2
    assert capsys.readouterr().err == "distrain: optim.lr=3, ends with a comma: leave it out\n"


# What Megatron-LM's own example scripts of Llama 3 8B and Mixtral 8x7B pass to pretrain_gpt.py.
LLAMA_SCRIPT = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
--max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
--attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr
0.00015 --min-lr 0.00001 --decoupled-lr 5e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
--context-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--data-path PATH --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH --vocab-size 128256 --split 99,1,0
--data-cache-path PATH --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save PATH --load PATH --tensorboard-dir PATH"""
MIXTRAL_SCRIPT = """--disable-bias-linear --norm-epsilon 1e-5 --normalization RMSNorm --no-position-embedding
--no-masked-softmax-fusion --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0
--moe-pad-expert-input-to-capacity --moe-shared-expert-overlap --pipeline-model-parallel-size 4
--num-layers-per-virtual-pipeline-stage 8 --expert-model-parallel-size 8 --no-load-optim --no-load-rng --train-iters
500000 --lr-decay-iters 320000 --lr-warmup-iters 500 --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B"""


@pytest.mark.parametrize("script", [LLAMA_SCRIPT, MIXTRAL_SCRIPT], ids=["Llama 3 8B", "Mixtral 8x7B"])
def test_every_option_of_an_example_script_of_megatron_is_answered(script: str) -> None:
    words = script.split()
    known = {option for option in words if option.startswith("--") and key_instead_of_option(option.lstrip("-"), "")}
    assert {each for each in words if each.startswith("--")} == known
    assert len(known) >= 24


def test_keys_of_other_trainers_in_a_file_print_our_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart]\ntrain: {gradient_clipping: 0.5, batch: 16}\nper_device_train_batch_size: 4\nn_embd: 64\n")
    assert command(["plan", f"conf={file}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "distrain: no key train.gradient_clipping: write train.clip=0.5 (global norm of the gradients)" in lines
    assert "distrain: no key n_embd: write model.hidden=64" in lines
    assert lines[3:] == ["distrain: those with a value, to paste: train.microbatch=4 model.hidden=64 train.clip=0.5"]


def test_what_is_off_or_means_another_thing_in_its_section_is_not_taken_for_a_key_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({
        "train_batch_size": 8, "steps_per_print": 10, "aio": {"block_size": 1048576}, "activation_checkpointing": {"profile": False},
    }))  # fmt: skip
    with pytest.raises(Unreadable) as error:
        load_recipe(str(file))
    says = "\n".join(map(str, error.value.problems))
    assert "nothing here means aio.block_size" in says
    assert "train.seq" not in says
    assert "profile" not in says


def test_no_name_has_two_rows_or_is_a_key_of_ours() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 200
    assert set(TOP_LEVEL_ONLY) - {"block_size"} == set(NAMES) & {
        name for key in KNOWN for name in (key, key.rpartition(".")[2], key.partition(".")[0])
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_a_row_has_a_key_of_ours_and_values_that_it_takes(row: Synonym) -> None:
    assert not row.key or row.key in (*KNOWN, *config_files.groups(None), "conf")
    for value in (row.values or {}).values() if row.key else ():
        assert load_recipe("quickstart", f"{row.key}={value}".split()), (row.key, value)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOP_LEVEL_ONLY])
def test_a_name_is_known_with_dashes_in_capitals_and_in_any_section(name: str) -> None:
    problem = synonym_problem(name)
    assert problem is not None
    for spelling in (name.replace("_", "-"), name.upper(), f"trainer.{name}", f"a.b.{name}", f"--{name}"):
        other = synonym_problem(spelling)
        assert other is not None
        assert other.mend == problem.mend


DEEPSPEED_JSON = """{
 "train_batch_size": 256, "gradient_clipping": 1.0, "wall_clock_breakdown": false, "zero_allow_untested_optimizer": true,
 "fp16": {"enabled": false, "loss_scale": 0}, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
 "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500}},
 "zero_optimization": {"stage": 2, "overlap_comm": true, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}"""
AXOLOTL_YAML = """base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
wandb_project:
micro_batch_size: 2
lora_r: 16
optimizer: adamw_torch
bf16: auto
seed: 7
special_tokens: {pad_token: <pad>}
"""
NEMO_YAML = """name: megatron_gpt
trainer: {devices: 8, precision: bf16-mixed, max_steps: 100, accelerator: gpu}
exp_manager: {exp_dir: null}
model:
  tensor_model_parallel_size: 8
  optim: {name: distributed_fused_adam, lr: 2e-4, sched: {name: CosineAnnealing, min_lr: 2e-5}}
"""
TITAN_TOML = """[training]
local_batch_size = 1
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
[compile]
enable = true
"""
ACCELERATE_YAML = """distributed_type: FSDP
num_machines: 2
mixed_precision: bf16
fsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false}
"""
OLMO_YAML = """model: {d_model: 64, n_layers: 2, layer_norm_type: rms}
scheduler: {name: cosine_with_warmup, units: tokens, t_warmup: 8388608000}
speed_monitor: {window_size: 1}
precision: amp_bf16
fsdp: {precision: mixed}
"""
TRAINER_JSON = """{"output_dir": "out", "learning_rate": 2e-5, "optim": "adamw_torch", "report_to": ["wandb"], "tf32": true}"""


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("ds_config.json", DEEPSPEED_JSON, [
            "no key train_batch_size: write train.batch=256",
            "no key gradient_clipping: write train.clip=1.0",
            "no key bf16.enabled: write train.precision=bf16",
            "no key optimizer.type: write optim.name=adamw",
            "no key optimizer.params.lr: write optim.lr=0.0003",
            "no key optimizer.params.weight_decay: write optim.weight_decay=0.1",
            "no key scheduler.type: write optim.schedule=constant",
            "no key scheduler.params.warmup_num_steps: write optim.warmup=500",
            "no key zero_optimization.stage: write parallel.zero=2",
            "no key zero_optimization.overlap_comm: write parallel.overlap.data=true",
            "no key zero_optimization.offload_optimizer.device: write parallel.offload.optimizer=true",
            "nothing here means zero_allow_untested_optimizer, zero_optimization.offload_optimizer.pin_memory: leave them out",
        ]),
        ("axolotl.yml", AXOLOTL_YAML, [
            "no key base_model: write model.weights=VALUE",
            "no key micro_batch_size: write train.microbatch=2",
            "no key lora_r: write model.lora.rank=16",
            "no key optimizer: write optim=adamw",
            "no key bf16: write train.precision=auto",
            "no key seed: write train.seed=7",
            "nothing here means special_tokens.pad_token: leave it out",
        ]),
        ("nemo.yaml", NEMO_YAML, [
            "no key trainer.devices: write cluster.gpus=8",
            "no key trainer.precision: write train.precision=bf16",
            "no key trainer.max_steps: write train.steps=100",
            "no key model.tensor_model_parallel_size: write parallel.tp=8",
            "no key model.optim.name: write optim=adamw",
            "no key model.optim.lr: write optim.lr=0.0002",
            "no key model.optim.sched.name: write optim.schedule=cosine",
            "no key model.optim.sched.min_lr: write optim.min_lr=2e-05",
            "nothing here means trainer.accelerator: leave it out",
        ]),
        ("titan.toml", TITAN_TOML, [
            "no key training.local_batch_size: write train.microbatch=1",
            "no key training.steps: write train.steps=1000",
            "no key parallelism.data_parallel_shard_degree: write parallel.shard=VALUE",
            "no key compile.enable: write train.compile=true",
        ]),
        ("accelerate.yaml", ACCELERATE_YAML, [
            "no key num_machines: write cluster.nodes=2",
            "no key mixed_precision: write train.precision=bf16",
            "no key fsdp_config.fsdp_offload_params: write parallel.offload.optimizer=true parallel.offload.parameters=true",
            "no key fsdp_config.fsdp_sharding_strategy: write parallel.zero=3",
            "no key fsdp_config.fsdp_reshard_after_forward: write parallel.zero=2",
            "nothing here means distributed_type: leave it out",
        ]),
        ("olmo.yaml", OLMO_YAML, [  # neither its units, nor the window of its speed monitor, nor FSDP's precision is of ours
            "no key model.d_model: write model.hidden=64",
            "no key model.n_layers: write model.layers=2",
            "no key model.layer_norm_type: write model.norm=rmsnorm",
            "no key scheduler.name: write optim.schedule=cosine",
            "no key scheduler.t_warmup: write optim.warmup=VALUE",
            "no key precision: write train.precision=bf16",
            "nothing here means scheduler.units, speed_monitor.window_size, fsdp.precision: leave them out",
        ]),
        ("training_args.json", TRAINER_JSON, [
            "no key output_dir: write log.dir=out",
            "no key learning_rate: write optim.lr=2e-05",
            "no key optim: write optim=adamw",
            "no key report_to: write log.sinks=[console,jsonl,wandb]",
            "nothing here means tf32: leave it out",
        ]),
    ],
    ids=["DeepSpeed", "axolotl", "NeMo", "torchtitan", "accelerate", "OLMo", "Trainer"],
)  # fmt: skip
def test_a_config_file_of_another_trainer_is_answered_key_by_key(name: str, text: str, answers: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / name))
    head = (
        f"{tmp_path / name} is a config of another trainer, not a recipe: its keys here are below: "
        "`distrain cp quickstart mine.yaml` writes a recipe to set them in"
    )
    without_notes = [re.sub(r" \([^)]*\)?$", "", str(problem)) for problem in error.value.problems]
    assert without_notes == [head, *answers]


@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_a_models_config_json_is_named_and_not_answered_key_by_key(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    with pytest.raises(Unreadable) as error:
        load_recipe(str(file))
    says = f"{file} is the config.json of a Hugging Face model, not a recipe: write model.hf={file} beside a recipe, which has the rest"
    assert list(map(str, error.value.problems)) == [f"{says}: `distrain ls` lists them"]
    for path in (tmp_path, file):
        assert command(["plan", "conf=quickstart", f"model={path}"]) == 2
        assert capsys.readouterr().err == f"distrain: model={path} names no model: write model.hf={path}\n"


def test_a_script_that_starts_another_trainer_is_named(tmp_path: Path) -> None:
    (tmp_path / "pretrain.sh").write_text("#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 32\n")
    with pytest.raises(Unreadable, match=r"pretrain\.sh is a script, not a recipe: write the options that it passes behind a recipe"):
        load_recipe(str(tmp_path / "pretrain.sh"))
    (tmp_path / "train.py").write_text("from transformers import Trainer\nargs = dict(bf16=True)\n")
    with pytest.raises(Unreadable, match=r"train\.py is a program, not a recipe: write the arguments that it sets behind a recipe"):
        load_recipe(str(tmp_path / "train.py"))


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_a_recipe_without_a_key_says_how_to_begin_one(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(Unreadable) as error:
        load_recipe(str(file))
    says = f"{file} sets no key: `distrain cp quickstart {file}` writes a recipe to begin with, once it is removed"
    assert list(map(str, error.value.problems)) == [says]


def test_a_toml_file_that_nobody_knows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[package]\nname = 'x'\n")
    with pytest.raises(Unreadable, match=r"a\.toml is TOML: a recipe is YAML: `distrain cp quickstart mine\.yaml` writes one$"):
        load_recipe(str(tmp_path / "a.toml"))


def test_a_toml_file_with_a_mistake_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\nname = "x\nseed = 1\n')
    with pytest.raises(Unreadable, match=r"a\.toml can't be read as TOML: .* line 2.*: a recipe is YAML"):
        load_recipe(str(tmp_path / "a.toml"))


def test_a_recipe_with_misspelt_sections_is_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {batch: 3}\nmodel: {layers: 3}\nparalel: {tp: 2}\noptm: {lr: 3, beta: 2}\n")
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert [str(each) for each in error.value.problems if each.rule == "unknown"] == [
        "no key paralel: did you mean parallel?",
        "no key optm: did you mean optim?",
    ]


def test_what_another_trainer_fills_in_later_is_no_value_of_ours(tmp_path: Path) -> None:
    """`auto` in a DeepSpeed config of the Trainer; what can't be resolved is named too."""
    text = "train_batch_size: auto\nfp16: {enabled: auto}\nlearning_rate: .inf\nseq_len: ${nope}\n"
    (tmp_path / "ds.yaml").write_text(text)
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / "ds.yaml"))
    _, batch, precision, rate, unresolved = map(str, error.value.problems)
    assert "write train.batch=VALUE" in batch
    assert "write train.precision=VALUE" in precision
    assert "write optim.lr=VALUE" in rate
    assert unresolved.startswith("seq_len=${nope} can't be resolved")


def test_a_cluster_that_is_text_is_answered(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {family: llama}\ncluster: 4x8\n")
    with pytest.raises(Unreadable, match="cluster=4x8 names no cluster: known: "):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_every_key_of_a_section_of_another_trainer_is_answered(tmp_path: Path) -> None:
    text = (config_files.recipe_path("quickstart", None)).read_text()
    (tmp_path / "mine.yaml").write_text(f"{text}training: {{steps: 4, foo: 3}}\n")
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert list(map(str, error.value.problems)) == [
        "no key training.steps: write train.steps=4",
        "no key training.foo: nothing here means it: leave it out",
    ]


def test_a_section_of_another_trainer_in_a_recipe_is_answered_key_by_key(tmp_path: Path) -> None:
    text = (config_files.recipe_path("quickstart", None)).read_text()
    (tmp_path / "mine.yaml").write_text(f"{text}zero_optimization: {{stage: 2, overlap_comm: true}}\n")
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert list(map(str, error.value.problems)) == [
        "no key zero_optimization.stage: write parallel.zero=2 (0 to 3)",
        "no key zero_optimization.overlap_comm: write parallel.overlap.data=true",
    ]


def test_a_misspelt_key_of_a_file_is_answered_with_the_whole_key(tmp_path: Path) -> None:
    text = (config_files.recipe_path("quickstart", None)).read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("warmup:", "warmups:") + "weight_decay: 0.1\n")
    with pytest.raises(Unreadable) as error:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert list(map(str, error.value.problems)) == [
        "no key weight_decay: did you mean optim.weight_decay?",
        "no key optim.warmups: did you mean optim.warmup?",
    ]
