"""The meaning of every config key for people: one sentence, its unit, and the meaning of null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "bytes", "bytes/s", "bytes/s per GPU", "FLOP/s", "seconds", "tokens", "sequences", "steps", "elements"]


@dataclass(frozen=True)
class Key:
    """What a key sets, in a short sentence; the unit of its value; the meaning of null, if null is allowed."""

    says: str
    unit: Unit = ""
    null: str = ""


# fmt: off
KEYS = {
    "name":                         Key("the run's name, and its folder below log.dir"),

    "model.family":                 Key("the kind of model: the table of ops that it is planned and built from"),
    "model.layers":                 Key("transformer layers"),
    "model.hidden":                 Key("width of the residual stream", "elements"),
    "model.heads":                  Key("attention heads"),
    "model.vocab":                  Key("entries of the vocabulary, before padding", "tokens"),
    "model.kv_heads":               Key("key and value heads; query heads share them in equal groups", null="as many as heads"),
    "model.head_dim":               Key("width of one attention head", "elements", null="hidden / heads"),
    "model.ffn":                    Key("width of the feed-forward layer", "elements", null="4 x hidden"),
    "model.context":                Key("rows of the learned position table", "tokens", null="train.seq"),
    "model.vocab_multiple":         Key("each rank's slice of the vocabulary is padded to a multiple of this", "tokens"),
    "model.tied":                   Key("the embedding and the output head are one weight"),
    "model.bias":                   Key("linear layers have a bias"),
    "model.qkv_bias":               Key("the query, key and value layers have a bias", null="as bias"),
    "model.norm":                   Key("the normalization layer"),
    "model.norm_eps":               Key("added to the variance (rmsnorm: the mean square) before its root is taken"),
    "model.act":                    Key("activation of the feed-forward layer; swiglu and geglu have a gate"),
    "model.positions":              Key("how attention knows positions; rope rotates queries and keys"),
    "model.rope_base":              Key("base of the wavelengths of rope"),
    "model.dropout":                Key("share of elements that dropout sets to zero"),
    "model.experts":                Key("experts of a layer, in family moe"),
    "model.top_k":                  Key("experts that each token is sent to"),
    "model.expert_ffn":             Key("width of one expert", "elements", null="as ffn"),
    "model.shared_experts":         Key("experts that every token is sent to besides"),
    "model.aux_loss":               Key("weight of the load-balancing loss of each sequence (arXiv:2101.03961 eq. 4)"),
    "model.capacity":               Key("an expert takes the first capacity x top_k x seq / experts tokens of a sequence", null="all"),
    "model.hf":                     Key("path of a Hugging Face config.json to read the sizes from", null="sizes are given here"),
    "model.parameters":             Key("family hf: the shape of every parameter; written by distrain", null="another family"),
    "model.weights":                Key("folder of Hugging Face weights that training begins from", null="random, from train.seed"),

    "cluster.nodes":                Key("machines"),
    "cluster.gpus":                 Key("GPUs of one node; on a CPU, processes"),
    "cluster.device.name":          Key("the device's name on pages"),
    "cluster.device.memory":        Key("memory that a program can use; auto: a CPU's share of this machine's", "bytes"),
    "cluster.device.bandwidth":     Key("memory bandwidth", "bytes/s", null="not known: plans have no times"),
    "cluster.device.peak":          Key("peak rate of dense matrix products, by precision", "FLOP/s"),
    "cluster.device.peak.fp32":     Key("peak rate in fp32", "FLOP/s"),
    "cluster.device.peak.tf32":     Key("peak rate in tf32; for reference, plans do not use it", "FLOP/s"),
    "cluster.device.peak.bf16":     Key("peak rate in bf16", "FLOP/s"),
    "cluster.device.peak.fp16":     Key("peak rate in fp16", "FLOP/s"),
    "cluster.device.peak.fp8":      Key("peak rate in fp8", "FLOP/s"),
    "cluster.device.peak.fp4":      Key("peak rate in fp4", "FLOP/s"),
    "cluster.device.kind":          Key("what computes"),
    "cluster.device.units":         Key("streaming multiprocessors, which a product's tiles fill in waves", null="waves are not counted"),
    "cluster.device.sustained":     Key("share of peak that a large matrix product keeps up for hours"),
    "cluster.device.flash":         Key("share of peak that fused attention reaches at head_dim 128"),
    "cluster.device.streaming":     Key("share of bandwidth that a kernel bound by memory reaches"),
    "cluster.device.launch":        Key("time that starting one kernel costs the device", "seconds"),
    "cluster.device.dispatch":      Key("time that the host takes to issue one op or message: Python, autograd, launch", "seconds"),
    "cluster.device.context":       Key("memory that the driver takes for one process", "bytes"),
    "cluster.inside":               Key("the link between devices of a node", null="measured on a CPU, else not known"),
    "cluster.inside.bandwidth":     Key("rate inside a node, in one direction", "bytes/s per GPU"),
    "cluster.inside.latency":       Key("time of one hop inside a node", "seconds"),
    "cluster.inside.efficiency":    Key("share of the bandwidth that data gets"),
    "cluster.between":              Key("the link between nodes", null="not known"),
    "cluster.between.bandwidth":    Key("rate between nodes, in one direction: the node's rate over its GPUs", "bytes/s per GPU"),
    "cluster.between.latency":      Key("time of one hop between nodes", "seconds"),
    "cluster.between.efficiency":   Key("share of the bandwidth that data gets"),
    "cluster.storage":              Key("rate at which all devices together write a checkpoint", "bytes/s", null="not known"),
    "cluster.mtbf":                 Key("mean time of one device between faults that end a run (arXiv:2407.21783 table 5)", "seconds"),

    "parallel.dp":                  Key("data parallel: replicas; auto: all ranks that the other axes leave"),
    "parallel.tp":                  Key("tensor parallel: ranks that share each layer"),
    "parallel.pp":                  Key("pipeline parallel: stages that share out the layers"),
    "parallel.cp":                  Key("context parallel: ranks that share each sequence"),
    "parallel.ep":                  Key("expert parallel: ranks that share out the experts; taken from dp, which ep divides"),
    "parallel.zero":                Key("ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too"),
    "parallel.shard":               Key("ranks over which ZeRO shards; all: every rank of the data axis"),
    "parallel.schedule":            Key("order of the pipeline's passes"),
    "parallel.chunks":              Key("groups of layers on a stage, for interleaved schedules"),
    "parallel.sequence":            Key("sequence parallel: tp ranks share the tokens of what is not split by tp"),
    "parallel.recompute":           Key("what backward computes again: selective the core of attention, full each layer"),
    "parallel.reduce":              Key("how gradients are summed over the data axis"),
    "parallel.bucket":              Key("size of one message of the data axis", "elements"),
    "parallel.scatter":             Key("a stage sends 1/tp of the residual stream (arXiv:2104.04473 section 4.1)"),
    "parallel.offload.optimizer":   Key("the optimizer's state is in the host's memory"),
    "parallel.offload.parameters":  Key("weights are in the host's memory"),
    "parallel.overlap.data":        Key("gradients, and weights that ZeRO-3 gathers, travel while the device computes"),
    "parallel.overlap.tensor":      Key("tensor-parallel messages travel during neighbouring matrix products"),
    "parallel.overlap.pipeline":    Key("activations travel between stages during the next micro-batch"),
    "parallel.overlap.context":     Key("the next keys and values travel during attention"),

    "train.batch":                  Key("the global batch: what a step trains, over all replicas", "sequences"),
    "train.seq":                    Key("length of a sequence", "tokens"),
    "train.microbatch":             Key("what a replica computes at once; gradients accumulate over the rest of its batch", "sequences"),
    "train.steps":                  Key("length of the run", "steps", null="as train.tokens says"),
    "train.tokens":                 Key("length of the run, rounded up to whole steps", "tokens", null="as train.steps says"),
    "train.precision":              Key("what the model computes in"),
    "train.gradients":              Key("what gradients are accumulated in; auto: as precision"),
    "train.attention":              Key("flash: a fused attention kernel; math: separate kernels"),
    "train.flops":                  Key("what MFU counts: parameters 6 FLOP for each and token, attention its products too"),
    "train.compile":                Key("torch.compile the model"),
    "train.seed":                   Key("seed of the weights, the order of the data and dropout"),
    "train.clip":                   Key("global gradient norm at which gradients are clipped; 0: not"),
    "train.skip":                   Key("steps in a row that may be skipped because a loss or gradient is not finite", "steps"),
    "train.evaluate.every":         Key("interval between validations, the last at the end; 0: never", "steps"),
    "train.evaluate.batches":       Key("global batches of one validation"),

    "optim.name":                   Key("the optimizer"),
    "optim.lr":                     Key("the peak learning rate"),
    "optim.betas":                  Key("adamw: decay of the first and second moments"),
    "optim.eps":                    Key("adamw: added to the root of the second moment"),
    "optim.weight_decay":           Key("weight decay, on matrices only: not on norms and biases"),
    "optim.momentum":               Key("sgd: momentum"),
    "optim.schedule":               Key("how the rate falls from lr to min_lr after the warmup"),
    "optim.warmup":                 Key("length of the linear rise to lr", "steps"),
    "optim.min_lr":                 Key("the learning rate at the end of the schedule"),
    "optim.gradient_copy":          Key("the optimizer makes a second, fp32 copy of the gradients, as Megatron's in fp16"),

    "data.name":                    Key("where tokens come from"),
    "data.path":                    Key("files, folders or patterns, for text and tokens", null="to be given for text and tokens"),
    "data.weights":                 Key("share of the samples for each path", null="all paths are one text"),
    "data.tokenizer":               Key("bytes, or the path of a Hugging Face tokenizer.json"),
    "data.end":                     Key("token id that ends a document", null="0 of bytes, a tokenizer's own; none in files of tokens"),
    "data.text_key":                Key("key of the text in a line of .jsonl"),
    "data.documents":               Key("attention and loss stay inside documents"),
    "data.validation":              Key("share of the tokens that is held out for validation"),
    "data.cache":                   Key("folder that keeps tokenized text", null="distrain in the user's cache folder"),

    "log.every":                    Key("interval between logged steps", "steps"),
    "log.sinks":                    Key("where logged steps go; metrics.jsonl is always written"),
    "log.dir":                      Key("folder of the run folders"),
    "log.profile":                  Key("first and last step to profile into the run folder's trace/", "steps", null="no profile"),
    "log.ledger":                   Key("count every message of one step beside the plan's, into ledger.json"),

    "checkpoint.every":             Key("interval between checkpoints; 0: at the end only", "steps"),
    "checkpoint.keep":              Key("newest checkpoints that are kept"),
    "checkpoint.resume":            Key("auto resumes where there is a checkpoint; must fails without one; never starts anew"),
    "checkpoint.accept":            Key("keys of data and optim that may have changed since the checkpoint"),

    "launch.name":                  Key("what starts the ranks; torchrun and slurm are for `show --launch`"),
    "launch.hostfile":              Key("file of hosts, a line each: host1 slots=8", null="in a Slurm job, its nodes"),
    "launch.include":               Key("hosts and slots to use: host1@host2:0,2", null="all"),
    "launch.exclude":               Key("hosts and slots not to use, written as include", null="none"),
    "launch.runner":                Key("what DeepSpeed's launcher reaches the hosts with"),
    "launch.address":               Key("address of the first host, where ranks meet", null="as ssh reaches it"),
    "launch.port":                  Key("port where ranks meet", null="a free one, or one that the run folder's name gives"),
    "launch.environment":           Key("names of further variables that are passed to ranks on other hosts"),
    "launch.restarts":              Key("times that a run restarts from its newest checkpoint after a machine's fault"),
    "launch.patience":              Key("least time without progress after which a step counts as hung; all else: ten times it", "seconds"),
    "launch.preflight":             Key("check every host before anything starts"),

    "engine":                       Key("what trains; auto: zero, or pipe where there is a pipeline"),
    "reading":                      Key("how cluster=6x8x64 was read; written by distrain", null="no size was given"),
}
# fmt: on
