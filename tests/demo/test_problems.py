"""The generated word problems: honest, right, and never the same in training and test."""

import random
import re
from collections import Counter

import pytest

from marscli.demo.problems import LARGEST, TEMPLATES, make_problem, make_problems

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@pytest.fixture(scope="module")
def problems():
    rng = random.Random(1)
    return [make_problem(rng, template) for template in TEMPLATES for _ in range(150)]


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def test_there_are_at_least_twelve_templates():
    assert len(TEMPLATES) >= 12


def test_every_equation_is_right_and_there_are_two_or_three(problems):
    for problem in problems:
        equations = EQUATION.findall(problem.answer)
        assert len(equations) in (2, 3), problem
        for left, sign, right, result in equations:
            assert OPERATIONS[sign](int(left), int(right)) == int(result), problem


def test_the_answer_ends_in_the_result_of_the_last_equation(problems):
    for problem in problems:
        assert problem.answer.endswith(f" The answer is {problem.result}.")
        assert int(EQUATION.findall(problem.answer)[-1][3]) == problem.result


def test_nothing_in_an_answer_comes_from_nowhere(problems):
    """Every operand stands in the question, follows from an earlier equation, or is in the template's own words."""
    words = {"pages": {2}, "legs": {2, 4}, "give_half": {2}}  # "twice", legs of an animal, "half"
    for problem in problems:
        known = set(numbers(problem.question)) | words.get(problem.template, set())
        for left, _, right, result in EQUATION.findall(problem.answer):
            assert {int(left), int(right)} <= known, problem
            known.add(int(result))
        assert set(numbers(problem.answer)) <= known


def test_every_number_of_a_question_is_used(problems):
    for problem in problems:
        used = Counter(numbers(problem.answer))
        assert not Counter(numbers(problem.question)) - used, problem


def test_numbers_stay_in_the_stated_range(problems):
    for problem in problems:
        assert all(1 <= number <= LARGEST for number in numbers(problem.question + problem.answer)), problem


def test_an_answer_begins_with_a_name_of_the_question(problems):
    for problem in problems:
        name = re.match(r"(Mr\.|Mrs\.)?( ?[A-Z][a-z]+)+", problem.answer)[0]
        assert name in problem.question


def test_no_question_is_met_twice_and_no_held_out_question_in_training():
    training, held_out = make_problems(5000, held_out=150)
    questions = [problem.question for problem in training + held_out]
    assert len(set(questions)) == len(questions) == 5150


def test_every_template_is_held_out_equally_often():
    _, held_out = make_problems(0, held_out=10 * len(TEMPLATES))
    assert set(Counter(problem.template for problem in held_out).values()) == {10}


def test_the_seed_decides():
    assert make_problems(50, held_out=10, seed=3) == make_problems(50, held_out=10, seed=3)
    assert make_problems(50, held_out=10, seed=3) != make_problems(50, held_out=10, seed=4)
