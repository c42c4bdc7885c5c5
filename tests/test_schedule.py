import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.optim import sgd
from fzero.schedule import Schedule, constant, warmup_cosine, warmup_linear

WARMUPS = [warmup_linear, warmup_cosine]


def at(schedule: Schedule, count: int) -> float:
    return schedule(torch.tensor(count)).item()


def reference(shape: Callable[[float], float], run: tuple[float, int, int, float], count: int) -> float:
    peak, warmup, total, final = run
    if count < warmup:
        return peak * ((count + 1) / warmup)
    start = max(warmup - 1, 0)
    ratio = shape(min((count - start) / max(total - 1 - start, 1), 1.0))
    return peak * (1 - ratio) + final * ratio


@pytest.mark.parametrize(
    "run", [(0.3, 10, 40, 0.0), (0.3, 0, 7, 0.03), (1.0, 5, 5, 0.1), (2.0, 1, 1, 0.5), (2.0, 0, 1, 0.5)]
)
def test_values_follow_the_stated_equations(run: tuple[float, int, int, float]) -> None:
    for count in range(run[2] + 3):
        linear = reference(lambda ratio: ratio, run, count)
        cosine = reference(lambda ratio: (1 - math.cos(math.pi * ratio)) / 2, run, count)
        assert at(warmup_linear(*run), count) == linear
        assert at(warmup_cosine(*run), count) == pytest.approx(cosine, rel=1e-14, abs=1e-16)


def test_known_values() -> None:
    linear, cosine = warmup_linear(1.0, 4, 8), warmup_cosine(1.0, 4, 8)
    assert [at(linear, count) for count in range(10)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    half = math.sqrt(0.5) / 2
    assert [at(cosine, count) for count in range(4, 9)] == pytest.approx([0.5 + half, 0.5, 0.5 - half, 0.0, 0.0])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_peak_and_final_are_met_exactly_and_the_way_is_monotone(data: Any) -> None:
    total = data.draw(st.integers(1, 60))
    warmup = data.draw(st.integers(0, total))
    peak, final = data.draw(st.floats(1e-6, 10.0)), data.draw(st.floats(0.0, 10.0))
    for build in WARMUPS:
        values = build(peak, warmup, total, final)(torch.arange(total + 5)).tolist()
        top = max(warmup - 1, 0)
        assert values[top] == peak
        assert values[total:] == [final] * 5
        assert total - 1 == top or values[total - 1] == final
        assert values[: top + 1] == sorted(values[: top + 1])
        slack = 1e-14 * max(peak, final)
        falls = [later - sooner for sooner, later in zip(values[top:], values[top + 1 :], strict=False)]
        assert all(fall * math.copysign(1, final - peak) >= -slack for fall in falls)
        assert values[0] > 0


@pytest.mark.parametrize("schedule", [constant(0.1), warmup_linear(0.1, 2, 9), warmup_cosine(0.1, 2, 9)])
def test_results_are_float64_of_the_shape_of_the_count(schedule: Schedule) -> None:
    for count in (torch.tensor(3), torch.arange(12), torch.tensor(3, device="meta")):
        rate = schedule(count)
        assert (rate.dtype, rate.shape, rate.device) == (torch.float64, count.shape, count.device)
    assert torch.equal(schedule(torch.arange(5))[3], schedule(torch.tensor(3)))


@pytest.mark.parametrize("schedule", [constant(0.1), warmup_linear(0.1, 2, 9), warmup_cosine(0.1, 2, 9)])
def test_one_graph_serves_all_counts(schedule: Schedule) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled: Schedule = torch.compile(schedule, fullgraph=True, backend=backend)
    for count in range(12):
        assert torch.equal(compiled(torch.tensor(count)), schedule(torch.tensor(count)))
    assert len(graphs) == 1


@pytest.mark.parametrize("build", WARMUPS)
def test_the_kth_update_uses_the_rate_of_count_k_minus_1(build: Callable[..., Schedule]) -> None:
    schedule = build(1.0, 4, 10, 0.25)
    optimizer = sgd(schedule)
    params: Tensor = torch.zeros((), dtype=torch.float64)
    state, used = optimizer.init(params), []
    for _ in range(12):
        after, state = optimizer.update(torch.ones((), dtype=torch.float64), state, params)
        used.append((params - after).item())
        params = after
    assert used == pytest.approx([at(schedule, count) for count in range(12)], abs=1e-14)
    assert state.step.item() == 12


@pytest.mark.parametrize(
    ("build", "arguments", "error", "text"),
    [
        (constant, (-0.1,), ValueError, "constant: value must be finite and at least 0, got -0.1"),
        (constant, (math.nan,), ValueError, "value"),
        (constant, (math.inf,), ValueError, "value"),
        (constant, ("1",), TypeError, "value must be a number"),
        (constant, (True,), TypeError, "value must be a number"),
        *[
            (build, arguments, error, f"{build.__name__}: {text}")
            for build in WARMUPS
            for arguments, error, text in [
                ((math.nan, 1, 2), ValueError, "peak must be finite"),
                ((-1.0, 1, 2), ValueError, "peak must be finite"),
                ((1.0, 1, 2, -0.5), ValueError, "final must be finite"),
                ((1.0, 1, 2, math.inf), ValueError, "final must be finite"),
                ((1.0, 0, 0), ValueError, "total_steps must be at least 1, got 0"),
                ((1.0, -1, 2), ValueError, r"warmup_steps must be in \[0, total_steps\], got -1 with total_steps=2"),
                ((1.0, 3, 2), ValueError, r"warmup_steps must be in \[0, total_steps\], got 3 with total_steps=2"),
                ((1.0, 1.0, 2), TypeError, "warmup_steps must be an int"),
                ((1.0, 1, math.inf), TypeError, "total_steps must be an int"),
                ((1.0, True, 2), TypeError, "warmup_steps must be an int"),
            ]
        ],
    ],
)
def test_wrong_arguments_are_refused_where_the_schedule_is_built(
    build: Callable[..., Schedule], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        build(*arguments)
