"""Arithmetic word problems with worked answers, made by code.

Each of the templates is a function that draws names, things and numbers and returns a question and its answer. An
answer has one phrasing, two or three equations, and ends in "The answer is N."; it can be derived from the question
alone, which is what lets a model of a few hundred thousand parameters learn it within minutes.

Range of the numbers: every number in a question, an equation or an answer is a whole number from 1 to `LARGEST`;
factors and divisors are at most 6, most sums and differences add or take away at most 12.

This module knows no tokens and no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LARGEST = 60
"""No number in any problem is larger."""

# Names are one to four words long, and every answer begins with one. So no phrase stands at a fixed place of the
# answer, and training, which lays its blocks of masks from the first token, sees each phrase at every place in a block.
_NAMES = {
    "He": ("Tom", "Omar", "Ben Hill", "Luis Vega", "Mr. Webb", "Mr. Moss", "Mr. Ivan Stone", "Mr. Raj Patel"),
    "She": ("Anna", "Mia", "Zoe King", "Nora Lind", "Mrs. Hale", "Mrs. Diaz", "Mrs. Yuki Tan", "Mrs. Priya Rao"),
}
_THINGS = ("apples", "marbles", "stickers", "cookies", "pencils", "shells", "coins", "cards", "beads", "stamps")
_GOODS = ("hat", "book", "lamp", "cup", "scarf", "toy")
_FLOWERS = ("roses", "tulips", "lilies", "daisies")


@dataclass(frozen=True)
class Problem:
    """One problem: the question, its worked answer, the final number and the name of the template."""

    question: str
    answer: str
    result: int
    template: str

    def row(self) -> dict[str, str | int]:
        """The row for a JSONL file: `question` and `answer` for training, `result` for scoring."""
        return {"question": self.question, "answer": self.answer, "result": self.result, "template": self.template}


@dataclass(frozen=True)
class _Person:
    name: str
    pronoun: str

    @property
    def he(self) -> str:
        return self.pronoun.lower()


class _Draw:
    """Draws the parts of one problem. Bounds are inclusive and never let a result pass `LARGEST`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def number(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def start(self) -> int:
        """An amount to start from."""
        return self._rng.randint(4, 24)

    def change(self, most: int = 12) -> int:
        """An amount to add or to take away: at most `most`, which the caller keeps below what there is."""
        return self._rng.randint(2, min(12, most))

    def factor(self) -> int:
        return self._rng.randint(2, 6)

    def people(self, count: int) -> list[_Person]:
        pairs = [_Person(name, pronoun) for pronoun, names in _NAMES.items() for name in names]
        return self._rng.sample(pairs, count)

    def things(self) -> str:
        return self._rng.choice(_THINGS)

    def goods(self) -> str:
        return self._rng.choice(_GOODS)

    def flowers(self) -> list[str]:
        return self._rng.sample(_FLOWERS, 2)


Parts = tuple[str, str, int]
"""Question, worked answer without its last sentence, result."""

_TEMPLATES: dict[str, Callable[[_Draw], Parts]] = {}


def _template(function: Callable[[_Draw], Parts]) -> Callable[[_Draw], Parts]:
    _TEMPLATES[function.__name__.strip("_")] = function
    return function


@_template
def _buy_and_give(draw: _Draw) -> Parts:
    (one, two), things = draw.people(2), draw.things()
    a, b = draw.start(), draw.change()
    x = a + b
    c = draw.change(x - 1)
    y = x - c
    return (
        f"{one.name} has {a} {things}. {one.pronoun} buys {b} more and then gives {c} to {two.name}. "
        f"How many {things} does {one.name} have now?",
        f"{one.name} starts with {a} {things} and buys {b} more, so {one.he} has {a} + {b} = {x} {things}. "
        f"After giving {c} to {two.name}, {one.he} has {x} - {c} = {y} {things}.",
        y,
    )


@_template
def _boxes_and_loose(draw: _Draw) -> Parts:
    (one,), things = draw.people(1), draw.things()
    a, b, c = draw.factor(), draw.factor(), draw.change()
    x = a * b
    y = x + c
    return (
        f"{one.name} has {a} boxes with {b} {things} in each box, and {c} loose {things}. "
        f"How many {things} does {one.name} have?",
        f"{one.name} has {a} * {b} = {x} {things} in the {a} boxes. "
        f"With the {c} loose {things}, {one.he} has {x} + {c} = {y} {things}.",
        y,
    )


@_template
def _change_from_shop(draw: _Draw) -> Parts:
    (one,), item = draw.people(1), draw.goods()
    a, b = draw.factor(), draw.factor()
    x = a * b
    y = draw.change()
    paid = x + y
    return (
        f"A {item} costs {a} dollars. {one.name} buys {b} of them and pays with {paid} dollars. "
        f"How much change does {one.he} get?",
        f"{one.name} has to pay {b} * {a} = {x} dollars for the {b} things. "
        f"{one.pronoun} pays with {paid} dollars, so {one.he} gets {paid} - {x} = {y} dollars back.",
        y,
    )


@_template
def _pages(draw: _Draw) -> Parts:
    (one,) = draw.people(1)
    a, b = draw.number(3, 12), draw.change()
    x = 2 * a
    y = a + b
    z = y + x
    return (
        f"{one.name} reads {a} pages on Monday and {b} pages on Tuesday. On Wednesday {one.he} reads twice as many "
        f"pages as on Monday. How many pages does {one.he} read in all?",
        f"{one.name} reads 2 * {a} = {x} pages on Wednesday. On Monday and Tuesday {one.he} reads {a} + {b} = {y} "
        f"pages. In all {one.he} reads {y} + {x} = {z} pages.",
        z,
    )


@_template
def _share_equally(draw: _Draw) -> Parts:
    (one, two), things = draw.people(2), draw.things()
    k, q = draw.factor(), draw.number(2, 8)
    x = k * q
    b = draw.change(x - 1)
    a = x - b
    return (
        f"{one.name} has {a} {things} and {two.name} has {b} {things}. They share all of them equally among {k} "
        f"children. How many {things} does each child get?",
        f"{one.name} and {two.name} have {a} + {b} = {x} {things} together. "
        f"Each of the {k} children gets {x} / {k} = {q} {things}.",
        q,
    )


@_template
def _legs(draw: _Draw) -> Parts:
    (one,) = draw.people(1)
    a, b = draw.number(2, 9), draw.number(2, 9)
    x, y = 4 * a, 2 * b
    z = x + y
    return (
        f"{one.name} has a farm with {a} cows and {b} chickens. How many legs do the animals have?",
        f"{one.name} has {a} cows with 4 * {a} = {x} legs. The {b} chickens have 2 * {b} = {y} legs. "
        f"All the animals have {x} + {y} = {z} legs.",
        z,
    )


@_template
def _savings(draw: _Draw) -> Parts:
    (one,), item = draw.people(1), draw.goods()
    a, b = draw.factor(), draw.number(3, 6)
    x = a * b
    c = draw.change(x - 1)
    y = x - c
    return (
        f"{one.name} saves {a} dollars each week for {b} weeks. Then {one.he} buys a {item} for {c} dollars. "
        f"How many dollars does {one.he} have left?",
        f"{one.name} saves {b} * {a} = {x} dollars in {b} weeks. "
        f"After buying the {item} {one.he} has {x} - {c} = {y} dollars left.",
        y,
    )


@_template
def _bus(draw: _Draw) -> Parts:
    (one,) = draw.people(1)
    a = draw.number(8, 24)
    b = draw.change(a - 2)
    x = a - b
    c, d = draw.change(), draw.change()
    y = x + c
    z = y + d
    return (
        f"{one.name} drives a bus with {a} people. At the first stop {b} people get off and {c} get on. "
        f"At the second stop {d} people get on. How many people are on the bus now?",
        f"{one.name} has {a} - {b} = {x} people on the bus when {b} get off. When {c} get on, there are "
        f"{x} + {c} = {y} people. After the second stop there are {y} + {d} = {z} people.",
        z,
    )


@_template
def _ages(draw: _Draw) -> Parts:
    one, two = draw.people(2)
    a, b, c = draw.start(), draw.change(), draw.change()
    x = a + b
    y = x + c
    return (
        f"{one.name} is {a} years old. {two.name} is {b} years older than {one.name}. "
        f"How old will {two.name} be in {c} years?",
        f"{two.name} is {b} years older than {one.name}, so {two.name} is {a} + {b} = {x} years old now. "
        f"In {c} years {two.name} will be {x} + {c} = {y} years old.",
        y,
    )


@_template
def _garden(draw: _Draw) -> Parts:
    (one,), (first, second) = draw.people(1), draw.flowers()
    a, b, c, d = draw.factor(), draw.number(2, 5), draw.factor(), draw.number(2, 5)
    x, y = a * b, c * d
    z = x + y
    return (
        f"{one.name} plants {a} rows of {b} {first} and {c} rows of {d} {second}. How many flowers is that?",
        f"{one.name} plants {a} * {b} = {x} {first} and {c} * {d} = {y} {second}. "
        f"In all {one.he} plants {x} + {y} = {z} flowers.",
        z,
    )


@_template
def _bakery(draw: _Draw) -> Parts:
    (one,) = draw.people(1)
    a, b = draw.number(3, 6), draw.number(3, 6)
    x = a * b
    c = draw.change(x - 4)
    y = x - c
    d = draw.change(y - 1)
    z = y - d
    return (
        f"{one.name} bakes {a} trays of {b} rolls. In the morning {one.he} sells {c} rolls and in the evening {d} "
        f"rolls. How many rolls are left?",
        f"{one.name} bakes {a} * {b} = {x} rolls. After the morning there are {x} - {c} = {y} rolls. "
        f"After the evening there are {y} - {d} = {z} rolls left.",
        z,
    )


@_template
def _runners(draw: _Draw) -> Parts:
    one, two = draw.people(2)
    a, b = draw.factor(), draw.number(2, 5)
    x = a * b
    c = draw.change(x - 1)
    y = x - c
    z = x + y
    return (
        f"{one.name} runs {a} miles a day for {b} days. In that time {two.name} runs {c} miles less. "
        f"How many miles do they run together?",
        f"{one.name} runs {b} * {a} = {x} miles. {two.name} runs {x} - {c} = {y} miles. "
        f"Together they run {x} + {y} = {z} miles.",
        z,
    )


@_template
def _give_half(draw: _Draw) -> Parts:
    (one, two), things = draw.people(2), draw.things()
    x = draw.number(3, 15)
    a, b = 2 * x, draw.change()
    y = x + b
    return (
        f"{one.name} has {a} {things} and gives half of them to {two.name}. Later {one.he} finds {b} {things}. "
        f"How many {things} does {one.name} have in the end?",
        f"{one.name} gives away {a} / 2 = {x} {things}, so {one.he} keeps {x} {things}. "
        f"With the {b} {things} that {one.he} finds, {one.he} has {x} + {b} = {y} {things}.",
        y,
    )


@_template
def _three_pickers(draw: _Draw) -> Parts:
    one, two, three = draw.people(3)
    a, b = draw.start(), draw.change()
    x = a + b
    c = draw.change(x - 1)
    y = x - c
    return (
        f"{one.name} picks {a} plums. {two.name} picks {b} more than {one.name}, and {three.name} picks {c} fewer "
        f"than {two.name}. How many plums does {three.name} pick?",
        f"{two.name} picks {b} more plums than {one.name}, which is {a} + {b} = {x} plums. "
        f"{three.name} picks {c} fewer than {two.name}, which is {x} - {c} = {y} plums.",
        y,
    )


@_template
def _packs_to_share(draw: _Draw) -> Parts:
    (one,), things = draw.people(1), draw.things()
    k, q = draw.factor(), draw.number(2, 6)
    kept = draw.change(6)
    rest = k * q
    a = draw.factor()
    # The packs must hold exactly what is kept plus what is shared: look for a kept amount that makes it so.
    kept += -(rest + kept) % a
    x = rest + kept
    b = x // a
    return (
        f"{one.name} buys {a} packs of {b} {things} and keeps {kept} {things}. The rest is shared by {k} friends. "
        f"How many {things} does each friend get?",
        f"{one.name} buys {a} * {b} = {x} {things}. After keeping {kept} there are {x} - {kept} = {rest} {things}. "
        f"Each of the {k} friends gets {rest} / {k} = {q} {things}.",
        q,
    )


TEMPLATES = tuple(_TEMPLATES)
"""Names of the templates."""


def make_problem(rng: random.Random, template: str | None = None) -> Problem:
    """Draw one problem, of the given template or of one drawn at random."""
    name = template or rng.choice(TEMPLATES)
    question, worked, result = _TEMPLATES[name](_Draw(rng))
    return Problem(question, f"{worked} The answer is {result}.", result, name)


def make_problems(count: int, *, held_out: int, seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Draw two sets of different problems that share no question.

    Args:
        count: Number of problems to train on.
        held_out: Number of problems to test on; each template gets its equal share.
        seed: The same seed gives the same problems.

    Returns:
        The training problems and the held-out problems. No question occurs twice, in either or across both.
    """
    rng = random.Random(seed)
    seen: set[str] = set()

    def unseen(template: str | None = None) -> Problem:
        while True:
            problem = make_problem(rng, template)
            if problem.question not in seen:
                seen.add(problem.question)
                return problem

    tests = [unseen(TEMPLATES[index % len(TEMPLATES)]) for index in range(held_out)]
    return [unseen() for _ in range(count)], tests
