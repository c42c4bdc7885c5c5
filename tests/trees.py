"""Trees, models and the oracle that several test files share, and the one table of tolerances."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.layout import LeafSpec

# a machine under load is not a failure, and the same examples are drawn in every run
settings.register_profile("fzero", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fzero")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""max|a - b| <= tolerance x max|b| for every leaf: gradients, moments and parameters alike."""

STEPS = {torch.float64: 10, torch.float32: 3}
"""Steps over which this holds: float64 shows the logic, float32 the rounding."""

ADAMW: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
"""With the default eps of 1e-8 the rounding of a gradient that is truly zero would become a full step."""


class Pair(NamedTuple):
    left: Any
    right: Any


# --- comparison ------------------------------------------------------------------------------------------------------


def named(tree: Any) -> dict[str, Tensor]:
    """Return the leaves of a tree by plain path."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {".".join(str(key) for key in path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return max|a - b| / max|b|; infinite if shapes or dtypes differ or if only one of them is zero."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if torch.equal(ours, theirs):
        return 0.0
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return error / size if size and error == error else float("inf")  # noqa: PLR0124  (not NaN)


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the leaves that are further apart than the table allows, each with its distance."""
    assert list(ours) == list(theirs) or set(ours) == set(theirs), f"{list(ours)} against {list(theirs)}"
    distances = {name: distance(ours[name], theirs[name]) for name in theirs}
    return [f"{name} {apart:.1e}" for name, apart in distances.items() if apart > TOLERANCE[theirs[name].dtype]]


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the leaves that are not equal to the bit."""
    assert set(ours) == set(theirs), f"{list(ours)} against {list(theirs)}"
    return [name for name in theirs if not same_bits(ours[name], theirs[name])]


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether dtype, shape and all values are equal; NaN equals NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) or torch.equal(
        ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
    )


def storages(tree: Any) -> dict[int, int]:
    """Return the bytes of every storage that a tree holds, by address."""
    leaves = optree.tree_leaves(tree)
    return {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves if leaf.numel()}


# --- models ----------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A loss as the user writes it for the engine, the same for the oracle, and its data."""

    loss_fn: Callable[[Any, Any], Any]
    plain: Callable[[Any, Any], Tensor]
    """The mean loss of a combined batch, without anything of fzero."""
    params: Any
    blocks: tuple[str, ...] | None
    batch: Callable[[int, int], Any]
    """(rank, step) -> batch of 8 samples."""


class Head(NamedTuple):
    w: Tensor
    b: Tensor


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Return normal numbers that depend on the seed only; drawn in float64, then rounded."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def tree_model(dtype: torch.dtype) -> Model:
    """Return a residual MLP of odd sizes on a nested tree, with 0-d, zero-size, empty and unused parts and a tie."""
    scale, first = torch.tensor(0.7, dtype=dtype), numbers(7, 5, seed=1, dtype=dtype, scale=0.5)
    bias = numbers(7, seed=2, dtype=dtype, scale=0.1)
    params = {
        "layers": [
            {"w": numbers(7, 7, seed=10 + at, dtype=dtype, scale=0.4), "b": numbers(7, seed=20 + at, dtype=dtype)}
            for at in range(3)
        ],
        "head": Head(numbers(3, 7, seed=3, dtype=dtype), numbers(3, seed=4, dtype=dtype)),
        "stem": OrderedDict([("w", first), ("b", bias), ("again", bias)]),
        "scale": scale,
        "one": (numbers(1, seed=5, dtype=dtype),),
        "nothing": [{}, None, (), torch.empty(0, 4, dtype=dtype)],
        "unused": numbers(13, seed=6, dtype=dtype),
    }

    def layer(params: Any, x: Tensor) -> Any:
        return x + torch.tanh(x @ params["w"].T + params["b"])

    def loss_fn(params: Any, batch: Any, wrap: Callable[[Any], Any] = fzero.block) -> Tensor:
        x = batch["x"] @ params["stem"]["w"].T + params["stem"]["b"] + params["stem"]["again"] ** 2
        for part in params["layers"]:
            x = wrap(layer)(part, x)
        x = params["scale"].exp() * x @ params["head"].w.T + params["head"].b * params["one"][0]
        loss: Tensor = (x - batch["y"]).square().mean() + params["nothing"][3].sum()
        return loss

    def batch(rank: int, step: int) -> Any:
        seed = 1000 + 17 * rank + 101 * step
        return {"x": numbers(8, 5, seed=seed, dtype=dtype), "y": numbers(8, 3, seed=seed + 7, dtype=dtype)}

    return Model(
        loss_fn,
        lambda params, batch: loss_fn(params, batch, lambda fn: fn),
        params,
        ("layers.0", "layers.1", "layers.2"),
        batch,
    )


class Block(nn.Module):
    """One pre-norm transformer block with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (part.view(n, t, 2, c // 2).transpose(1, 2) for part in self.qkv(self.norm(x)).split(c, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        wide: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wide


class TiedGPT(nn.Module):
    """A language model of vocabulary 11 and width 6 whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_model(dtype: torch.dtype) -> Model:
    """Return the tied GPT through `from_module`; the oracle runs the module itself."""
    module = TiedGPT().to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed, dtype=dtype, scale=0.3))
            parameter.add_(1 if parameter.ndim == 1 and seed % 2 else 0)
    loss_fn, params, _ = fzero.from_module(module, next_token_loss)

    def plain(params: Any, batch: Any) -> Tensor:
        tokens, targets = batch
        return next_token_loss(torch.func.functional_call(module, params, (tokens,)), targets)

    def batch(rank: int, step: int) -> Any:
        generator = torch.Generator().manual_seed(1000 + 17 * rank + 101 * step)
        tokens = torch.randint(11, (8, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Model(loss_fn, plain, params, None, batch)


MODELS: dict[str, Callable[[torch.dtype], Model]] = {"tree": tree_model, "gpt": gpt_model}


def is_matrix(path: Any, leaf: Tensor) -> bool:  # noqa: ARG001  (the signature of a decay mask)
    return leaf.ndim == 2


def conv_params(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a conv net in channels_last, one of them 1x1, and a transposed matrix."""
    return {
        "conv": numbers(8, 3, 3, 3, seed=1, dtype=dtype, scale=0.2).to(memory_format=torch.channels_last),
        "point": numbers(4, 8, 1, 1, seed=2, dtype=dtype, scale=0.3).to(memory_format=torch.channels_last),
        "turned": numbers(4, 3, seed=3, dtype=dtype).T,
        "shift": numbers(5, 7, seed=4, dtype=dtype),
    }


def conv_loss(params: Any, images: Tensor) -> Tensor:
    """Return a loss that reaches every weight; "shift" gets an expanded (stride 0) gradient."""

    def net(params: Any, images: Tensor) -> Any:
        x = F.conv2d(images.to(memory_format=torch.channels_last), params["conv"]).tanh()
        x = F.conv2d(x, params["point"]).mean((2, 3))
        return (params["turned"] @ x.T).square().mean() + params["shift"].sum() / 8

    loss: Tensor = fzero.block(net)(params["net"], images)
    return loss


# --- the oracle ------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What a run looks like after one step: leaves by plain path."""

    loss: Tensor
    norm: Tensor
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]

    def trees(self) -> dict[str, dict[str, Tensor]]:
        return {
            "scalars": {"loss": self.loss, "norm": self.norm},
            "grads": self.grads,
            "params": self.params,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }


def torch_adamw(
    params: Any,
    loss_of: Callable[[Any, int], Tensor],
    steps: int,
    *,
    lr: float,
    clip: float | None = None,
    decay_mask: Callable[[Any, Tensor], bool] = lambda path, leaf: True,  # noqa: ARG005
    options: dict[str, Any] = ADAMW,
) -> Iterator[Moment]:
    """Train a tree in one process with torch's own AdamW and clip_grad_norm_; a leaf without a gradient gets zero."""
    paths, leaves, treespec = optree.tree_flatten_with_path(params)
    tied: dict[Any, Tensor] = {}
    free = [
        tied.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride()) if leaf.numel() else object(), leaf.clone())
        for leaf in leaves
    ]
    unique = list({id(leaf): leaf.requires_grad_() for leaf in free}.values())
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for path, leaf in {id(leaf): (path, leaf) for path, leaf in reversed(list(zip(paths, free, strict=True)))}.values():
        groups[decay_mask(path, leaf)].append(leaf)
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "weight_decay": options["weight_decay"] if decays else 0.0}
            for decays, group in groups.items()
            if group
        ],
        lr=lr,
        betas=options["betas"],
        eps=options["eps"],
        foreach=False,
        fused=False,
    )
    tree = treespec.unflatten(free)

    def copy(leaf_of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        return named(treespec.unflatten([leaf_of(leaf).detach().clone() for leaf in free]))  # type: ignore[union-attr]

    for step in range(steps):
        loss = loss_of(tree, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for leaf in unique:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grads = copy(lambda leaf: leaf.grad)
        norm = torch.nn.utils.clip_grad_norm_(unique, float("inf") if clip is None else clip, foreach=False)
        optimizer.step()
        yield Moment(
            loss.detach(),
            norm.detach(),
            grads,
            copy(lambda leaf: leaf),
            copy(lambda leaf: optimizer.state[leaf]["exp_avg"]),
            copy(lambda leaf: optimizer.state[leaf]["exp_avg_sq"]),
        )


def observe(engine: fzero.Zero, state: fzero.State, batch: Any) -> tuple[fzero.State, Moment]:
    """Take one step and return everything that it changed, with the gradients taken before it."""
    grads, loss = engine.grads(state, batch)
    state, metrics = engine.step(state, batch)
    assert torch.equal(loss, metrics.loss), f"grads gives loss {loss}, step {metrics.loss}"
    assert not metrics.skipped
    moments = engine.opt_state(state)
    assert torch.equal(moments.step, metrics.step)
    return state, Moment(
        metrics.loss.clone(),
        metrics.grad_norm.clone(),
        named(grads),
        named(engine.params(state)),
        named(moments.exp_avg),
        named(moments.exp_avg_sq),
    )


def combined(batches: Sequence[Any]) -> Any:
    """Concatenate the ranks' batches in rank order."""
    return optree.tree_map(lambda *parts: torch.cat(parts), batches[0], *batches[1:])


# --- strategies ------------------------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = st.sampled_from((0, 1, 2, 3, 5, 7, 13, 31, 64, 65))


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes: 0-d, zero-size, one element, primes, around the alignment."""
    return st.lists(SIZES, max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 5000)


def specs() -> st.SearchStrategy[list[LeafSpec]]:
    """Return leaves of a few dtypes, labels and blocks, in registration order."""
    leaf = st.builds(
        LeafSpec,
        shapes(),
        st.sampled_from(DTYPES[:3]),
        st.sampled_from((fzero.Label(decay=True, rate=1.0), fzero.Label(decay=False, rate=1.0), None)),
        st.sampled_from((None, None, 0, 1)),
    )
    return st.lists(leaf, max_size=12)


class Point(NamedTuple):
    x: Any
    y: Any


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return trees of every container, with None and empty ones; keys stand in any order."""
    keys = st.lists(st.sampled_from(("w", "b", "layers.10", "layers.2", "a", "z")), unique=True, max_size=4)

    def dicts(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return keys.flatmap(lambda names: st.tuples(*[children] * len(names)).map(lambda parts: Pair(names, parts)))

    def grow(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.builds(Point, children, children),
            dicts(children).map(lambda pair: dict(zip(pair.left, pair.right, strict=True))),
            dicts(children).map(lambda pair: OrderedDict(zip(pair.left, pair.right, strict=True))),
        )

    return st.recursive(leaf | st.none(), grow, max_leaves=12)
