"""Ops that families share: attention, feed-forward, norms, embedding and head, with the activations that each saves.

`saves_megatron` follows Korthikanti et al. 2022 (arXiv:2205.05198 section 4.1): one GPT layer saves s b h (34 + 5 a s / h) bytes, at 2
bytes per element and 1 per element of a mask. `saves_torch` is what trainer/layers/ saves. Without dropout the first is
s b h (32 + 2 a s / h); the second is 8 s b more, for the norms' means and deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...spec.derived.document_kernel import has_whole_windows
from ...spec.run import Model, Run, Train
from .op_table import Dims, Op, OpTable, Product, Tensor, Weight, logical_sizes

TOKENS: Dims = ("seq", "batch")
STREAM = Tensor((*TOKENS, "hidden"))  # the residual stream
MASK = Tensor((*TOKENS, "hidden"), 1)
LOG_SUMS = Tensor(("batch", "heads", "seq"), 4)  # of each row of attention's scores the log-sum-exp, in float32
QUERY: Dims = ("heads", "head_dim")
KEY: Dims = ("kv_heads", "head_dim")
# On a CPU, GELU by tanh takes 4.8 times as long as moving its tensors. Measured with torch 2.13 on a core of a Xeon with AVX-512, among a
# layer's other kernels: 8.7 ns an element, forward and backward; its 20 bytes in float32 are moved in 1.8 ns.
TANH_PASSES = 4.8
CLAMPED_PASSES = 5.0  # counted: each operator of the clamped gate is a kernel, 7 forward
OWN_1P_PASSES = 10.0  # in bf16: 40 bytes an element for the 4 of one kernel
SCORES: Dims = ("batch", "heads", "seq", "keys")


def norm(name: str, model: Model) -> Op:
    """LayerNorm or RMSNorm of the residual stream; saves its input, 2sbh. Our modules also save a mean and a deviation per token."""
    scale = (Weight(f"{name}.weight", ("hidden",)),)
    shift = (Weight(f"{name}.bias", ("hidden",)),) if model.norm == "layernorm" else ()
    # torch's LayerNorm is one kernel, in float32 under autocast; its RMSNorm is a cast, a square, a mean and two products.
    # Those of our modules are measured on an H200; those of a scale 1 + weight are counted, which our modules compute kernel by kernel.
    passes, own_passes = {"layernorm": (2.0, 2.6), "rmsnorm": (4.0, 2.0), "rmsnorm1p": (4.0, OWN_1P_PASSES)}[model.norm]
    per_token = (Tensor(TOKENS), Tensor(TOKENS)) if model.norm == "layernorm" else (Tensor(TOKENS, 4),)
    return Op(
        name=name,
        weights=scale + shift,
        moves=(STREAM, STREAM),
        saves_megatron=(STREAM,),
        saves_torch=(STREAM, *per_token),
        eager_passes=passes,
        own_passes=own_passes,
    )


def linear(
    name: str,
    inner: Dims,
    outers: tuple[tuple[str, Dims], ...],
    *,
    bias: bool,
    saves: tuple[Tensor, ...] = (),
    rows: Dims = TOKENS,
    groups: Dims = (),
) -> Op:
    """A matrix product with weights; `outers` are (suffix of the weight's name, dims of its output), all of one input."""
    weights = tuple(Weight(f"{name}{part}.weight", (*groups, *inner, *outer)) for part, outer in outers)
    biases = tuple(Weight(f"{name}{part}.bias", (*groups, *outer)) for part, outer in outers) if bias else ()
    product = Product(rows=rows, inner=inner, outers=tuple(outer for _, outer in outers), groups=groups)
    return Op(name=name, weights=weights + biases, product=product, saves_megatron=saves, saves_torch=saves)


def attention(model: Model, train: Train, *, causal: bool = True) -> tuple[Op, ...]:
    """The query, key and value products, the core of attention, and the output product: saves 11sbh + 5as2b."""
    query, key, value = Tensor(TOKENS + QUERY), Tensor(TOKENS + KEY), Tensor(TOKENS + KEY)
    bias = model.bias if model.qkv_bias is None else model.qkv_bias
    parts = ((".query", QUERY), (".key", KEY), (".value", KEY))
    share, copies = model.rope_share, model.rope_share < 1  # where a part is turned, all is copied once; own_passes: float32, on an H200
    turn = Op(name="attention.rope", moves=(query, query, key, key), eager_passes=4 * share + copies, own_passes=16 * share + copies)
    return (
        replace(linear("attention", ("hidden",), parts, bias=bias, saves=(STREAM, query, key, value)), gathers=(key, value)),
        *(_query_and_key_norms(model) if model.qk_norm else ()),
        *((turn,) if model.positions == "rope" else ()),
        *attention_core(model, train, causal=causal),
        *((_sinks(model, train),) if model.sinks else ()),
        linear("attention.out", QUERY, (("", ("hidden",)),), bias=model.bias, saves=(query,)),
    )


def _sinks(model: Model, train: Train) -> Op:
    """One logit for each head beside the scores (arXiv:2508.10925 section 2.2): the fused kernel's values are scaled by what it leaves of
    their shares, else the shares are. Saves nothing but what the core saves."""
    scaled = Tensor(TOKENS + QUERY) if has_fused_core(model, train) else Tensor(SCORES)
    return Op(name="attention.sinks", weights=(Weight("attention.sinks", ("heads",)),), moves=(scaled, scaled), core=True, kernels=4)


def _query_and_key_norms(model: Model) -> tuple[Op, ...]:
    if model.qk_norm_over == "head":
        return tuple(head_norm(f"attention.{part}_norm", head, model) for part, head in (("query", QUERY), ("key", KEY)))
    return (norm_of_all_heads(),)


def norm_of_all_heads() -> Op:
    """RMSNorms of the queries and of the keys of all heads together; each saves its input and one float32 a token (arXiv:2501.00656 section
    2). Tensor-parallel ranks add up both sums of squares in one message, and what each makes of their gradient."""
    query, key = Tensor(TOKENS + QUERY), Tensor(TOKENS + KEY)
    return Op(
        name="attention.qk_norm",
        weights=(Weight("attention.query_norm.weight", QUERY, flat=True), Weight("attention.key_norm.weight", KEY, flat=True)),
        moves=(query, query, key, key),
        saves_megatron=(query, key),
        saves_torch=(query, key, Tensor(("tokens", "batch"), 8)),
        sums=(Tensor(("tokens", "batch"), 8),),
        kernels=2,
        eager_passes=4.0,
    )


def head_norm(name: str, head: Dims, model: Model) -> Op:
    """RMSNorm of each head, with one scale for all heads; saves its input and one float32 a head and token (arXiv:2505.09388 section 2)."""
    tensor, scale = Tensor(TOKENS + head), Weight(f"{name}.weight", ("head_dim",))
    return Op(
        name=name,
        weights=(scale,),
        moves=(tensor, tensor),
        saves_megatron=(tensor,),
        saves_torch=(tensor, Tensor((*TOKENS, head[0]), 4)),
        partial=(Tensor(scale.dims),),
        eager_passes=4.0,
        own_passes=OWN_1P_PASSES if model.norm == "rmsnorm1p" else None,
    )


def attention_core(
    model: Model, train: Train, *, causal: bool = True, query_dim: str = "head_dim", mean_dim: str = "head_dim"
) -> tuple[Op, ...]:
    """The core of attention, whose values have `head_dim`; `mean_dim`: the mean of a query's dim and a value's."""
    return _flash_core(model, train, causal, mean_dim) if train.attention == "flash" else _math_core(model, train, query_dim)


def _flash_core(model: Model, train: Train, causal: bool, mean_dim: str) -> tuple[Op, ...]:
    """FlashAttention-2 (arXiv:2307.08691): saves a float32 log-sum-exp; backward costs 2.5 forwards.

    Its dropout can't be keyed: with dropout our modules take the path of separate kernels, and save what that saves. A layer with a
    window saves the values of its blocks besides: every layer is counted with their average. With sinks it saves those of the output
    product alone.
    """
    share, window, seq = windowed_share(model, train.seq), model.window or 0, train.seq
    blocks, rest = divmod(seq, window) if share else (0, 0)
    in_blocks = (0.5 + 2 * (blocks - 1)) * window**2 + rest * (window + rest)  # pairs of query and key: the first block is causal
    product = Product(
        rows=("seq",),
        inner=(mean_dim,),
        outers=(("keys",), ("keys",)),
        groups=("batch", "heads"),
        computed=(0.5 if causal else 1.0) * (1 - share) + share * in_blocks / seq**2,
        counted=_counted_pairs(model, train.seq),
        backward=2.5,
        fused=True,
    )
    in_blocks_saves = (Tensor(("windowed_tokens", "batch", *QUERY)),) if share and not model.sinks else ()
    torch_saves = _softmax_saves(model) if model.dropout else (LOG_SUMS, *in_blocks_saves)
    has_values = not model.dropout and (not share or model.sinks)  # the kernel's own, beside those that the output product saves
    padded = (Tensor((*TOKENS, *QUERY)),) if has_values else ()
    core = Op(name="attention.core", product=product, saves_megatron=(LOG_SUMS,), saves_torch=torch_saves, saves_padded=padded, core=True)
    return (core,)


def has_fused_core(model: Model, train: Train) -> bool:
    """Whether our modules compute attention by a fused kernel."""
    return train.attention == "flash" and not model.dropout


def fused_core_result(run: Run) -> Tensor:
    """Return what fused cores of attention return, on average over layers, less a window's blocks, which are saved apart."""
    is_whole = has_whole_windows(run) or not run.model.effective_window(run.train.seq)
    return Tensor((*(TOKENS if is_whole else ("unwindowed_tokens", "batch")), *QUERY))


def _softmax_saves(model: Model) -> tuple[Tensor, ...]:
    """The saved activations of attention with its scores in memory: softmax's result; with dropout also the mask and dropout's result."""
    scores, mask = Tensor(SCORES), Tensor(SCORES, 1)
    return (scores, mask, scores) if model.dropout else (scores,)


def windowed_share(model: Model, seq: int) -> float:
    """Return the share of the layers that have a window which does not cover the sequence."""
    return model.windowed_layers / model.layers if model.effective_window(seq) else 0.0


def _counted_pairs(model: Model, seq: int) -> float:
    """Return the pairs of query and key that count, as a share of seq x seq on average over layers: twice those that are seen."""
    share, window = windowed_share(model, seq), model.window or 0
    return 1 - share + share * window * (2 * seq - window) / seq**2 if share else 1.0


def _math_core(model: Model, train: Train, query_dim: str) -> tuple[Op, ...]:
    """Scores, softmax, dropout and values as separate kernels: saves 2as2b, and 3as2b more with dropout."""
    scores, *dropped = saves = _softmax_saves(model)
    heads: Dims = ("batch", "heads")
    counted = _counted_pairs(model, train.seq)

    def product(inner: Dims, outer: Dims) -> Product:
        return Product(rows=("seq",), inner=inner, outers=(outer,), groups=heads, counted=counted)

    return (
        Op(name="attention.scores", product=product((query_dim,), ("keys",)), core=True),
        Op(
            name="attention.softmax",
            moves=(scores, scores, *((scores, *dropped) if dropped else ())),
            saves_megatron=saves,
            saves_torch=saves,
            core=True,
            in_fours=heads,
            kernels=2 if dropped else 1,
            eager_passes=2.0,  # scaling and masking are kernels of their own
        ),
        Op(name="attention.values", product=product(("keys",), ("head_dim",)), core=True),
    )


def residual(name: str, model: Model) -> Op:
    """Dropout, and the sum with the residual stream; saves a mask, sbh, with dropout."""
    masks = (MASK,) if model.dropout else ()
    passes = 1.5 if masks else 1.0
    return Op(name=name, moves=(STREAM, STREAM, STREAM, *masks), saves_megatron=masks, saves_torch=masks, eager_passes=passes)


def feed_forward(model: Model, *, name: str = "mlp", dim: str = "ffn") -> tuple[Op, ...]:
    """The two (gated: three) products around an activation: saves 18sbh of the paper's 19 at ffn = 4h."""
    wide = Tensor((*TOKENS, dim))
    gated = model.has_gate
    parts: tuple[tuple[str, Dims], ...] = ((".gate", (dim,)), (".up", (dim,))) if gated else ((".up", (dim,)),)
    inputs = (wide,) * len(parts)
    # Autograd also saves the activated gate. Of a ReLU it saves only the result, which the next product saves.
    torch_saves = () if model.act == "relu" else (*inputs, wide) if gated and model.act != "swiglu_clamped" else inputs
    activation = Op(
        name=f"{name}.act",
        moves=(*inputs, wide),
        saves_megatron=inputs,
        saves_torch=torch_saves,
        eager_passes=CLAMPED_PASSES if model.act == "swiglu_clamped" else 1.7 if gated else 1.0,
        cpu_passes=TANH_PASSES if model.act in ("gelu_tanh", "geglu_tanh") else None,
    )
    return (
        linear(name, ("hidden",), parts, bias=model.bias, saves=(STREAM,)),
        activation,
        linear(f"{name}.down", (dim,), (("", ("hidden",)),), bias=model.bias, saves=(wide,)),
    )


def embedding(model: Model, train: Train, *, types: bool = False) -> tuple[Op, ...]:
    """The token, position and segment tables; saves the dropout mask, sbh.

    Our modules also save the position indices or rotary angles, and the mask of a block of a window: which of two blocks' keys it sees.
    """
    tables = [Weight("embedding.weight", ("vocab", "hidden"))]
    if model.positions == "learned":
        tables.append(Weight("positions.weight", ("context", "hidden")))
    if types:
        tables.append(Weight("types.weight", ("types", "hidden")))
    masks = (MASK,) if model.dropout else ()
    angles = (Tensor(("tokens", "rotary_dim"), 4),) * (2 if model.has_local_rope else 1)
    positions = {"learned": (Tensor(("tokens",), 8),), "rope": angles, "none": ()}[model.positions]
    has_mask = model.effective_window(train.seq) and train.attention == "flash" and not model.dropout
    window_mask = (Tensor(("window", "window")), Tensor(("window", "window"))) if has_mask else ()
    return (
        Op(
            name="embedding",
            weights=tuple(tables),
            moves=(STREAM,) * (len(tables) + 1 + 2 * model.scale_embedding) + masks,
            saves_megatron=masks,
            saves_torch=masks + positions + window_mask,
            reduces=(("vocab", STREAM),),
        ),
    )


def head(*, bias: bool = False) -> tuple[Op, ...]:
    """Logits and cross entropy: 2sbv for the logits and 4sbv for the float32 softmax (fp32: 4 and 4). Our modules save the logits and one
    float32 per token."""
    logits, softmax = Tensor((*TOKENS, "vocab")), Tensor((*TOKENS, "vocab"), 4)
    per_token = Tensor(TOKENS, 4)
    return (
        linear("head", ("hidden",), (("", ("vocab",)),), bias=bias, saves=(STREAM,)),
        Op(
            name="loss",
            moves=(logits, softmax, softmax),
            saves_torch=(logits, Tensor(("tokens", "batch"), 4)),  # on every tensor rank, also where the sequence is split elsewhere
            logits=(logits, softmax),
            reduces=(("vocab", per_token), ("vocab", per_token), ("vocab", per_token)),
            kernels=3,
            eager_passes=1.5,
            own_kernels=((logits,), (logits, logits)),  # the gradient takes the logits' place
        ),
    )


def decoder_table(
    model: Model, train: Train, attention: tuple[Op, ...], feed_forward: tuple[Op, ...], sizes: Mapping[str, int] | None = None
) -> OpTable:
    """The op table of a model whose layers normalize what attention and the feed-forward read, what they return, or both, inside of the
    residual sums. `sizes`: of further logical dims."""
    return OpTable(
        sizes={**logical_sizes(model, train), **(sizes or {})},
        embedding=embedding(model, train),
        layer=layer_ops(model, attention, feed_forward),
        head=(norm("norm", model), *head()),
        tied=model.tied,
    )


def layer_ops(model: Model, attention: tuple[Op, ...], feed_forward: tuple[Op, ...]) -> tuple[Op, ...]:
    """The ops of a layer, with its norms where `model.norm_place` has them."""
    before, after = model.norm_place != "after", model.norm_place != "before"
    return (
        *((norm("norm1", model),) if before else ()),
        *attention,
        *((norm("post_norm1", model),) if after else ()),
        residual("attention.residual", model),
        *((replace(norm("norm2", model), sums_again=after),) if before else ()),  # of the inputs of norm1 and, normed, post_norm1
        *feed_forward,
        *((norm("post_norm2", model),) if after else ()),
        residual("mlp.residual", model),
    )
