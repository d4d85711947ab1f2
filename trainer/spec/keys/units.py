"""The unit of each key, and text for GiB and percent in sentences."""

from __future__ import annotations

from fnmatch import fnmatchcase

BYTES, RATE, LINK, FLOPS, SECONDS = "bytes", "bytes/s", "bytes/s per GPU and direction", "FLOP/s", "seconds"

# The unit of a key, by the first pattern that matches. A key that matches none is text, a share or a number without unit.
# fmt: off
UNITS: dict[str, str] = {
    "cluster.device.memory":    BYTES,
    "cluster.device.context":   BYTES,
    "cluster.device.bandwidth": RATE,
    "cluster.host.memory":      BYTES,
    "cluster.host.bandwidth":   RATE,
    "cluster.host.link":        LINK,
    "cluster.storage":          "bytes/s of all devices together",
    "cluster.*.bandwidth":      LINK,
    "cluster.device.peak.*":    FLOPS,
    "cluster.device.peak":      FLOPS,
    "cluster.device.launch":    SECONDS,
    "cluster.device.dispatch":  SECONDS,
    "cluster.*.latency":        SECONDS,
    "cluster.price":            "per device and hour",
    "cluster.mtbf":             "seconds of one device between faults",
    "launch.patience":          SECONDS,
    "cluster.nodes":            "nodes",
    "cluster.gpus":             "GPUs of a node",
    "cluster.device.units":     "multiprocessors",
    "cluster.device.sustained": "share of peak",
    "cluster.device.flash":     "share of peak",
    "cluster.device.streaming": "share of bandwidth",
    "cluster.*.efficiency":     "share of bandwidth",
    "model.layers":             "layers",
    "model.full_attention_interval": "layers",
    "model.linear_conv_kernel_dim": "tokens",
    "model.context":            "tokens",
    "model.window":             "tokens",
    "model.rope.original_max_position_embeddings": "tokens",
    "model.capacity":           "times top_k x seq / experts tokens",
    "model.rope_share":         "share of a head",
    "model.dropout":            "probability",
    "model.lora.dropout":       "probability",
    "parallel.bucket":          "elements",
    "parallel.shard":           "ranks",
    "parallel.ep_load":         "times an even share",
    "parallel.staleness":       "steps",
    "parallel.sync.every":      "steps",
    "parallel.chunks":          "groups of layers",
    "parallel.stages":          "layers",
    "parallel.?p":              "ranks",
    "train.batch":              "sequences a step, of all GPUs together",
    "train.microbatch":         "sequences",
    "train.rampup.batch":       "sequences a step, of all GPUs together",
    "train.rampup.until":       "tokens",
    "train.rampup.by":          "sequences",
    "train.seq":                "tokens",
    "train.steps":              "steps",
    "train.tokens":             "tokens",
    "train.loss_chunks":        "chunks",
    "train.skip":               "steps in a row",
    "train.clip":               "norm of all gradients",
    "train.evaluate.every":     "steps",
    "train.evaluate.batches":   "batches",
    "optim.warmup":             "steps",
    "data.end":                 "token id",
    "data.document_tokens":     "tokens of a document, or of several",
    "data.validation":          "share of the tokens",
    "log.every":                "steps",
    "log.profile":              "steps, first and last",
    "log.timeline":             "steps, first and last",
    "checkpoint.every":         "steps",
    "checkpoint.keep":          "checkpoints",
    "launch.restarts":          "times",
    "launch.spares":            "hosts",
    "launch.device_check":      "steps",
    "search.rows":              "meshes",
    "search.headroom":          "share of the memory",
    "search.within":            "days",
}
# fmt: on


def unit_of(key: str) -> str:
    """Return the unit of a key; "" if it has none."""
    return next((unit for pattern, unit in UNITS.items() if fnmatchcase(key, pattern)), "")


def gib_text(size: float) -> str:
    """Return bytes in GiB with one decimal; more for small ones, so that nothing reads as 0.0."""
    amount = size / 2**30
    return f"{amount:,.1f}" if amount >= 1 or amount == 0 else f"{amount:.3g}"


def percent_text(share: float) -> str:
    """Return a share as a whole percentage."""
    return f"{100 * share:.0f} %"
