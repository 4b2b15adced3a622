"""What reasoning-gym's verifiers that evaluate answers are given, and that no other evaluates."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from megatron_dppo.tasks.rewards.gym import EVALUATED, GymVerifier, gym_factory
from megatron_dppo.tasks.rewards.verdict import Answered

ATTACKS = [
    "__import__('pathlib').Path('{mark}').touch()",
    "[__import__('pathlib').Path('{mark}').touch(), 1]",
    "(lambda: open('{mark}', 'w'))()",
    "[open('{mark}','w') for _ in [1]]",
    "open ('{mark}', 'w')",
    "(open)('{mark}', 'w')",
    "(\nopen\n)\n('{mark}', 'w')",
    "1 if open('{mark}', 'w') else 2",
    "f\"{{open('{mark}', 'w')}}\"",
    "sympify(\"open('{mark}', 'w')\")",
    "x!(open('{mark}', 'w'))",
    "2 + eval(\"open('{mark}', 'w')\")",
]


@pytest.mark.parametrize("dataset", sorted(EVALUATED))
def test_nothing_is_called_and_right_answers_keep_their_scores(dataset: str, tmp_path: Path) -> None:
    """In this process: the sandbox plays no part. The verifier alone, as upstream has it, does what the text says."""
    verifier = GymVerifier(dataset, {"seed": 3, "size": 30})
    made = gym_factory().create_dataset(dataset, seed=3, size=30)
    entries = [made[number] for number in range(30)]
    for entry in entries:
        item = Answered(
            question="", reference=entry["answer"], response="", answer=entry["answer"], metadata=entry["metadata"]
        )
        assert verifier(item).score == made.score_answer(entry["answer"], entry) == 1.0
    mark = tmp_path / "mark"
    for attack in ATTACKS:
        text = attack.format(mark=mark)
        item = Answered(question="", reference=entry["answer"], response="", answer=text, metadata=entry["metadata"])
        verdict = verifier(item)
        assert not verdict.error
        assert verdict.score <= 0.05
        assert not mark.exists(), text
    made.score_answer(ATTACKS[0].format(mark=mark), entry)
    assert mark.exists()


@pytest.mark.parametrize(
    ("dataset", "answer", "as_upstream"),
    [
        ("countdown", "(1 + 2)*3 - 4/5", True),
        ("countdown", "2**3 - .5", True),
        ("polynomial_multiplication", "6*x**3 - 2*x*y + 1", True),
        ("simple_integration", "x**3/3 + sin(2*x) + exp(-x) + C", True),
        ("intermediate_integration", "-sqrt(2)*log (x + 1)/2", True),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("binary_matrix", "[[0, -1],\n [1, 0]]", True),
        ("n_queens", "[['_', 'Q'], [\"Q\", '_']]", True),
        ("string_insertion", "ABCDE", True),
        ("countdown", "exit()", False),
        ("countdown", "x.real", False),
        ("countdown", "1" * 50 + "@", False),
        ("spiral_matrix", "list('123')", False),
        ("spiral_matrix", "[1] * 10**9", False),
    ],
)
def test_what_goes_to_the_verifier(dataset: str, answer: str, as_upstream: bool) -> None:
    assert (GymVerifier(dataset)._readable(answer) == answer) == as_upstream


def test_no_other_dataset_evaluates() -> None:
    """Everything that a verifier calls in its own file is looked through; a new release has to be looked at again."""
    evaluators = {"eval", "exec", "parse_expr", "sympify", "compile", "__import__", "import_module"}
    known_harmless = {"number_sorting", "bitwise_arithmetic"}  # they evaluate the reference, and the question
    found = set()
    for name, (made, _) in gym_factory().DATASETS.items():
        tree = ast.parse(inspect.getsource(inspect.getmodule(made)))
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        reached, pending = set(), ["score_answer"]
        while pending:
            function = functions.get(pending.pop())
            if function is None or function.name in reached:
                continue
            reached.add(function.name)
            for call in ast.walk(function):
                if isinstance(call, ast.Call):
                    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
                    pending.append(called)
                    if called in evaluators and called not in functions:
                        found.add(name)
    assert found == set(EVALUATED) | known_harmless
