"""Op tables: a model as a table of ops over logical dims, from which it is planned and its parameters are named and shaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ...spec.run import Model, Train

Dims = tuple[str, ...]  # names of logical dims: hidden ffn heads vocab seq experts batch ...


@dataclass(frozen=True)
class Tensor:
    """A tensor by its logical dims; `width` is bytes per element, None: an activation's."""

    dims: Dims
    width: int | None = None


@dataclass(frozen=True)
class Weight:
    """A parameter by its name inside its block, and its logical dims; a `frozen` one is not trained, a `flat` one is a vector, or with
    `rows` a matrix whose rows are its first dims, and a `lent` one is another block's."""

    name: str
    dims: Dims
    frozen: bool = False
    flat: bool = False
    rows: int = 0
    lent: bool = False


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its logical name (`layers.3.attention.query.weight`) and, for each dim of its tensor, the
    logical dims that are flattened into it. A matrix has its inner dims as rows and its outer dims as columns. A `frozen` one is not
    trained. `hidden_matrix`: it is a matrix of a layer, or one for each expert, which Muon steps (`is_hidden_matrix`)."""

    name: str
    dims: tuple[Dims, ...]
    frozen: bool = False
    hidden_matrix: bool = False

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(element_count(dims, sizes) for dims in self.dims)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product y[rows, outer] = x[rows, inner] w[inner, outer], once for each of `groups`.

    `outers` are products of one input that are computed as one. `computed` is the share that a kernel computes (a causal flash
    kernel: half), `counted` the share that counts as the model's FLOPs (less than 1 with a window, or inside documents). `backward` is the
    cost of backward in forwards (two products; flash attention computes the scores again). `in_float32`: our modules compute it in float32.
    `moved_apart`: what it reads and writes on a GPU is counted in `own_kernels` of another op.
    """

    rows: Dims
    inner: Dims
    outers: tuple[Dims, ...]
    groups: Dims = ()
    computed: float = 1.0
    counted: float = 1.0
    backward: float = 2.0
    span: float = 1.0  # share of the keys that a query's document has, on average
    documents: float = 0.0  # of a sequence, which a CPU computes one by one; 0: all at once
    fused: bool = False  # one kernel that does not write its intermediate results to memory: flash attention
    in_float32: bool = False
    moved_apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Op:
    """One row of an op table: the op's weights, computation, memory traffic, saved activations and messages.

    - `moves`: the tensors that one fused, memory-bound kernel reads and writes in forward. `eager_passes`: how many times as much is
      moved where each torch operator is a kernel of its own. `kernels`: how many kernels there are. `own_kernels`: what the kernels that
      our modules have for it on a GPU read and write, forward and backward; `own_passes`: as eager_passes, of our modules on a GPU;
      `cpu_passes`: as eager_passes, of an op that computes longer on a CPU than it moves.
    - `saves_megatron`: the activations that Megatron saves for backward. `saves_torch`: those that our torch modules save (on a CPU, not
      compiled), where the family states them; a storage that two ops save is listed once. `logits`: of the size of the logits.
    - `partial`: weights that every tensor-parallel rank holds whole, with the gradient of its own heads; each micro-batch adds these up,
      unless parallel.sequence sums the gradients of all such weights once a step.
    - `constants`: what the op reads in float32 beside weights, and nothing trains: every rank holds its layers' whole.
    - `gathers`: the tensors that each rank of the context axis needs of the whole sequence. `head_exchanges`: those that its ranks
      exchange in an all-to-all, as a rank has them with all tokens of some heads. `saves_exchanged`: what the op saves besides then.
    - `saves_padded`: what it saves besides on a tensor rank some of whose heads are padding, which a copy of the values leaves out.
    - `holds`: what its backward holds while it runs, where that is more than its result's and its inputs' gradients.
    - `sums_again`: its input is a sum of what is saved in any case: compiled layers save none, and add it up again.
    - `chunks`: the parts of the vocabulary in which head and loss are computed, one after another; more than one: backward computes each
      part's logits again, and takes all gradients of it.
    - `shares_input`: the product of another op holds the same input while the gradients of both weights wait.
    - `core`: selective recomputation runs it again (arXiv:2205.05198 section 5).
    - `in_fp8`: our modules compute its product in 8-bit floats.
    - `in_fours`: Megatron-LM's fused softmax takes four of these at a time; where they are no multiple of four, its parts are kernels of
      their own (megatron/model/fused_softmax.py, `is_kernel_available`).
    - `reduces`: (dim, result): the ranks that split the dim add up the result. `sums`: what tensor-parallel ranks add up in forward, and
      the gradients of which they add up in backward, each in one message. `enters`: the tensors that tensor-parallel ranks need
      whole, besides the inputs of column layers. `exchanges`: the tensors that travel between the ranks of the experts.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    product: Product | None = None
    moves: tuple[Tensor, ...] = ()
    saves_megatron: tuple[Tensor, ...] = ()
    saves_torch: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()
    reduces: tuple[tuple[str, Tensor], ...] = ()
    sums: tuple[Tensor, ...] = ()
    enters: tuple[Tensor, ...] = ()
    exchanges: tuple[Tensor, ...] = ()
    partial: tuple[Tensor, ...] = ()
    constants: tuple[Weight, ...] = ()
    gathers: tuple[Tensor, ...] = ()
    head_exchanges: tuple[Tensor, ...] = ()
    saves_exchanged: tuple[Tensor, ...] = ()
    saves_padded: tuple[Tensor, ...] = ()
    holds: tuple[Tensor, ...] = ()
    sums_again: bool = False
    chunks: int = 1
    shares_input: bool = False
    core: bool = False
    in_fp8: bool = False
    in_fours: Dims = ()
    kernels: int = 1
    eager_passes: float = 1.0
    own_kernels: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    own_passes: float | None = None
    cpu_passes: float | None = None


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """A model as blocks of ops: those before the layers, those of one layer, and those after the layers.

    The first `dense_layers` layers are `dense_layer`: their feed-forward is not a mixture of experts. Behind the head come `modules` that
    predict further tokens: each is the ops `join`, a layer, and the ops `further`.
    """

    sizes: Mapping[str, int]
    embedding: tuple[Op, ...]
    layer: tuple[Op, ...]
    head: tuple[Op, ...]
    tied: bool  # `head.weight` is the embedding's `embedding.weight`
    dense_layer: tuple[Op, ...] = ()
    dense_layers: int = 0
    modules: int = 0
    join: tuple[Op, ...] = ()
    further: tuple[Op, ...] = ()
    has_costs: bool = True  # False: only the weights are stated, in one block; computation and activations are unknown
    largest_layer: int | None = None  # elements of the largest layer or other module, where all weights are stated in one block

    @property
    def shares_embedding(self) -> bool:
        """Whether a part of the model that has the head, but not the embedding, has a copy of the embedding's weight."""
        return self.tied or self.modules > 0

    def blocks(self, layers: int) -> Iterator[tuple[int, tuple[Op, ...]]]:
        """Yield (number of such blocks, ops) for each kind of block in a model of so many layers."""
        yield 1, self.embedding
        yield self.dense_layers, self.dense_layer
        yield layers - self.dense_layers + self.modules, self.layer
        yield 1, self.head
        if self.modules:
            yield self.modules, self.join
            yield self.modules, self.further

    def layer_ops(self, index: int) -> tuple[Op, ...]:
        """Return the ops of layer number `index`."""
        return self.dense_layer if index < self.dense_layers else self.layer

    def replace_ops(self, change: Callable[[Op], Iterable[Op]], *, ends: Callable[[Op], Op] | None = None) -> OpTable:
        """Return the table with other ops in place of each op of a layer, and of each op of the embedding and the head."""
        layer, dense_layer = (tuple(each for op in ops for each in change(op)) for ops in (self.layer, self.dense_layer))
        embedding, head = (tuple(map(ends, ops)) if ends else ops for ops in (self.embedding, self.head))
        return replace(self, layer=layer, dense_layer=dense_layer, embedding=embedding, head=head)


def logical_sizes(model: Model, train: Train) -> dict[str, int]:
    """Return the elements along each logical dim, for one micro-batch of one data-parallel replica."""
    head_dim = model.head_dim or model.hidden // model.heads
    ffn = model.ffn or 4 * model.hidden
    expert_ffn = model.expert_ffn or ffn
    return {
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": head_dim,
        "rotary_dim": model.rotary_dim,
        "ffn": ffn,
        "vocab": model.vocab,
        "context": model.context or train.seq,
        "seq": train.seq,
        "tokens": train.seq,  # the sequence of a tensor that sequence parallelism never splits
        "keys": train.seq,  # the sequence of a tensor that no axis splits
        "core_tokens": train.seq,  # in attention's core, where ranks exchange tokens for heads: whole, the heads split by their axis too
        "core_heads": model.heads,
        "core_kv_heads": model.kv_heads or model.heads,
        "batch": train.microbatch,
        "experts": model.experts,
        "choices": model.experts,  # the experts of a tensor that expert parallelism does not split
        "top_k": model.top_k,
        "ep_load": 1,  # of all ranks of experts together; one has so many times an even share of the copies (parallel.ep_load)
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * model.shared_experts,
        "types": 2,
        "one": 1,
        "window": model.window or 0,
        **window_sizes(model, train.seq),
        "lora": model.lora.rank,
    }


def window_sizes(model: Model, seq: int) -> dict[str, int]:
    """Return, on average over layers, the tokens of layers with a window that does not cover the sequence and those of the others, and the
    keys of the former's blocks that have a mask: all but the first, each of which sees two blocks of keys
    (trainer/layers/transformer/core_attention.py)."""
    window, layers = model.effective_window(seq) or 0, model.windowed_layers
    if not window:
        return {"windowed_tokens": 0, "unwindowed_tokens": seq, "masked_keys": 0}
    masked = sum(min(begin + window, seq) - (begin - window) for begin in range(window, seq, window))
    windowed = round(seq * layers / model.layers)
    return {"windowed_tokens": windowed, "unwindowed_tokens": seq - windowed, "masked_keys": round(masked * layers / model.layers)}


def element_count(dims: Dims, sizes: Mapping[str, int]) -> int:
    """Return the number of elements of a tensor with these logical dims."""
    return prod(sizes[dim] for dim in dims)


def parameter_count(table: OpTable, layers: int, *, active: bool = False, trained: bool = False) -> int:
    """Return the number of parameters of the whole model; active: of those that one token uses (top_k of the experts); trained: of those
    that are not frozen."""
    sizes = table.sizes
    total = 0
    for blocks, ops in table.blocks(layers):
        for weight in block_weights(ops):
            if (table.tied and weight.name == "head.weight") or (trained and weight.frozen):
                continue
            elements = element_count(weight.dims, sizes)
            if active and "experts" in weight.dims:
                elements = elements * sizes["top_k"] // sizes["experts"]
            total += blocks * elements
    return total


def block_weights(ops: tuple[Op, ...]) -> Iterator[Weight]:
    """Yield every weight of a block that is its own."""
    for op in ops:
        yield from (weight for weight in op.weights if not weight.lent)


def model_parameters(table: OpTable, layers: range, *, first: bool = True, last: bool = True) -> Iterator[Parameter]:
    """Yield every parameter of a model, or of a part with these layers; `first`: with the embedding, `last`: with the head.

    A tied head has no parameter of its own. A part without the embedding has one with the embedding's name, if its head is tied or has
    modules behind it.
    """
    blocks = [(f"layers.{index}.", table.layer_ops(index)) for index in layers]
    if last and table.modules and not (table.tied or first):
        blocks.append(("", _ops_of_embedding(table)))
    blocks += [("", table.head), *_module_blocks(table)] * last
    for prefix, ops in (("", table.embedding),) * first + tuple(blocks):
        for op in ops:
            for weight in op.weights:
                if weight.lent:
                    continue
                if not (table.tied and weight.name == "head.weight"):
                    is_matrix = prefix.startswith("layers.") and is_hidden_matrix(op, weight)
                    yield Parameter(prefix + weight.name, _flattened_dims(op, weight), weight.frozen, is_matrix)
                elif not first:
                    yield Parameter("embedding.weight", (("vocab",), ("hidden",)), weight.frozen)


def _ops_of_embedding(table: OpTable) -> tuple[Op, ...]:
    """The embedding's op with the table of tokens alone."""
    (op,) = (each for each in table.embedding if any(weight.name == "embedding.weight" for weight in each.weights))
    return (replace(op, weights=tuple(weight for weight in op.weights if weight.name == "embedding.weight")),)


def _module_blocks(table: OpTable) -> list[tuple[str, tuple[Op, ...]]]:
    """The blocks of the modules behind the head, with the prefixes of their weights' names."""
    return [
        (prefix, ops)
        for index in range(table.modules)
        for prefix, ops in ((f"mtp.{index}.", table.join), (f"mtp.{index}.layer.", table.layer), (f"mtp.{index}.", table.further))
    ]


def model_constants(table: OpTable, layers: range, *, last: bool = True) -> Iterator[Parameter]:
    """Yield every constant of these layers of a model, and with `last` of the modules behind its head."""
    blocks = [(f"layers.{index}.", table.layer_ops(index)) for index in layers] + _module_blocks(table) * last
    for prefix, ops in blocks:
        for weight in (each for op in ops for each in op.constants):
            yield Parameter(f"{prefix}{weight.name}", tuple((dim,) for dim in weight.dims), weight.frozen)


def _flattened_dims(op: Op, weight: Weight) -> tuple[Dims, ...]:
    """Return the logical dims of each dim of a weight's tensor: a product's weight is one matrix for each of its groups, its bias one
    vector; the dims of any other weight are not flattened, unless it is flat."""
    if op.product is None:
        rows = (weight.dims[: weight.rows],) if weight.rows else ()
        return (*rows, weight.dims[weight.rows :]) if weight.flat else tuple((dim,) for dim in weight.dims)
    groups, inner = op.product.groups, op.product.inner
    outer = weight.dims[len(groups) :]
    matrix = () if weight.name.endswith(".bias") else (inner,)
    return (*((dim,) for dim in groups), *matrix, outer[len(inner) if matrix else 0 :])


def is_hidden_matrix(op: Op, weight: Weight) -> bool:
    """Return whether Muon steps a layer's weight: that of a product, which is attention's or a feed-forward's, shared experts' and each
    expert's too, but no router's and no gate's of one column. Embedding, head, norms and biases are stepped by AdamW (https://kellerjordan.github.io/posts/muon/)."""
    return op.product is not None and not weight.name.endswith(".bias") and not {"choices", "one"} & set(weight.dims)


def is_frozen(op: Op) -> bool:
    """Return whether an op has weights and none of them is trained: its backward computes the gradients of its input alone."""
    return bool(op.weights) and all(weight.frozen for weight in op.weights)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def forward_flops(op: Op, sizes: Mapping[str, int]) -> int:
    """Return the FLOPs of an op's forward pass: 2 x rows x inner x outer; attention is counted in full, not halved by its causal mask."""
    product = op.product
    if product is None:
        return 0
    outer = sum(element_count(dims, sizes) for dims in product.outers)
    groups = element_count(tuple(dim for dim in product.groups if dim != "experts"), sizes)  # experts share the rows
    whole = 2 * element_count(product.rows + product.inner, sizes) * outer * groups
    return whole if product.counted == 1 else round(whole * product.counted)
