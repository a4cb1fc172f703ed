"""Covering arrays with conditions: a short list of choices in which any few options meet in all combinations of values.

A fault of a composition shows where two or three settings meet, hardly ever only where six do (Kuhn, Wallace, Gallo
2004, "Software Fault Interactions and Implications for Software Testing"). Not all values go together, so a choice is
drawn in parts: a *base*, of options that depend on each other, for each base the possible choices of further groups of
options, and options that are free.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]  # a value of each option
DRAWN = 30  # choices from which each is taken


class Space:
    """All possible choices. parts: each a function that gives a base its choices of some more options, the same list
    for bases that have the same; free: options whatever the others are.
    """

    def __init__(
        self,
        bases: Sequence[Choice],
        parts: Sequence[Callable[[Choice], list[Choice]]],
        free: Mapping[str, Sequence[Any]],
    ):
        self.bases, self.free = list(bases), dict(free)
        self.parts = [[part(base) for part in parts] for base in self.bases]  # of each base
        self.lists = {id(choices): choices for of_base in self.parts for choices in of_base}
        first = [self.bases[0], *(choices[0] for choices in self.parts[0])]
        self.names = [name for names in (*first, self.free) for name in names]
        self.having: dict[tuple[str, Any], set[int]] = defaultdict(set)  # the bases with that value
        for i, base in enumerate(self.bases):
            for option in base.items():
                self.having[option].add(i)
        self._kept: dict[tuple[int, tuple[tuple[str, Any], ...]], list[Choice]] = {}

    def combinations(self, names: Sequence[str]) -> dict[tuple[Any, ...], None]:
        """All combinations of values that these options have together, in order."""
        found: dict[tuple[Any, ...], None] = {}
        seen = set()
        for base, lists in zip(self.bases, self.parts, strict=True):
            of_base = tuple((name, base[name]) for name in names if name in base)
            relevant = [choices for choices in lists if any(name in choices[0] for name in names)]
            if (key := (of_base, *map(id, relevant))) in seen:
                continue
            seen.add(key)
            free = [[((name, value),) for value in self.free[name]] for name in names if name in self.free]
            for pieces in itertools.product(*(_projected(choices, names) for choices in relevant), *free):
                known = dict([*of_base, *itertools.chain(*pieces)])
                found[tuple([known[name] for name in names])] = None
        return found

    def draw(self, draw: random.Random, wanted: Mapping[str, Any], count: int) -> list[Choice]:
        """So many with these values, each base as likely as another. Raises ValueError where there is none."""
        sets = [self.having[option] for option in wanted.items() if option[0] in self.bases[0]]
        numbers = sorted(set.intersection(*sets)) if sets else range(len(self.bases))
        fitting = {i: [self._fitting(choices, wanted) for choices in self.parts[i]] for i in numbers}
        possible = [i for i, lists in fitting.items() if all(lists)]
        if not possible:
            raise ValueError(f"no choice has {wanted}")
        return [self._drawn(draw, i, fitting[i], wanted) for i in draw.choices(possible, k=count)]

    def _drawn(self, draw: random.Random, i: int, lists: list[list[Choice]], wanted: Mapping[str, Any]) -> Choice:
        free = {name: wanted[name] if name in wanted else draw.choice(values) for name, values in self.free.items()}
        parts = (self.bases[i], *map(draw.choice, lists), free)
        return {name: value for part in parts for name, value in part.items()}

    def _fitting(self, choices: list[Choice], wanted: Mapping[str, Any]) -> list[Choice]:
        here = tuple((name, value) for name, value in wanted.items() if name in choices[0])
        key = id(choices), here
        if key not in self._kept:
            self._kept[key] = [choice for choice in choices if all(choice[name] == value for name, value in here)]
        return self._kept[key]


def _projected(choices: list[Choice], names: Iterable[str]) -> list[tuple[tuple[str, Any], ...]]:
    here = [name for name in names if name in choices[0]]
    return list(dict.fromkeys(tuple((name, choice[name]) for name in here) for choice in choices))


def cover(
    space: Space, groups: Iterable[Sequence[str]], cost: Callable[[Choice], float], draw: random.Random
) -> Iterator[Choice]:
    """Choices, until the options of each group have met in all combinations of their values.

    Greedy: for the first combination that has not occurred, some choices that have it are drawn, and the one is taken
    with most combinations that have not occurred for its cost.
    """
    missing = {tuple(names): space.combinations(names) for names in groups}

    def worth(choice: Choice) -> float:
        return sum(_of(choice, names) in left for names, left in missing.items()) / cost(choice)

    while missing:
        names, values = next((names, next(iter(left))) for names, left in missing.items())
        wanted = dict(zip(names, values, strict=True))
        taken = max(space.draw(draw, wanted, DRAWN), key=worth)
        for names, left in list(missing.items()):
            left.pop(_of(taken, names), None)
            if not left:
                del missing[names]
        yield taken


def _of(choice: Choice, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple([choice[name] for name in names])
