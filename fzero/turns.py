"""Whose turn it is: in eager stage 3 every rank gathers the same blocks in the same order, whichever its data uses."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.agree import agree
from fzero.axis import Axis

OUT_OF_TURN = "a block called out of turn (all ranks must call blocks in one order, those that they do not skip)"


class Turns:
    """The order in which blocks are gathered, in forward and in backward.

    It starts as the order in which the blocks were given, and its reverse. After the first pass the ranks compare
    through the store what they did; if all did the same, with every block, that is the order from then on: blocks
    which a loss function calls in another order then cost nothing, and may be skipped.
    """

    def __init__(self, names: Sequence[str], axis: Axis) -> None:
        self.names, self.axis = tuple(names), axis
        self.forward = tuple(range(len(self.names)))
        self.backward = tuple(reversed(self.forward))
        self._settled = False

    def last_in_backward(self, number: int) -> int:
        """Return the place of a block's last gather in backward, after which its gradient is scattered."""
        return len(self.backward) - 1 - self.backward[::-1].index(number)

    def settle(self, forward: list[int], backward: list[int]) -> None:
        """Take what the first pass did for the order, if all ranks did the same. Communicates through the store."""
        if self._settled:
            return
        _, _, notes = agree(
            self.axis,
            "the order of blocks",
            lambda: None,
            lambda _: "",
            lambda _: {"forward": forward, "backward": backward},
        )
        everything = set(self.forward)
        if all(note == notes[0] for note in notes) and set(forward) == set(backward) == everything:
            self.forward, self.backward = tuple(forward), tuple(backward)
        self._settled = True


class Pass:
    """One forward and backward pass: gathers a block when it is its turn.

    A block that this rank skips is gathered, for the others, before the next one, or before its gradient is scattered,
    or at the end. A block that is called several times in a row is gathered once. One that is called when its turn is
    over is gathered once more after all ranks have agreed to through the store: slow, but never a gather of another
    block on another rank.

    Parameters
    ----------
    turns
        The order.
    fetch
        Gathers a block, by number: a collective.
    """

    def __init__(self, turns: Turns, fetch: Callable[[int], list[Tensor]]) -> None:
        self._turns, self._fetch = turns, fetch
        self._plan, self._next = turns.forward, 0
        self._done: tuple[list[int], list[int]] = ([], [])
        self._gathers = 0
        self._last: tuple[int, list[Tensor]] | None = None
        self._backward = False

    def gather(self, number: int) -> list[Tensor]:
        """Return the gathered buckets of a block."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        self._last = None  # freed before the next one is there
        if number in self._plan[self._next :]:
            at = self._plan.index(number, self._next)
            self._pass_over(at)
            self._next = at + 1
        else:
            where = f"block {self._turns.names[number]!r} after {self._gathers} gathers of blocks"
            agree(self._turns.axis, OUT_OF_TURN, lambda: None, lambda _: where)
        self._done[self._backward].append(number)
        self._gathers += 1
        self._last = (number, self._fetch(number))
        return self._last[1]

    def turn(self) -> None:
        """Forward is over, and backward begins."""
        self._pass_over(len(self._plan))
        self._last, self._backward = None, True
        self._plan, self._next = self._turns.backward, 0

    def catch_up(self, number: int) -> None:
        """Do, before the gradient of a block is scattered, all gathers that other ranks may have done before it."""
        self._pass_over(self._turns.last_in_backward(number) + 1)
        if self._last is not None and self._last[0] == number:
            self._last = None

    def end(self) -> None:
        """Backward is over."""
        self._pass_over(len(self._plan))
        self._last = None
        self._turns.settle(*self._done)

    def _pass_over(self, until: int) -> None:
        while self._next < until:
            number: Any = self._plan[self._next]
            self._next += 1
            self._gathers += 1
            self._fetch(number)
