"""Problems of a plan: every rule is broken, and every printed fix applied."""

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.valid_run import BASE, FOLDED, HF, INTERLEAVED, MOE, Keys, fixed_run
from distrain.trainer.models.mla.ops import LATENT as LATENT_KEYS
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.rules.rules import OF_LAYOUT, OF_RUN
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Data, DataStage, Model


def stages(*rows: Any) -> tuple[DataStage, ...]:
    """Stages of weights, each but perhaps the last followed by its until."""
    return tuple(DataStage(weights=weights, until=until) for weights, until in zip_longest(rows[::2], rows[1::2]))


WIDTHS: Keys = dict.fromkeys(LATENT_KEYS, 8)
LATENT: Keys = {"model": Model(family="mla", layers=2, hidden=64, heads=4, vocab=256, experts=4, top_k=2, **WIDTHS)}
HYBRID = Model(
    family="hybrid",
    layers=8,
    hidden=64,
    heads=4,
    vocab=256,
    experts=4,
    top_k=2,
    shared_experts=1,
    full_attention_interval=4,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
FROM, UNTIL, BY = "train.rampup.batch", "train.rampup.until", "train.rampup.by"
BLEND: Keys = {"data": Data(name="text", path=("a", "b"))}
LISTED: Keys = {"parallel.schedule": "a.csv", "parallel.actions": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "parallel.pp": 2, "train.batch": 32}
PREFERENCES: Keys = {"data.name": "preferences", "data.documents": True}
# fmt: off
BROKEN: list[tuple[Keys, str]] = [
    ({"model.family": "gtp"},
        "model.family=gtp is not known: did you mean gpt?"),
    ({"engine": "zeor"},
        "engine=zeor is not known: did you mean zero?"),
    ({"parallel.schedule": "interleave"},
        "parallel.schedule=interleave is not known: did you mean interleaved?"),
    ({"model.heads": 13},
        "model.heads=13 does not divide model.hidden=768: set model.heads=12 or model.heads=16 or model.heads=8"),
    ({"model.kv_heads": 5},
        "model.kv_heads=5 does not divide model.heads=12: set model.kv_heads=4 or model.kv_heads=6 or model.kv_heads=3"),
    ({"model.context": 512},
        "train.seq=1024 is longer than model.context=512, the length of the position table: set train.seq=512 or model.context=1024"),
    ({"model.positions": "rope", "model.head_dim": 63},
        "model.positions=rope turns pairs of elements, but a head has 63: set model.head_dim=64"),
    ({"model.layer_types": ("sliding_attention",)},
        "model.layer_types names layers with sliding_attention, but model.window=null: set model.layer_types=null"),
    ({"model.window": 512, "parallel.cp": 2, "train.precision": "fp32"},
        ("parallel.cp=2 needs FlashAttention-2 for model.window=512, and A100 does not run it on heads of 64 elements in fp32: "
         "set parallel.cp_comm=all_to_all or parallel.cp=1 or train.attention=math")),
    ({"model.sinks": True, "parallel.cp": 2},
        "parallel.cp=2: ranks that gather keys have no model.sinks: set parallel.cp_comm=all_to_all or parallel.cp=1"),
    ({"model.sinks": True, "train.precision": "fp32"},
        "model.sinks=true: the fused kernel of a GPU takes no train.precision=fp32: set train.attention=math or train.precision=bf16"),
    ({"model.sinks": True, "train.precision": "fp16", "cluster.device.peak": {"fp32": 15.7e12, "fp16": 125e12}},
        "model.sinks=true: A100 has no fused kernel for it: set train.attention=math"),
    ({"model.sinks": True, "data.documents": True},
        "model.sinks=true: the fused kernel of a GPU keeps no data.documents=true apart: set train.attention=math"),
    ({"model.sinks": True, "model.heads": 2},
        "model.sinks=true: the fused kernel of a GPU takes no heads of 384 elements: set train.attention=math"),
    ({"model.heads": 12, "parallel.cp": 8, "parallel.cp_comm": "all_to_all"},
        ("parallel.cp_comm=all_to_all does not share out 12 heads over parallel.cp=8 evenly: "
         "set parallel.cp_comm=all_gather or parallel.cp=4 or parallel.cp=2")),
    ({"model.kv_heads": 3, "parallel.cp": 2, "parallel.cp_comm": "all_to_all"},
        ("parallel.cp_comm=all_to_all does not share out 12 heads and 3 key heads over parallel.cp=2 evenly: "
         "set parallel.cp_comm=all_gather or parallel.cp=1")),
    ({"model.kv_heads": 4, "parallel.cp": 2, "parallel.cp_comm": "all_to_all", "parallel.tp": 4},
        ("parallel.cp_comm=all_to_all does not share out 3 heads and 1 key head of a tensor rank over parallel.cp=2 evenly: "
         "set parallel.cp_comm=all_gather or parallel.cp=1")),
    ({"optim.mup": 256, "model.tied": True},
        ("optim.mup=256 does not work with model.tied=true: the embedding and the head have other rates: "
         "set model.tied=false or optim.mup=null")),
    ({"optim.mup": 256, "model.tied": False, "optim.name": "sgd"},
        "optim.mup=256 does not work with optim.name=sgd: its rates are those of Adam: set optim.name=adamw or optim.mup=null"),
    ({"optim.mup": 256, "model.tied": False, "model.lora.rank": 4},
        "optim.mup=256 does not work with model.lora.rank=4: LoRA's factors are not of the model's width: set optim.mup=null"),
    ({"model.lora.rank": 4, "model.lora.targets": ("gate",)},
        ("model.lora.targets=[gate] names gate, which this model does not have: "
         "set model.lora.targets=[query,value] or model.lora.targets=null")),
    (MOE | {"model.lora.rank": 4, "model.lora.targets": ("gate", "q_a_proj", "kv_b_proj")},
        ("model.lora.targets=[gate,q_a_proj,kv_b_proj] names q_a_proj, kv_b_proj, which this model does not have: "
         "set model.lora.targets=[gate] or model.lora.targets=null")),
    (MOE | {"model.lora.rank": 4, "model.lora.dropout": 0.1, "model.lora.targets": ("query", "up")},
        ("model.lora.dropout=0.1 does not go with up of routed experts, whose rows are sent without their tokens (PEFT refuses it too): "
         "set model.lora.targets=[query] or model.lora.dropout=0.0")),
    ({"model.lora.rank": 4, "model.lora.dropout": 0.1, "train.compile": True},
        "model.lora.dropout=0.1 does not go with train.compile=true: set train.compile=false or model.lora.dropout=0.0"),
    ({"model.lora.rank": 4, "model.lora.weights": "adapter"},
        ("model.lora.weights=adapter adds to published weights, and model.weights names none: "
         "set model.weights to the folder that the adapter was trained on")),
    ({"model.lora.rank": 4, "model.lora.targets": ()},
        ("model.lora.targets=[] names no layer, so nothing would be trained: "
         "set model.lora.targets=[query,value] or model.lora.targets=null")),
    (MOE | {"model.lora.rank": 4, "model.router.bias": True, "model.router.bias_rate": 0.001},
        "model.router.bias_rate=0.001 does not go with model.lora.rank=4, which freezes the router: set model.router.bias_rate=0.0"),
    ({"model.mtp.layers": 1, "model.family": "bert"},
        "model.mtp.layers=1 does not apply to family bert: its modules are made of our own causal layers: set model.mtp.layers=0"),
    ({"model.mtp.layers": 1, "model.lora.rank": 4},
        ("model.mtp.layers=1 does not go with model.lora.rank=4, which freezes the embedding and the head: "
         "set model.mtp.layers=0 or model.lora.rank=0")),
    ({"model.mtp.layers": 1, "model.window": 6, "model.layer_types": ("sliding_attention", "full_attention")},
        ("model.mtp.layers=1 adds layers, and model.layer_types does not say whether they have the window: "
         "set model.mtp.layers=0 or model.window=null model.layer_types=null")),
    ({"model.mtp.layers": 16, "train.seq": 16},
        ("model.mtp.layers=16 predicts tokens beyond sequences of train.seq=16: "
         "set model.mtp.layers=15 or model.mtp.layers=0")),
    ({"model.family": "hf"},
        "family hf has no sizes of its own: set model.hf to the path of a config.json"),
    (HF | {"train.seq": 2048},
        "train.seq=2048 is longer than the 1024 tokens of its config.json: set train.seq=1024"),
    (HF | {"model.dropout": 0.1},
        "model.dropout=0.1: dropout of family hf is not keyed by train.seed and differs between layouts: set model.dropout=0"),
    (HF | {"train.loss_chunks": 4},
        "train.loss_chunks=4: transformers computes all logits of family hf at once: set train.loss_chunks=1"),
    ({"model.vocab": 250, "parallel.tp": 4, "train.loss_chunks": 16},
        "train.loss_chunks=16: a rank's 63 tokens of the vocabulary have 8 chunks of 8: set train.loss_chunks=8"),
    (HF | {"data.documents": True},
        "data.documents=true: attention of family hf crosses document boundaries: set data.documents=false"),
    (HF | {"data.name": "pairs", "data.documents": True},
        ("data=pairs: attention of family hf crosses the boundaries of examples: "
         "train a model of another family: `distrain ls model` lists them")),
    ({"data.name": "pairs"},
        "data.documents=false: data=pairs always keeps its examples apart: set data.documents=true"),
    (HF | {"data.name": "preferences", "data.documents": True},
        ("data=preferences: attention of family hf crosses the boundaries of examples: "
         "train a model of another family: `distrain ls model` lists them")),
    ({"data.name": "preferences"},
        "data.documents=false: data=preferences always keeps its examples apart: set data.documents=true"),
    (PREFERENCES | {"model.mtp.layers": 1},
        ("model.mtp.layers=1 does not go with data=preferences: modules would learn rejected answers too: "
         "set model.mtp.layers=0")),
    (PREFERENCES | {"train.z_loss": 0.01},
        "train.z_loss=0.01 does not go with data=preferences, whose loss is of pairs and not of tokens: set train.z_loss=0.0"),
    (HF | {"parallel.tp": 2},
        "parallel.tp=2 does not apply to family hf, which trains with data parallelism and ZeRO only: set parallel.tp=1"),
    (HF | {"parallel.pp": 2, "parallel.dp": 8},
        "parallel.pp=2 does not apply to family hf, which trains with data parallelism and ZeRO only: set parallel.pp=1 parallel.dp=auto"),
    (HF | {"parallel.recompute": "full"},
        "parallel.recompute=full: family hf saves all activations: set parallel.recompute=none"),
    ({"model.experts": 8},
        "model.experts=8 is for family hybrid or mla or moe, not gpt: set model.experts=0"),
    ({"model.dense_layers": 1},
        "model.dense_layers=1: all layers of family gpt are dense: set model.dense_layers=0"),
    (MOE | {"model.dense_layers": 12},
        "model.dense_layers=12 is not below model.layers=12, whose others have experts: set model.dense_layers=11"),
    (MOE | {"model.dense_layers": 3, "parallel.pp": 2, "parallel.stages": (3, 9)},
        ("parallel.stages=[3,9] begins with 3, not more than model.dense_layers=3, which are in the first part with another layer: "
         "set parallel.stages=null")),
    (MOE | {"model.dense_layers": 9, "parallel.pp": 4},
        ("parallel.pp=4 is more than the model.layers=12, of which the first 9 are dense and in one part: "
         "set parallel.pp=1")),
    ({"parallel.ep": 2},
        "parallel.ep=2 splits experts, and family gpt has none: set parallel.ep=1"),
    (MOE | {"model.family": "mla", "model.v_head_dim": 16},
        ("family mla needs model.q_lora_rank, model.kv_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim: "
         "set them, as conf/model/deepseek_v3.yaml does (model.q_lora_rank=0: queries have no latent)")),
    (MOE | {"model.family": "mla", "model.q_lora_rank": 0, "model.kv_lora_rank": 8, "model.qk_nope_head_dim": 16, "model.v_head_dim": 16,
            "model.qk_rope_head_dim": 7, "model.positions": "rope"},
        "model.positions=rope turns pairs of elements, but a head has 7: set model.qk_rope_head_dim=8"),
    ({"model": replace(HYBRID, linear_conv_kernel_dim=None, linear_key_head_dim=None)},
        "family hybrid needs model.linear_key_head_dim, model.linear_conv_kernel_dim: set them, as conf/model/qwen3_next_80b.yaml does"),
    ({"model": replace(HYBRID, layers=6)},
        ("model.layers=6 are no whole groups of model.full_attention_interval=4: "
         "set model.layers=8 or model.full_attention_interval=3 or model.full_attention_interval=2")),
    ({"model": replace(HYBRID, linear_num_key_heads=3)},
        ("model.linear_num_key_heads=3 does not divide model.linear_num_value_heads=8: "
         "set model.linear_num_key_heads=2 or model.linear_num_key_heads=4 or model.linear_num_key_heads=1")),
    ({"model": replace(HYBRID, shared_experts=0)},
        "model.shared_experts=0: a layer of family hybrid has a shared expert: set model.shared_experts=1"),
    *(({"model": HYBRID, f"model.{key}": value},
        f"model.{key}={text}: family hybrid has none: set model.{key}={off}")
      for key, value, text, off in (("bias", True, "true", "false"), ("qkv_bias", True, "true", "false"), ("sinks", True, "true", "false"),
                                    ("expert_bias", True, "true", "false"), ("window", 64, "64", "null"), ("dense_layers", 1, "1", "0"),
                                    ("mtp.layers", 1, "1", "0"))),
    ({"model": HYBRID, "model.lora.rank": 4, "model.lora.targets": ("q_a_proj", "in_proj_ba")},
        ("model.lora.targets=[q_a_proj,in_proj_ba] names q_a_proj, which this model does not have: "
         "set model.lora.targets=[in_proj_ba] or model.lora.targets=null")),
    ({"model": replace(HYBRID, full_attention_interval=1), "model.lora.rank": 4, "model.lora.targets": ("out_proj",)},
        ("model.lora.targets=[out_proj] names out_proj, which this model does not have: "
         "set model.lora.targets=[query,value] or model.lora.targets=null")),
    ({"model": HYBRID, "model.lora.rank": 4, "model.lora.dropout": 0.1, "model.lora.targets": ("query", "up")},
        ("model.lora.dropout=0.1 does not go with up of routed experts, whose rows are sent without their tokens (PEFT refuses it too): "
         "set model.lora.targets=[query] or model.lora.dropout=0.0")),
    ({"model": HYBRID, "model.lora.rank": 4, "model.lora.dropout": 0.1},
        ("model.lora.dropout=0.1 does not go with down, gate, up of routed experts, whose rows are sent without their tokens (PEFT refuses "
         "it too): set model.lora.targets=[in_proj_ba,in_proj_qkvz,k_proj,o_proj,out_proj,q_proj,shared_expert_gate,v_proj] or "
         "model.lora.dropout=0.0")),
    (MOE | {"model.lora.rank": 4, "model.lora.targets": ("in_proj_qkvz", "query")},
        ("model.lora.targets=[in_proj_qkvz,query] names in_proj_qkvz, which this model does not have: "
         "set model.lora.targets=[query] or model.lora.targets=null")),
    ({"model": HYBRID, "optim.mup": 16},
        "optim.mup=16: the rates of linear attention are not known to it: set optim.mup=null"),
    ({"model": HYBRID, "train.linear_attention": "fla", "train.precision": "fp32"},
        "train.linear_attention=fla multiplies train.precision=fp32 in TF32: set train.linear_attention=torch or train.precision=bf16"),
    ({"model": replace(HYBRID, linear_key_head_dim=320), "train.linear_attention": "fla"},
        "train.linear_attention=fla takes no keys of 320 elements, at most 256: set train.linear_attention=torch"),
    ({"model": replace(HYBRID, linear_num_key_heads=2), "parallel.cp": 8},
        "parallel.cp=8 does not share out 2 key heads of linear attention evenly: set parallel.cp=2 or parallel.cp=1"),
    ({"model": HYBRID, "parallel.cp": 2, "parallel.tp": 4},
        "parallel.cp=2 does not share out 1 key head of linear attention of a tensor rank evenly: set parallel.cp=1"),
    ({"model": HYBRID, "parallel.pp": 4},
        "parallel.pp=4 is more than model.layers=8 in groups of 4: set parallel.pp=2 or parallel.pp=1"),
    ({"model": HYBRID, "parallel.pp": 2, "parallel.stages": (4, 4)},
        "parallel.stages=[4,4] adds up to 8, not to 2 groups of 4 layers: model.layers=8: set parallel.stages=null"),
    ({"model.positions": "rope", "model.head_dim": 16, "model.rope_share": 0.32},
        ("model.rope_share=0.32 of a head's 16 elements are 5, and model.positions=rope turns pairs: "
         "set model.rope_share=0.375 or model.rope_share=1.0")),
    ({"model.positions": "rope", "model.head_dim": 16, "model.rope_share": 0.01},
        ("model.rope_share=0.01 of a head's 16 elements are 0, and model.positions=rope turns pairs: "
         "set model.rope_share=0.125 or model.rope_share=1.0")),
    (LATENT | {"model.kv_heads": 2},
        "model.kv_heads=2: family mla has a key and a value for each of model.heads=4: set model.kv_heads=null"),
    (LATENT | {"model.bias": True, "model.positions": "rope"},
        "model.bias=true: family mla has none: set model.bias=false"),
    ({"model.qk_norm": True, "model.qk_norm_over": "all", "model.norm": "rmsnorm1p"},
        ("model.qk_norm_over=all does not scale by 1 + its weight, as model.norm=rmsnorm1p does: "
         "set model.norm=rmsnorm or model.qk_norm_over=head")),
    (LATENT | {"model.norm": "rmsnorm1p"},
        "model.norm=rmsnorm1p: family mla has no scale of 1 + weight: set model.norm=rmsnorm"),
    (LATENT | {"model.query_pre_attn_scalar": 64},
        "model.query_pre_attn_scalar=64: family mla has none: set model.query_pre_attn_scalar=null"),
    (LATENT | {"model.qk_norm": True},
        "model.qk_norm=true: family mla has none: set model.qk_norm=false"),
    (MOE | {"model.experts": 0},
        "model.experts=0: family moe has at least one expert: set model.experts"),
    (MOE | {"model.top_k": 9},
        "model.top_k=9 is not from 1 to model.experts=8: set model.top_k=2"),
    (MOE | {"model.router.groups": 3},
        ("model.router.groups=3 does not divide model.experts=8: "
         "set model.router.groups=2 or model.router.groups=4 or model.router.groups=1")),
    (MOE | {"model.router.groups": 4, "model.router.top_groups": 5},
        "model.router.top_groups=5 is more than model.router.groups=4: set model.router.top_groups=4"),
    (MOE | {"model.router.groups": 4, "model.top_k": 3},
        "model.router.top_groups=1 groups of 2 have fewer experts than model.top_k=3: set model.router.top_groups=2"),
    (MOE | {"model.router.groups": 8, "model.router.top_groups": 2, "model.router.bias": True},
        ("model.router.bias=true adds up a group's two largest scores, and model.router.groups=8 leave one expert each: "
         "set model.router.groups=1 or model.router.bias=false")),
    (MOE | {"model.experts": 9, "parallel.ep": 2},
        "parallel.ep=2 does not divide model.experts=9: set parallel.ep=1"),
    (MOE | {"parallel.ep": 4, "parallel.ep_load": 9.0},
        "parallel.ep_load=9: no rank of experts computes more than 4 times an even share of the copies: set parallel.ep_load=4.0"),
    (MOE | {"parallel.ep": 4, "parallel.ep_load": 2.0, "model.capacity": 1.5},
        "parallel.ep_load=2: no rank of experts computes more than 1.5 times an even share of the copies: set parallel.ep_load=1.5"),
    (MOE | {"parallel.ep": 8, "parallel.tp": 4},
        "parallel.ep=8 does not divide parallel.dp=4, whose ranks hold the experts: set parallel.ep=4 or parallel.ep=2 or parallel.ep=1"),
    ({"parallel.tp": 3},
        "tp 3 x cp 1 x pp 1 = 3 does not divide: the cluster has 2 x 8 = 16 devices: set parallel.tp=2 or parallel.tp=1"),
    ({"parallel.tp": 4, "parallel.pp": 8},
        ("tp 4 x cp 1 x pp 8 = 32 does not divide: the cluster has 2 x 8 = 16 devices: "
         "set cluster.nodes=4 or parallel.pp=4 or parallel.pp=2")),
    ({"parallel.dp": 4},
        "parallel.dp=4 x tp 1 x cp 1 x pp 1 = 4, but the cluster has 2 x 8 = 16 devices: set parallel.dp=16 or parallel.dp=auto"),
    ({"parallel.dp": 32},
        ("parallel.dp=32 x tp 1 x cp 1 x pp 1 = 32, but the cluster has 2 x 8 = 16 devices: "
         "set parallel.dp=16 or cluster.nodes=4 or parallel.dp=auto")),
    ({"parallel.shard": 3},
        "parallel.shard=3 does not divide dp 16 x cp 1 = 16: set parallel.shard=2 or parallel.shard=4 or parallel.shard=1"),
    (MOE | {"parallel.ep": 4, "parallel.shard": 2},
        "parallel.shard=2 is not a multiple of parallel.ep=4: set parallel.shard=all"),
    ({"parallel.staleness": 9, "train.steps": 9},
        ("parallel.staleness=9 is not below train.steps=9: no sum of gradients would be used in a step: "
         "set parallel.staleness=1 or train.steps=18")),
    ({"parallel.staleness": 1, "parallel.overlap.data": False},
        ("parallel.staleness=1 hides the sums of gradients, which parallel.overlap.data=false exposes: "
         "set parallel.overlap.data=true or parallel.staleness=0")),
    ({"parallel.reduce": "server", "parallel.servers": 17},
        "parallel.servers=17 is more than 16 data-parallel ranks: set parallel.servers=16 or parallel.reduce=ring"),
    ({"parallel.sync.every": 4, "train.evaluate.every": 10},
        ("train.evaluate.every=10 is not a multiple of parallel.sync.every=4: workers have other weights then: "
         "set train.evaluate.every=12 or parallel.sync.every=1")),
    ({"parallel.sync.every": 4, "checkpoint.every": 6},
        ("checkpoint.every=6 is not a multiple of parallel.sync.every=4: workers have other weights then: "
         "set checkpoint.every=8 or parallel.sync.every=1")),
    ({"parallel.sync.every": 2, "parallel.sync.across": "node", "cluster.gpus": 10, "parallel.cp": 4, "train.batch": 80},
        ("parallel.sync.across=node: 5 replicas don't divide into nodes that have 2 of them: "
         "set parallel.sync.across=all or parallel.sync.every=1")),
    (MOE | {"parallel.ep": 4, "parallel.sync.every": 2},
        ("parallel.ep=4 does not divide the 1 replica of a worker, which holds all experts: "
         "set parallel.sync.across=node or parallel.ep=1 or parallel.sync.every=1")),
    ({"parallel.tp": 4, "parallel.sequence": True, "train.seq": 1022},
        "parallel.sequence does not split train.seq=1022 over tp 4 x cp 1 evenly: set parallel.sequence=false"),
    ({"parallel.cp": 4, "train.seq": 1012},
        "parallel.cp=4: train.seq=1012 is not a multiple of 2 x cp: set parallel.cp=2 or parallel.cp=1"),
    ({"parallel.pp": 16},
        "parallel.pp=16 is more than model.layers=12: set parallel.pp=4"),
    (INTERLEAVED | {"parallel.pp": 4, "parallel.chunks": 4},
        "parallel.pp=4 x parallel.chunks=4 is more than model.layers=12: set parallel.chunks=3 or parallel.pp=2"),
    ({"parallel.pp": 2, "parallel.chunks": 2},
        "parallel.chunks=2 is for schedule interleaved, not 1f1b: set parallel.schedule=interleaved or parallel.chunks=1"),
    (INTERLEAVED | {"parallel.pp": 2},
        ("parallel.schedule=interleaved needs parallel.chunks of 2 or more: "
         "set parallel.chunks=2 or parallel.schedule=1f1b parallel.chunks=1")),
    (INTERLEAVED | {"parallel.pp": 4, "parallel.chunks": 3, "train.batch": 40},
        ("5 micro-batches a step are not a multiple of parallel.pp=4, which schedule interleaved needs: "
         "set train.batch=64 or parallel.schedule=1f1b parallel.chunks=1")),
    (FOLDED | {"parallel.pp": 8},
        ("parallel.schedule=dualpipev needs 2 x parallel.pp=8 parts, more than model.layers=12: "
         "set parallel.schedule=1f1b or parallel.pp=4")),
    (FOLDED | {"parallel.pp": 4, "train.batch": 40},
        ("5 micro-batches a step are fewer than 2 x parallel.pp=4, which schedule dualpipev needs: "
         "set train.batch=64 or parallel.schedule=1f1b")),
    ({"parallel.pp": 4, "parallel.schedule": "pipedream_2bw", "train.batch": 16},
        ("2 micro-batches a step are fewer than parallel.pp=4, which schedule pipedream_2bw needs: "
         "set train.microbatch=1 or train.batch=32 or parallel.schedule=pipedream")),
    ({"parallel.pp": 4, "parallel.schedule": "pipedream_2bw", "train.microbatch": 8, "train.batch": 64},
        ("2 micro-batches a step are fewer than parallel.pp=4, which schedule pipedream_2bw needs: "
         "set train.microbatch=4 or train.batch=128 or parallel.schedule=pipedream")),
    ({"parallel.pp": 2, "parallel.chunks": 2, "parallel.schedule": "dualpipev"},
        "parallel.chunks=2 is for schedule interleaved, not dualpipev: set parallel.schedule=interleaved or parallel.chunks=1"),
    ({"train.batch": 240},
        "train.batch=240 is not a multiple of dp 16 x train.microbatch=2: set train.microbatch=1 or train.batch=256"),
    ({"train.batch": 250},
        "train.batch=250 is not a multiple of dp 16 x train.microbatch=2: set train.batch=256"),
    ({UNTIL: 1e6},
        "train.rampup.until=1000000 without train.rampup.batch, the batch of the first steps: set train.rampup.until=null"),
    ({BY: 16},
        "train.rampup.by=16 without train.rampup.batch, the batch of the first steps: set train.rampup.by=null"),
    ({FROM: (), UNTIL: 1e6},
        "train.rampup.batch=[] names no batch: set train.rampup.batch=null train.rampup.until=null"),
    ({FROM: 32},
        ("train.rampup.batch=32 without train.rampup.until: "
         "set train.rampup.until to the tokens of the run that end it, as train.rampup.until=20e9")),
    ({FROM: (32, 64), UNTIL: 1e6},
        "train.rampup.batch=[32,64] names 2 batches, and train.rampup.until 1 end: give each batch the tokens that end it"),
    ({FROM: (32, 64), UNTIL: (2e6, 1e6)},
        "train.rampup.until=[2000000,1000000] does not rise: put the earlier end first"),
    ({FROM: (64, 32), UNTIL: (1e6, 2e6)},
        "train.rampup.batch=[64,32] does not rise to train.batch=256: set train.rampup.batch=null train.rampup.until=null"),
    ({FROM: 256, UNTIL: 1e6},
        ("train.rampup.batch=256 does not rise to train.batch=256: "
         "set train.batch=512 or train.rampup.batch=null train.rampup.until=null")),
    ({FROM: 32, UNTIL: 1e6, BY: 100},
        ("train.rampup.by=100 does not divide the rise of 224 from 32 to 256 sequences: "
         "set train.rampup.by=112 train.microbatch=1 or train.rampup.by=32")),
    ({FROM: 32, UNTIL: 1e9, BY: 3, "train.batch": 320000032},
        ("train.rampup.by=3 does not divide the rise of 320000000 from 32 to 320000032 sequences: "
         "set train.rampup.by=32000 or train.rampup.by=40000 or train.rampup.by=50000 train.microbatch=1")),
    ({FROM: 32, UNTIL: 1e9, BY: 32, "train.batch": 640032},
        ("train.rampup.by=32 makes 20,000 levels, more than 10,000: "
         "set train.rampup.by=64 or train.rampup.by=80 train.microbatch=1")),
    ({FROM: (32, 40), UNTIL: (1e6, 2e6)},
        ("train.rampup.batch=[32,40]: its step of 40 sequences is not a multiple of dp 16 x train.microbatch=2: "
         "set train.rampup.batch=[32,64] or train.rampup.batch=null train.rampup.until=null")),
    ({FROM: 48, UNTIL: 1e6, BY: 16},
        ("train.rampup.batch=48: its step of 48 sequences is not a multiple of dp 16 x train.microbatch=2: "
         "set train.microbatch=1 or train.rampup.batch=64 train.rampup.by=32 or "
         "train.rampup.batch=null train.rampup.until=null train.rampup.by=null")),
    (INTERLEAVED | {FROM: 32, UNTIL: 1e6, "parallel.pp": 2, "parallel.chunks": 2, "train.microbatch": 4},
        ("train.rampup.batch=32: its step of 32 sequences has 1 micro-batch, not a multiple of parallel.pp=2, "
         "which schedule interleaved needs: set train.microbatch=2 or train.rampup.batch=64 or parallel.schedule=1f1b parallel.chunks=1")),
    (FOLDED | {FROM: 32, UNTIL: 1e6, "parallel.pp": 2},
        ("train.rampup.batch=32: its step of 32 sequences has 2 micro-batches, fewer than 2 x parallel.pp=2, "
         "which schedule dualpipev needs: set train.microbatch=1 or train.rampup.batch=64 or parallel.schedule=1f1b")),
    ({FROM: 32, UNTIL: 1e6, "parallel.pp": 4, "parallel.schedule": "pipedream", "model.tied": False},
        ("train.rampup.batch=32: parallel.schedule=pipedream does not flush, and needs as many micro-batches in every step: "
         "set parallel.schedule=1f1b or train.rampup.batch=null train.rampup.until=null")),
    (LISTED | {FROM: 16, UNTIL: 1e6},
        ("train.rampup.batch=16: parallel.schedule=a.csv lists as many micro-batches in every step: "
         "set parallel.schedule=1f1b or train.rampup.batch=null train.rampup.until=null")),
    (BLEND | {"data.stages": ()},
        "data.stages=[] names no stage: set data.stages=null"),
    ({"data.stages": stages((1, 2))},
        ("data.stages blends paths, and data=synthetic has none: set data.stages=null")),
    (BLEND | {"data.weights": (1.0, 2.0), "data.stages": stages((1, 2))},
        "data.weights=[1.0,2.0] blends the whole run, and data.stages has weights of its own: set data.weights=null"),
    (BLEND | {"data.stages": stages((1, 2, 3))},
        "data.stages[0].weights=[1,2,3] has 3 weights for 2 paths: give each path of data.path one weight; 0 leaves it out of a stage"),
    (BLEND | {"data.stages": stages((1, 2), 5e6, (0, 0))},
        "data.stages[1].weights=[0,0] reads no path: set one above 0"),
    (BLEND | {"data.stages": stages((0, 2), 5e6, (0, 1))},
        "no stage of data.stages reads path 1 of 2 of data.path: its weight is 0 in each: leave the path and its weights out"),
    (BLEND | {"data.stages": stages((1, 2), 5e6, (1, 1), 2e12)},
        "data.stages[1].until=2e12: the last stage goes on to the end of the run: leave its until out, or add the stage that follows"),
    (BLEND | {"data.stages": (*stages((1, 2)), *stages((1, 1)))},
        "data.stages[0] has no until, and a stage follows it: set until to the tokens of the run that end it, as until: 2e12"),
    (BLEND | {"data.stages": stages((1, 2), 5e6, (1, 1), 5e6, (1, 3))},
        "data.stages[1].until=5000000 is not after that of the stage before: put the earlier stage first"),
    ({"data.validate": {"wiki": "w.txt"}},
        "data.validate names files, and a run on data=synthetic has no text like theirs: set data.validate=null"),
    (BLEND | {"data.validate": {"wiki": "w.txt", "1st": "a.txt"}},
        ("data.validate names a set '1st': it becomes a part of keys in logs: "
         "begin it with a letter, then up to 31 letters, digits, - or _")),
    (BLEND | {"data.validate": {"wiki": ("w.txt", "")}},
        "data.validate.wiki=[w.txt,] names no file: set data.validate.wiki=PATH"),
    ({"train.steps": None},
        "neither train.steps nor train.tokens is set: set one of them"),
    ({"train.tokens": 1e9},
        "train.steps=100 and train.tokens=1e+09 are both set: a run has one length: set train.tokens=null or train.steps=null"),
    ({"optim.warmup": 100},
        "optim.warmup=100 is not shorter than train.steps=100: set optim.warmup=10"),
    ({"train.precision": "fp16"},
        "train.precision=fp16: A100 does not compute in fp16: set train.precision=bf16 or train.precision=fp32"),
    ({"train.precision": "fp8", "cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}, "train.seq": 1004},
        "train.precision=fp8 multiplies in blocks of 16: attention has 2008 rows on a rank: set train.precision=bf16"),
    ({"model": replace(HYBRID, family="hybrid", expert_ffn=64), "train.precision": "fp8", "parallel.tp": 4,
      "cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}},
        "train.precision=fp8 multiplies in blocks of 16: attention has 8 columns on a rank: set train.precision=bf16"),
    ({"model": replace(HYBRID, family="hybrid", full_attention_interval=None), "train.precision": "fp8",
      "cluster.device.peak": {"fp8": 6e14, "bf16": 3e14}},
        "family hybrid needs model.full_attention_interval: set it, as conf/model/qwen3_next_80b.yaml does"),
    ({"train.gradients": "fp16"},
        "train.gradients=fp16 is not supported with train.precision=bf16: set train.gradients=auto or train.gradients=fp32"),
    ({"parallel.offload.optimizer": True},
        "parallel.offload.optimizer=true needs parallel.zero of 1 or more: set parallel.zero=1"),
    ({"parallel.offload.parameters": True, "parallel.zero": 1},
        "parallel.offload.parameters=true needs parallel.zero=3, not 1: set parallel.zero=3"),
    ({"name": "../../zz"},
        "name=../../zz contains /, but names one folder: write one word, as name=my_run: it names the run's folder in log.dir"),
    ({"log.dir": ""},
        "log.dir= is empty: name a folder, as log.dir=runs"),
    ({"optim.min_lr": 0.1},
        "optim.min_lr=0.1 is above optim.lr=0.0003: optim.schedule=cosine would raise the rate: set optim.min_lr=3e-05"),
    ({"log.profile": (5, 2)},
        "log.profile=[5,2]: its first step is after its last: set log.profile=[2,5]"),
    ({"log.timeline": (5, 2)},
        "log.timeline=[5,2]: its first step is after its last: set log.timeline=[2,5]"),
    ({"log.timeline": (0, 0)},
        "log.timeline=[0,0]: steps are counted from 1: set log.timeline=[1,1]"),
    ({"log.timeline": (5, 2000)},
        "log.timeline=[5,2000] has more than the 1000 steps of a timeline: set log.timeline=[5,1004]"),
    ({"log.timeline": (5, 9), "parallel.pp": 4, "parallel.schedule": "pipedream", "model.tied": False},
        "log.timeline times steps that end before the next begins, which parallel.schedule=pipedream has not: set log.timeline=null"),
    ({"log.profile": (0, 0)},
        "log.profile=[0,0]: steps are counted from 1: set log.profile=[1,1]"),
    ({"parallel.pp": 20_000, "model": Model(family="gpt", layers=20_000, hidden=16, heads=2, vocab=512), "cluster.nodes": 2500},
        "parallel.pp=20000 is more than the 10,000 stages that a plan has: set parallel.pp=1 train.batch=40000 parallel.zero=3"),
    ({"cluster.nodes": 1000, "parallel.tp": 2, "parallel.dp": 4000, "model.layers": 300, "parallel.zero": 1, "train.batch": 8000,
      "parallel.cp": 2, "cluster.gpus": 16},
        ("with ZeRO 1 the fullest of 8,000 ranks that shard 300 layers is not planned: set parallel.zero=3")),
    (MOE | {"cluster.nodes": 100_000, "cluster.gpus": 6, "parallel.ep": 4, "parallel.cp": 4, "train.batch": 2_400_000},
        ("parallel.ep=4 x parallel.cp=4 does not align with nodes of 6: the links of 600,000 such ranks are not planned: "
         "set parallel.cp=1")),
    ({"cluster.device.memory": "auto"},
        "cluster.device.memory=auto: the memory of A100 is not known: set it in bytes"),
    ({"cluster.device.memory": 24.0},
        "cluster.device.memory=24 is 24 bytes: write it as 24e9 or 24GB"),
    ({"cluster.device.dispatch": None},
        ("cluster.device.dispatch=null: how long the host takes to issue one op is measured of CPUs only: "
         "set cluster.device.dispatch=6e-05")),
]
# fmt: on


def test_a_run_that_breaks_no_rule_has_no_problem_and_no_warning() -> None:
    plan = make_plan(BASE)
    assert (plan.ok, plan.fits, plan.problems, plan.warnings) == (True, True, (), ())


def test_a_bias_of_the_router_needs_two_experts_in_a_group() -> None:
    """model.router.groups=4 leave two of eight; one is refused above."""
    keys = MOE | {"model.router.groups": 4, "model.router.top_groups": 2, "model.router.bias": True}
    assert make_plan(with_changes(BASE, keys.items())).problems == ()


@pytest.mark.parametrize("rule", OF_RUN + OF_LAYOUT, ids=lambda rule: rule.__name__)
def test_every_rule_is_broken_by_a_run_of_the_table(rule: Any) -> None:
    runs = [with_changes(BASE, keys.items()) for keys, _ in BROKEN]
    assert any(list(rule(run, run.parallel, run.train.microbatch)) for run in runs)


@pytest.mark.parametrize(("keys", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_a_broken_rule_is_reported_with_its_fix(keys: Keys, says: str) -> None:
    plan = make_plan(with_changes(BASE, keys.items()))
    assert says in map(str, plan.problems)
    assert (plan.ok, plan.fits, plan.runnable, plan.memory, plan.traffic, plan.time) == (False, None, False, None, (), None)


@pytest.mark.parametrize(("keys", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_every_printed_fix_works_and_breaks_nothing(keys: Keys, says: str) -> None:
    run = with_changes(BASE, keys.items())
    before = make_plan(run).problems
    (problem,) = (each for each in before if str(each) == says)
    for change in problem.changes:
        after = {each.says for each in make_plan(fixed_run(run, change)).problems}
        assert problem.says not in after
        assert after <= {each.says for each in before}


def test_a_change_is_printed_as_it_is_listed() -> None:
    for keys, _ in BROKEN:
        for problem in make_plan(with_changes(BASE, keys.items())).problems:
            if problem.changes:
                assert problem.mend == "set " + " or ".join(map(" ".join, problem.changes))


def test_shared_and_padded_heads_are_both_reported() -> None:
    plan = make_plan(with_changes(BASE, [("parallel.tp", 8), ("model.kv_heads", 4)]))
    assert [str(each) for each in plan.warnings if each.rule != "export"] == [
        "model.heads=12 is padded to 16 so that tp 8 splits it: 25 % of attention's products are padding",
        "parallel.tp=8 is more than model.kv_heads=4: each is held by 2 ranks",
    ]


@pytest.mark.parametrize(
    ("keys", "classes"),
    [
        ({}, None),
        ({"model.window": 64}, "one would with model.window=null (gpt2)"),
        ({"model.positions": "rope", "model.window": 64}, "one would with model.positions=learned model.window=null (gpt2)"),
        (
            {"model.window": 64, "model.layer_types": ("sliding_attention", "full_attention")},
            "one would with model.window=null model.layer_types=null (gpt2)",
        ),
        ({"model.norm_place": "both", "model.window": 64, "model.qk_norm": True}, ""),
    ],
    ids=["gpt2", "one key", "two keys", "layers with a window", "three keys"],
)
def test_a_model_that_export_would_refuse_is_warned_of_with_what_would_do(keys: Keys, classes: str | None) -> None:
    """What would do does."""
    found = [each.mend for each in make_plan(with_changes(BASE, keys.items())).warnings if each.rule == "export"]
    assert found == ([] if classes is None else [classes])
    for mend in filter(None, found):
        words = mend.removeprefix("one would with ").partition(" (")[0].split()
        changed = dict(keys) | {key: None if value == "null" else value for key, _, value in (word.partition("=") for word in words)}
        plan = make_plan(with_changes(BASE, changed.items()))
        assert (plan.problems, [each for each in plan.warnings if each.rule == "export"]) == ((), [])


def test_a_mixture_is_no_gpt2() -> None:
    words = ["model=tiny_moe", "model.norm=layernorm", "model.positions=learned", "model.act=gelu_tanh", "model.kv_heads=null"]
    assert [each.mend for each in make_plan(load_recipe("quickstart", words)).warnings if each.rule == "export"] == [""]


def test_all_problems_are_reported_at_once() -> None:
    keys: Keys = {"model.kv_heads": 5, "train.batch": 250, "parallel.shard": 3, "optim.warmup": 100, "parallel.offload.optimizer": True}
    rules = [each.rule for each in make_plan(with_changes(BASE, keys.items())).problems]
    assert sorted(rules) == ["batch", "kv_heads", "offload", "shard", "warmup"]


def test_a_fix_is_shown_though_another_problem_stays() -> None:
    plan = make_plan(with_changes(BASE, [("train.batch", 240), ("optim.warmup", 100)]))
    assert {each.rule: each.changes[0] for each in plan.problems} == {"batch": ("train.microbatch=1",), "warmup": ("optim.warmup=10",)}


def test_a_change_that_would_break_another_rule_is_not_shown() -> None:
    """Stages of 12 layers are at most 12, and 6, a divisor that is near, does not divide 16 devices."""
    keys: Keys = {"parallel.pp": 16}
    assert [each.changes for each in make_plan(with_changes(BASE, keys.items())).problems] == [(("parallel.pp=4",),)]


def test_a_cpu_computes_in_every_precision_also_where_some_of_its_rates_are_known() -> None:
    """They are those that were measured."""
    for precision in ("fp32", "fp16"):
        plan = make_plan(load_recipe("quickstart", [f"train.precision={precision}", "cluster.device.peak={fp32: 1e11}"]))
        assert plan.ok
        assert plan.runnable
