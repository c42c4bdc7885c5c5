import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fzero
from fzero.block import Sharded, is_sharded
from fzero.grad import value_and_grad
from fzero.remat import remat as plain_remat

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Case = Callable[[Tensor, Tensor, Wrap], Any]

WRAPS: dict[str, Wrap] = {"grad.remat": plain_remat, "fzero.remat": fzero.remat, "fzero.block": fzero.block}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    # the tests compile one function of theirs again and again; Dynamo gives up after eight times
    torch._dynamo.reset()


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def points() -> tuple[Tensor, Tensor]:
    return randn(1, 4, 3), randn(2, 3, 3)


# --- value and gradient of a wrapped function are those of the function ----------------------------------------------
# Each case builds its arguments and reads its results in another way; it returns a scalar of x (4, 3) and w (3, 3).


class Pair(NamedTuple):
    left: Any
    right: Any


def in_dict(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda p, x: torch.tanh(x @ p["w"]["inner"]) * p["scale"])(
        {"w": {"inner": w}, "scale": w[0], "unused": x}, x
    )
    return (out * x).sum()


def out_dict(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda x, w: {"b": x @ w, "a": {"deep": (x * x).sin()}, "n": None})(x, w)
    assert list(out) == ["b", "a", "n"]
    return (out["b"] * 3 + out["a"]["deep"]).sum()


def in_list(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda leaves: leaves[0] @ leaves[1][0] @ leaves[1][1])([x, (w, w.T)])
    return out.square().sum()


def out_tuple(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    a, (b, [c]) = wrap(lambda x, w: (x @ w, ((x * 2).exp(), [w.sum()])))(x, w)
    return a.sum() * 2 + (b * b).sum() + c


def named_tuples(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    pair = Pair(x, {"w": w})
    out = wrap(lambda pair: pair.left @ pair.right["w"])(pair)
    return out.sin().sum()


def ordered_dict(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    given = OrderedDict([("z", x), ("a", w)])
    out = wrap(lambda tree: tree["z"] @ tree["a"])(given)
    return out.sin().sum()


def nothing(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, absent: None, tree: Any) -> Any:
        assert absent is None
        assert tree["absent"] is None
        return x @ tree["w"], None

    out, absent = wrap(function)(x, None, {"w": w, "absent": None})
    assert absent is None
    return (out * out).sum()


def integers(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    index = torch.tensor([2, 0, 0])
    picked, place = wrap(lambda x, w, index: (w[index] * x.sum(), index + 1))(x, w, index)
    assert place.dtype == torch.int64
    return (picked * place).sin().sum()


def masks(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    mask = x > 0
    out, other = wrap(lambda x, w, mask: (torch.where(mask, x @ w, x), ~mask))(x, w, mask)
    assert other.dtype == torch.bool
    return (out * torch.where(other, 2.0, 3.0)).sum()


def returned_inputs(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    index = torch.tensor([1, 2])
    a, b, c, again = wrap(lambda x, w, index: (x, (x @ w).sin(), index, x))(x, w, index)
    return (a * b).sum() * c.sum() + (again * again).sum()


def returned_views(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    turned, cut, whole = wrap(lambda x, w: (x.T, x[1:], (x @ w).view(-1)))(x, w)
    return (turned @ cut.new_ones(4)).sin().sum() + cut.square().sum() + whole.sin().sum()


def same_twice(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, w: Tensor) -> Any:
        y = (x @ w).sin()
        return y, [y]

    first, (second,) = wrap(function)(x, w)
    return (first * 2 + second.square()).sum()


def same_argument_twice(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda a, b, w: (a * b.sin()) @ w)(x, x, w)
    return out.sum()


def constants(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, power: int, factor: float, how: str, tree: Any) -> Tensor:
        y = x**power * factor
        return y.sin() if how == "sin" and tree["flag"] else y

    out = wrap(function)(x, 2, 0.5, "sin", {"flag": True, "w": w})
    return out.sum() + w.sum()


def keywords(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, *, w: Tensor, factor: float = 2.0, tree: Any = None) -> Any:
        return (x @ w * factor).sin() * tree["x"]

    out = wrap(function)(x, w=w, tree={"x": x})
    return out.sum()


def unused(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda x, w, other: x.sin())(x, w, {"other": w * 2})  # noqa: ARG005
    return out.sum() + w.square().sum()


def detached(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, w: Tensor) -> Any:
        return x @ w.detach(), (x * x).detach()

    out, fixed = wrap(function)(x, w)
    return (out * fixed).sum() + w.sum()


def in_place(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y.add_(x).mul_(2)
        y[0] = x[1] * 3
        return y.sin()

    out = wrap(function)(x, w)
    return out.sum()


def affine(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


INNER: dict[Wrap, Callable[..., Any]] = {wrap: wrap(affine) for wrap in (*WRAPS.values(), unwrapped)}


def nested(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    inner = INNER[wrap]
    out: Tensor = OUTER[wrap]({"w": w}, inner({"w": w}, x))
    return out.square().sum()


def deeper(wrap: Wrap) -> Callable[..., Any]:
    inner = INNER[wrap]
    return wrap(lambda p, x: inner(p, inner(p, x)) + x)


OUTER = {wrap: deeper(wrap) for wrap in INNER}


def in_a_loop(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    layer = wrap(lambda w, x, number: torch.tanh(x @ w) * (number + 1))
    for number in range(3):
        x = layer(w, x, number)
    return x.square().sum()


def strided(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
    out = wrap(lambda a, b: (a @ b).T)(w.T[:2], x.T)
    return out.sin().sum()


CASES: list[Case] = [
    in_dict, out_dict, in_list, out_tuple, named_tuples, ordered_dict, nothing, integers, masks, returned_inputs,
    returned_views, same_twice, same_argument_twice, constants, keywords, unused, detached, in_place, nested,
    in_a_loop, strided,
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


def by_autograd(case: Case, wrap: Wrap, run: Callable[..., Tensor] | None = None) -> tuple[Tensor, ...]:
    x, w = points()
    x.requires_grad_()
    w.requires_grad_()
    value = case(x, w, wrap) if run is None else run(x, w)
    return (value.detach(), *torch.autograd.grad(value, (x, w)))


def func_route(case: Case, wrap: Wrap) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        gradients, value = torch.func.grad_and_value(lambda x, w: case(x, w, wrap), argnums=(0, 1))(x, w)
        return (value, *gradients)

    return run


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@each_case
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_wrapped_function_has_the_gradient_of_the_function(case: Case, wrap: Wrap) -> None:
    expected = by_autograd(case, unwrapped)
    assert_same(by_autograd(case, wrap), expected)
    assert_same(func_route(case, wrap)(*points()), expected)


@each_case
def test_compiled_wrapped_function_has_the_gradient_of_the_function(case: Case) -> None:
    compiled = torch.compile(func_route(case, fzero.remat), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*points()), by_autograd(case, unwrapped))


def test_compiled_blocks_have_the_gradient_of_their_functions() -> None:
    def everything(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
        return torch.stack([case(x, w, wrap) for case in CASES]).sum()

    compiled = torch.compile(func_route(everything, fzero.block), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*points()), by_autograd(everything, unwrapped))


def test_compiled_forward_has_the_gradient_of_the_function_under_plain_autograd() -> None:
    for case in (in_dict, out_tuple, masks, nested):
        compiled = torch.compile(lambda x, w, case=case: case(x, w, fzero.remat), fullgraph=True, backend="aot_eager")
        assert_same(by_autograd(case, fzero.remat, compiled), by_autograd(case, unwrapped))


@pytest.mark.compile
def test_wrapped_functions_under_inductor() -> None:
    chosen = [in_dict, out_dict, integers, masks, returned_inputs, keywords, nested]

    def everything(x: Tensor, w: Tensor, wrap: Wrap) -> Any:
        return torch.stack([case(x, w, wrap) for case in chosen]).sum()

    expected = by_autograd(everything, unwrapped)
    assert_same(torch.compile(func_route(everything, fzero.remat), fullgraph=True)(*points()), expected)


def test_activations_are_recomputed_not_kept() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().sin()

    saved: list[Tensor] = []
    x = points()[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = fzero.remat(function)(x)
    assert all(tensor.shape != x.shape or tensor.data_ptr() == x.data_ptr() for tensor in saved)
    assert len(calls) == 1
    torch.autograd.grad(y.sum(), x)
    assert len(calls) == 2
    calls.clear()
    torch.func.grad(lambda x: fzero.remat(function)(x).sum())(points()[0])
    assert len(calls) == 2
    calls.clear()
    torch.func.grad(lambda x: fzero.block(function)(x).sum())(points()[0])
    assert len(calls) == 1, "a block without sharded arguments calls its function, no more"


def test_second_derivatives_of_a_wrapped_function() -> None:
    x, w = points()

    def curvature(wrap: Wrap) -> Any:
        return torch.func.grad(lambda w: torch.func.grad(lambda x: nested(x, w, wrap))(x).square().sum())(w)

    torch.testing.assert_close(curvature(fzero.remat), curvature(unwrapped), rtol=1e-12, atol=1e-12)


# --- random numbers --------------------------------------------------------------------------------------------------
# Each returns y = (something random) * x * x, so that the gradient of y.sum() is 2 y / x for the y that was drawn.


def by_dropout(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: F.dropout(x, 0.5, training=True) * x)(x)


def by_bernoulli(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: torch.bernoulli(torch.full_like(x, 0.5)) * x * x)(x)


def by_bernoulli_in_place(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: torch.empty_like(x).bernoulli_(0.5) * x * x)(x)


def by_rand_like(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: torch.rand_like(x) * x * x)(x)


def by_randn(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: torch.randn(x.shape, dtype=x.dtype) * x * x)(x)


def by_randint(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: torch.randint(1, 1000, x.shape) * x * x)(x)


def by_two_draws(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: F.dropout(torch.rand_like(x) * x, 0.5, training=True) * torch.rand_like(x) * x)(x)


inner_draw = fzero.remat(lambda x: F.dropout(x, 0.5, training=True) * x)


def by_nested(x: Tensor, wrap: Wrap) -> Any:
    return wrap(lambda x: F.dropout(inner_draw(x), 0.3, training=True) * torch.rand_like(x))(x)


def by_two_blocks(x: Tensor, wrap: Wrap) -> Any:
    layer = wrap(lambda x, factor: F.dropout(x, 0.5, training=True) * factor)
    out: Tensor = layer(layer(x, x), torch.ones_like(x))
    return out


def by_draw_in_place_of_a_draw(x: Tensor, wrap: Wrap) -> Any:
    def function(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        noise.mul_(torch.rand_like(x)).add_(1)
        return noise * x * x

    return wrap(function)(x)


RANDOM = [
    by_dropout, by_bernoulli, by_bernoulli_in_place, by_rand_like, by_randn, by_randint, by_two_draws, by_nested,
    by_two_blocks, by_draw_in_place_of_a_draw,
]  # fmt: skip
each_random = pytest.mark.parametrize("draw", RANDOM, ids=lambda draw: draw.__name__)


def with_aux(
    draw: Callable[[Tensor, Wrap], Tensor], wrap: Wrap = fzero.remat
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor) -> tuple[Tensor, Tensor]:
            y = draw(x, wrap)
            return y.sum(), y

        gradient, y = torch.func.grad(loss, has_aux=True)(x)
        return gradient, y

    return run


def assert_consistent(gradient: Tensor, y: Tensor, x: Tensor) -> None:
    assert len(set(y.flatten().tolist())) > 2, "nothing was drawn"
    torch.testing.assert_close(gradient, 2 * y / x, rtol=1e-10, atol=1e-12)


@each_random
def test_the_gradient_belongs_to_the_random_numbers_drawn(draw: Callable[[Tensor, Wrap], Tensor]) -> None:
    torch.manual_seed(0)
    x = randn(3, 8, 9).abs() + 0.5
    leaf = x.clone().requires_grad_()
    y = draw(leaf, fzero.remat)
    assert_consistent(torch.autograd.grad(y.sum(), leaf)[0], y.detach(), x)
    run = with_aux(draw)
    for _ in range(2):
        gradient, y = run(x)
        assert_consistent(gradient, y, x)
    assert not torch.equal(run(x)[1], y), "every call draws anew"


@each_random
def test_compiled_the_gradient_belongs_to_the_random_numbers_drawn(draw: Callable[[Tensor, Wrap], Tensor]) -> None:
    torch.manual_seed(0)
    x = randn(3, 8, 9).abs() + 0.5
    run = torch.compile(with_aux(draw), fullgraph=True, backend="aot_eager")
    gradient, y = run(x)
    assert_consistent(gradient, y, x)
    assert not torch.equal(run(x)[1], y), "every call draws anew"


@pytest.mark.compile
def test_the_gradient_belongs_to_the_random_numbers_drawn_under_inductor() -> None:
    x = randn(3, 8, 9).abs() + 0.5

    def everything(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [with_aux(draw)(x) for draw in RANDOM]

    run = torch.compile(everything, fullgraph=True)
    for _ in range(2):
        for gradient, y in run(x):
            assert_consistent(gradient, y, x)


def test_dropout_inside_attention() -> None:
    x = randn(4, 2, 2, 5, 4)

    def loss(value: Tensor, wrap: Wrap) -> tuple[Tensor, Tensor]:
        out = wrap(lambda v, x: F.scaled_dot_product_attention(x, x, v, dropout_p=0.5))(value, x)
        return (out * out).sum(), out

    def run(value: Tensor) -> tuple[Tensor, Tensor]:
        gradient, out = torch.func.grad(lambda v: loss(v, fzero.remat), has_aux=True)(value)
        return gradient, out

    # loss is a quadratic form of `value`: value . gradient = 2 loss, for the mask that was drawn only
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        gradient, out = function(x)
        torch.testing.assert_close((gradient * x).sum(), 2 * (out * out).sum(), rtol=1e-10, atol=0)


def test_recomputation_leaves_the_random_state_as_the_plain_function_does() -> None:
    x = points()[0]

    def after(wrap: Wrap) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        gradient = torch.func.grad(lambda x: by_dropout(x, wrap).sum())(x)
        return gradient, torch.rand(3)

    for mine, theirs in zip(after(fzero.remat), after(unwrapped), strict=True):
        assert torch.equal(mine, theirs)


# --- what may be wrapped, and where ----------------------------------------------------------------------------------


def layer(p: Any, x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.tanh(x @ p["w"]) * factor


WRAPPED_AT_MODULE_LEVEL = fzero.remat(layer)


@fzero.block
def decorated(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) * 2.0


class Plain:
    """An object of the user's, not a module."""

    def __init__(self, wrap: Wrap) -> None:
        self.factor = 2.0
        self.step = wrap(self.layer)

    def layer(self, p: Any, x: Tensor) -> Tensor:
        return layer(p, x, self.factor)

    def __call__(self, p: Any, x: Tensor) -> Tensor:
        return self.layer(p, x)

    @classmethod
    def of_class(cls, p: Any, x: Tensor) -> Tensor:
        return layer(p, x)


class Module(nn.Module):
    """A module without parameters of its own, that gets them passed."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.factor = 2.0
        self.step = wrap(self.layer)

    def layer(self, p: Any, x: Tensor) -> Tensor:
        return layer(p, x, self.factor)

    def forward(self, p: Any, x: Tensor) -> Tensor:
        return layer(p, x, self.factor)


LINEAR = nn.Linear(3, 3, bias=False, device="meta")


def through_a_module(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(functional_call(LINEAR, {"weight": p["w"].T}, (x,))) * 2.0


def makers(wrap: Wrap) -> dict[str, Callable[..., Any]]:
    """Return the same function, wrapped outside of what is traced."""

    def nested_function(p: Any, x: Tensor) -> Tensor:
        return layer(p, x)

    factor = 2.0
    plain, module = Plain(wrap), Module(wrap)
    return {
        "function": wrap(layer),
        "nested function": wrap(nested_function),
        "closure": wrap(lambda p, x: layer(p, x, factor)),
        "lambda": wrap(lambda p, x: torch.tanh(x @ p["w"]) * 2.0),
        "partial": wrap(functools.partial(layer, factor=2.0)),
        "bound method": wrap(plain.layer),
        "bound method, kept by its object": plain.step,
        "bound method of a module": wrap(module.layer),
        "bound method of a module, kept by it": module.step,
        "object": wrap(plain),
        "module": wrap(module),
        "functional_call": wrap(through_a_module),
        "wrapped twice": wrap(wrap(layer)),
        "a method of a class's": wrap(Plain.of_class),
    }


def inside(wrap: Wrap) -> dict[str, Callable[..., Any]]:
    """Return functions that wrap when they are called, hence while they are traced."""
    plain, module = Plain(wrap), Module(wrap)

    def nested_function(p: Any, x: Tensor) -> Any:
        def here(p: Any, x: Tensor) -> Tensor:
            return layer(p, x)

        return wrap(here)(p, x)

    def decorator(p: Any, x: Tensor) -> Any:
        @wrap
        def here(p: Any, x: Tensor) -> Tensor:
            return layer(p, x)

        return here(p, x)

    def closed_over_constant(p: Any, x: Tensor) -> Any:
        factor = 2.0
        return wrap(lambda p, x: layer(p, x, factor))(p, x)

    return {
        "function": lambda p, x: wrap(layer)(p, x),  # noqa: PLW0108
        "nested function": nested_function,
        "decorator": decorator,
        "closure": closed_over_constant,
        "lambda": lambda p, x: wrap(lambda p, x: torch.tanh(x @ p["w"]) * 2.0)(p, x),  # noqa: PLW0108
        "partial": lambda p, x: wrap(functools.partial(layer, factor=2.0))(p, x),  # noqa: PLW0108
        "bound method": lambda p, x: wrap(plain.layer)(p, x),  # noqa: PLW0108
        "bound method of a module": lambda p, x: wrap(module.layer)(p, x),  # noqa: PLW0108
        "object": lambda p, x: wrap(plain)(p, x),  # noqa: PLW0108
        "module": lambda p, x: wrap(module)(p, x),  # noqa: PLW0108
        "functional_call": lambda p, x: wrap(through_a_module)(p, x),  # noqa: PLW0108
    }


def gradients_of(function: Callable[..., Any]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    return func_route(lambda x, w, _: function({"w": w}, x).square().sum(), unwrapped)


def assemble(shards: Any, proxies: Any, outside: Any) -> dict[str, Tensor]:
    del proxies, outside
    return {"w": shards[0].view(3, 3)}


def gradients_through_sharded(function: Callable[..., Any]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Pass the parameters as stage 3 does."""

    def case(x: Tensor, w: Tensor, _: Wrap) -> Tensor:
        sharded = Sharded("layers.0", ((w.reshape(-1),), (), ()), assemble)
        out: Tensor = function(sharded, x)
        return out.square().sum()

    return func_route(case, unwrapped)


@pytest.mark.parametrize(("where", "kind"), [(where, kind) for where in (makers, inside) for kind in where(unwrapped)])
def test_whatever_is_callable_may_be_wrapped_inside_and_outside_of_what_is_traced(
    where: Callable[[Wrap], dict[str, Callable[..., Any]]], kind: str
) -> None:
    expected = gradients_of(layer)(*points())
    for wrap in (fzero.remat, fzero.block):
        function = where(wrap)[kind]
        for route in (gradients_of(function), gradients_through_sharded(function)):
            assert_same(route(*points()), expected)
            if wrap is fzero.remat:
                assert_same(torch.compile(route, fullgraph=True, backend="aot_eager")(*points()), expected)


def test_wrapped_at_module_level_and_by_decoration() -> None:
    expected = gradients_of(layer)(*points())
    for function in (WRAPPED_AT_MODULE_LEVEL, decorated):
        assert_same(gradients_of(function)(*points()), expected)
        assert_same(torch.compile(gradients_of(function), fullgraph=True, backend="aot_eager")(*points()), expected)


def test_a_captured_tensor_is_refused_when_compiled() -> None:
    fixed = points()[1]

    def local(x: Tensor, w: Tensor) -> Tensor:
        doubled = w * 2
        out: Tensor = fzero.remat(lambda x: x @ doubled)(x)
        return out.sum()

    def outside(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = captures(x)
        return out.sum() + w.sum()

    captures = fzero.remat(lambda x: x @ fixed)
    # eagerly a gradient that is asked for would be lost, a constant is one
    with pytest.raises(TypeError, match=r"captures the tensor 'doubled'.*pass it as an argument"):
        torch.func.grad(local, argnums=1)(*points())
    assert torch.equal(torch.func.grad(outside)(*points()), torch.ones(4, 3, dtype=torch.float64) @ fixed.T)
    x, w = points()
    (got,) = torch.autograd.grad(local(x, w.requires_grad_()), w)  # plain autograd follows what is captured
    assert got.abs().sum() > 0
    # what is captured while Dynamo traces has no value yet: the refusal is Dynamo's, and names our function
    refusals = (
        (local, "park_function_that_captures_no_tensor"),
        (outside, "captures the tensor 'fixed'.*pass it as an"),
    )
    for function, message in refusals:
        compiled = torch.compile(torch.func.grad(function), fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=message):
            compiled(*points())


def test_only_a_function_may_be_wrapped() -> None:
    wrong: Any = 3
    for wrap in (plain_remat, fzero.remat, fzero.block):
        with pytest.raises(TypeError, match=r"(remat|block): takes a function, got int"):
            wrap(wrong)


# --- value_and_grad --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return y


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 17, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def images(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )


def gpt_task() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 17, (2, 5, 8), generator=generator)
    return GPT(), tokens[0], tokens[1]


def image_task(norm: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        images(norm),
        torch.randn(6, 3, 8, 8, generator=generator),
        torch.randint(0, 5, (6,), generator=generator),
    )


TASKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "gpt": gpt_task,
    "batch norm": lambda: image_task(nn.BatchNorm2d(8)),
    "layer norm": lambda: image_task(nn.LayerNorm([8, 8, 8])),
    "rms norm": lambda: image_task(nn.RMSNorm([8, 8, 8])),
    "group norm": lambda: image_task(nn.GroupNorm(4, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TASKS)
def test_eagerly_the_gradient_has_the_bits_of_torch_func(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs, targets = TASKS[name]()
    module = module.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    names = [key for key, _ in module.named_parameters()]
    variables = [leaf.detach() for leaf in module.parameters()]

    def objective(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        buffers = {key: buffer.clone() for key, buffer in module.named_buffers()}
        logits = functional_call(module, {**dict(zip(names, leaves, strict=True)), **buffers}, (inputs,))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits

    ours, value, aux = value_and_grad(objective, variables)
    theirs, (their_value, their_aux) = torch.func.grad_and_value(objective, has_aux=True)(variables)
    module.zero_grad()
    loss = F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(value, their_value)
    assert torch.equal(aux, their_aux)
    assert not any(leaf.requires_grad for leaf in (*ours, value, aux))
    bound = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    for key, mine, other, parameter in zip(names, ours, theirs, module.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(mine, parameter.grad), key
        if name == "group norm":  # its backward takes another formula under torch.func
            assert (mine - other).abs().max() <= bound * other.abs().max(), key
        else:
            assert torch.equal(mine, other), key


def test_variables_that_the_value_does_not_depend_on_have_a_zero_gradient() -> None:
    x, w = points()
    kept = {"none": None, "made": torch.arange(3), "list": [x]}

    def objective(leaves: list[Tensor]) -> tuple[Tensor, Any]:
        return leaves[0].square().sum(), {**kept, "list": [leaves[0] * 2]}

    gradients, value, aux = value_and_grad(objective, [x, w])
    assert torch.equal(gradients[0], 2 * x)
    assert torch.equal(gradients[1], torch.zeros_like(w))
    assert torch.equal(value, x.square().sum())
    assert aux["none"] is None
    assert torch.equal(aux["list"][0], 2 * x)
    gradients, value, _ = value_and_grad(lambda _: (torch.tensor(3.0), ()), [x])
    assert torch.equal(gradients[0], torch.zeros_like(x))
    assert value == 3
    assert value_and_grad(lambda _: (torch.tensor(3.0), None), [])[0] == []
    # the variables themselves are left alone, whatever the caller's mode
    with torch.no_grad():
        gradients, _, _ = value_and_grad(objective, [x, w])
    assert torch.equal(gradients[0], 2 * x)
    assert not x.requires_grad
    assert x.grad is None


def test_compiled_value_and_grad_gives_the_same() -> None:
    x, w = points()

    def objective(leaves: list[Tensor]) -> tuple[Tensor, Any]:
        loss = torch.tanh(leaves[0] @ leaves[1]).square().sum()
        return loss, {"none": None, "loss": loss * 2, "list": [leaves[0].sum()]}

    ours: Any = value_and_grad(objective, [x, w])
    compiled = torch.compile(lambda leaves: value_and_grad(objective, leaves), fullgraph=True, backend="aot_eager")
    theirs: Any = compiled([x, w])
    assert optree.tree_structure(ours) == optree.tree_structure(theirs)
    assert_same(tuple(optree.tree_leaves(theirs)), tuple(optree.tree_leaves(ours)))


# --- sharded subtrees ------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "indexing": lambda s, _: s["weight"],
    "indexing by number": lambda s, _: s[0],
    "assignment": lambda s, x: operator.setitem(s, "weight", x),
    "attribute": lambda s, _: s.weight,
    "keys": lambda s, _: s.keys(),
    "iteration": lambda s, _: list(s),
    "unpacking": lambda s, _: dict(**s),
    "membership": lambda s, _: "weight" in s,
    "length": lambda s, _: len(s),
    "call": lambda s, x: s(x),
    "float": lambda s, _: float(s),
    "minus sign": lambda s, _: -s,
    "x @ s": lambda s, x: x @ s,
    "s @ x": lambda s, x: s @ x,
    "x + s": lambda s, x: x + s,
    "s + x": lambda s, x: s + x,
    "s + 1": lambda s, _: s + 1,
    "1 + s": lambda s, _: 1 + s,
    "x - s": lambda s, x: x - s,
    "s - x": lambda s, x: s - x,
    "s - 1": lambda s, _: s - 1,
    "1 - s": lambda s, _: 1 - s,
    "x * s": lambda s, x: x * s,
    "s * 2": lambda s, _: s * 2,
    "x / s": lambda s, x: x / s,
    "s / 2": lambda s, _: s / 2,
    "2 / s": lambda s, _: 2 / s,
    "s ** 2": lambda s, _: s**2,
    "2 ** s": lambda s, _: 2**s,
    "s // 2": lambda s, _: s // 2,
    "s % 2": lambda s, _: s % 2,
    "abs": lambda s, _: abs(s),
    "s > 0": lambda s, _: s > 0,
    "s <= x": lambda s, x: s <= x,
    "s += x": operator.iadd,
    "torch.matmul": lambda s, x: torch.matmul(x, s),
    "torch.sum": lambda s, _: torch.sum(s),
    "torch.stack": lambda s, x: torch.stack([x, s]),
    "torch.add keyword": lambda s, x: torch.add(x, other=s),
    "linear": lambda s, x: F.linear(x, s),
}


def a_sharded() -> Sharded:
    return Sharded("layers.3", ([torch.ones(4)], [torch.ones(8)], []), lambda shards, _proxies, _outside: shards[0])


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use_of_a_sharded_subtree_names_its_path(use: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=r"block 'layers\.3' are sharded here.*fzero\.block"):
        use(a_sharded(), torch.ones(3, 3))


def test_functional_call_names_the_path_of_a_sharded_subtree() -> None:
    with pytest.raises(TypeError, match=r"layers\.3"):  # torch's own words
        functional_call(nn.Linear(3, 3), {"weight": a_sharded()}, (torch.ones(3, 3),))  # type: ignore[dict-item]


def test_a_sharded_subtree_goes_through_trees_unharmed() -> None:
    tree: Any = {"a": a_sharded(), "b": torch.ones(2)}
    doubled: Any = optree.tree_map(lambda leaf: leaf * 2, tree)
    assert isinstance(doubled["a"], Sharded)
    assert is_sharded(doubled["a"])
    assert not is_sharded(doubled)
    assert repr(doubled["a"]) == "Sharded('layers.3')"
    assert torch.equal(doubled["a"].tensors[0][0], torch.full((4,), 2.0))
    assert optree.tree_structure(doubled) == optree.tree_structure(tree)
    # what only looks at the object is not a use
    assert doubled["a"] is not None
    assert not hasattr(doubled["a"], "__array__")
    assert isinstance(doubled.get("a"), Sharded)
