"""Models with random trees that either engine trains, and what their states look like in full."""

import math
import random
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trees import Head, named, numbers

import fzero
from fzero.insides import insides

OPT: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
SIZES = ((), (1,), (3,), (7, 3), (5, 2, 3), (65,), (0, 4), (13, 11), (2, 1, 7, 5), (127,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

Full = dict[str, Tensor]
"""A whole state by name: params, exp_avg, exp_avg_sq, buffers, steps."""


class Made(NamedTuple):
    """An engine with a state after some steps, whichever it is."""

    engine: Any
    state: Any

    def full(self) -> Full:
        if isinstance(self.engine, fzero.Zero):
            trees = self.engine.params(self.state), self.engine.opt_state(self.state), self.engine.buffers(self.state)
        else:
            trees = self.engine.params(), self.engine.opt_state(), self.engine.buffers()
        params, moments, buffers = trees
        found = {f"params.{name}": leaf for name, leaf in named(params).items()}
        found |= {f"exp_avg.{name}": leaf for name, leaf in named(moments.exp_avg).items() if leaf is not None}
        found |= {f"exp_avg_sq.{name}": leaf for name, leaf in named(moments.exp_avg_sq).items() if leaf is not None}
        found |= {f"buffers.{name}": leaf for name, leaf in named(buffers).items()}
        return {**found, "step": moments.step}

    def save(self, root: Any, **options: Any) -> Any:
        return fzero.save(root, self.engine, *([] if self.state is None else [self.state]), **options)

    def load(self, directory: Any) -> tuple["Made", Any]:
        if isinstance(self.engine, fzero.Zero):
            state, extra = fzero.load(directory, self.engine)
            return Made(self.engine, state), extra
        return self, fzero.load(directory, self.engine)

    def buckets(self) -> list[Any]:
        return list(insides(self.engine).static.layout.buckets)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return numbers(math.prod(shape), seed=seed, dtype=dtype).view(shape)


# --- a module, for both engines --------------------------------------------------------------------------------------


class Part(nn.Module):
    """Parameters of random shapes and dtypes, all of which add to what it is called with."""

    def __init__(self, source: random.Random, seed: int) -> None:
        super().__init__()
        for place in range(source.randint(1, 4)):
            # the first has elements and is floating
            shape = source.choice(SIZES if place else ((3,), (7, 3)))
            leaf = draw(shape, seed + place, source.choice(DTYPES))
            self.register_parameter(f"w{place}", nn.Parameter(leaf))
        self.register_buffer("seen", torch.full((2, 3), float(seed)))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        self.get_buffer("count").add_(1)
        for parameter in self.parameters():
            x = x + (parameter.double() ** 2).sum() + parameter.double().sum()
        return x


class Pile(nn.Module):
    """Parts, and a parameter outside them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        source = random.Random(seed)  # noqa: S311
        self.parts = nn.ModuleList(Part(source, 100 * seed + 10 * at) for at in range(3))
        self.outside = nn.Parameter(numbers(7, 5, seed=seed))
        self.again = nn.Parameter(numbers(129, seed=seed + 1, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.outside.sum() + self.again.double().square().sum()


def criterion(output: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = (output - targets).mean() / 100
    return loss


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return numbers(4, seed=1000 + 10 * step + rank), numbers(4, seed=2000 + 10 * step + rank)


def module_engine(kind: str, seed: int, stage: int, cap: int, **options: Any) -> Made:
    """Return either engine on the pile, before any step."""
    module, opt = Pile(seed), fzero.adamw(0.01, **OPT)
    if kind == "hooked":
        return Made(fzero.HookedZero(module, opt, stage, bucket_bytes=cap, **options), None)
    loss_fn, params, buffers = fzero.from_module(module, criterion)
    engine = fzero.Zero(loss_fn, opt, stage, bucket_bytes=cap, **options)
    return Made(engine, engine.init(params, buffers))


def module_step(made: Made, rank: int, step: int) -> tuple[Made, fzero.Metrics]:
    inputs, targets = batch(rank, step)
    if isinstance(made.engine, fzero.Zero):
        state, metrics = made.engine.step(made.state, (inputs, targets))
        return Made(made.engine, state), metrics
    made.engine.backward(criterion(made.engine(inputs), targets))
    return made, made.engine.step()


# --- a tree of its own, for the functional engine --------------------------------------------------------------------


def random_tree(source: random.Random, seed: int, depth: int = 0) -> Any:  # noqa: PLR0911
    """Return a tree of every container, with None and empty ones, of leaves of all sizes and dtypes, with ints."""
    kind = source.choice(("leaf", "leaf", "leaf", "dict", "ordered", "list", "tuple", "named", "none", "int"))
    if depth == 0:
        kind = "dict"
    if kind == "none":
        return None
    if kind == "leaf" or depth == 3:
        return draw(source.choice(SIZES), source.randrange(10**6), source.choice(DTYPES))
    if kind == "int":
        return torch.arange(source.randint(0, 5)) + seed
    children = [random_tree(source, seed, depth + 1) for _ in range(source.randint(2 if depth == 0 else 0, 4))]
    if kind == "dict":
        return {f"k{source.randrange(10)}{at}": child for at, child in enumerate(children)}
    if kind == "ordered":
        return OrderedDict((f"z{9 - at}", child) for at, child in enumerate(children))
    if kind == "named":
        return Head(numbers(3, seed=seed), numbers(4, 2, seed=seed + 1))
    return children if kind == "list" else tuple(children)


def energy(tree: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for leaf in named(tree).values():
        if leaf.is_floating_point():
            total = total + (leaf.double() ** 2).sum() + leaf.double().sum()
    return total


def tree_loss(params: Any, batch: Any) -> Tensor:
    total = energy(params["rest"])
    for block in params["blocks"]:
        total = total + fzero.block(energy)(block)
    result: Tensor = total * batch.double().mean()
    return result


def tree_params(seed: int) -> Any:
    source = random.Random(seed)  # noqa: S311
    block = [{"w": numbers(11, 3, seed=seed + at), "rest": random_tree(source, seed)} for at in range(2)]
    tied = numbers(17, seed=seed)
    rest = {
        "tree": random_tree(source, seed),
        "w": tied,
        "tied": tied,
        "b": numbers(131, seed=seed, dtype=torch.float32),
    }
    return {"blocks": block, "rest": rest}


def tree_engine(seed: int, stage: int, cap: int, params: Any = None, **options: Any) -> Made:
    engine = fzero.Zero(
        tree_loss, fzero.adamw(0.01, **OPT), stage, blocks=("blocks.0", "blocks.1"), bucket_bytes=cap, **options
    )
    return Made(engine, engine.init(tree_params(seed) if params is None else params))


def tree_step(made: Made, rank: int, step: int) -> Made:
    state, _ = made.engine.step(made.state, batch(rank, step)[0])
    return Made(made.engine, state)
