"""Grades the cases of reward-doctor and of math-verify's own tests with our graders, and fails where a verdict differs
for no reason listed in graders.yaml.

`python tests/parity/graders.py FOLDER` reads math-verify's source distribution in FOLDER, and the installed package
`reward_doctor`. A case is right if one of our readings says so: the strict one, for which a completion without any
marker is put into the task's own; or `answers: last`, of the completion as it stands. So a wrong case must be wrong in
both. A gold answer that a task does not read, such as LaTeX in GSM8K, is counted and left out.
"""

import importlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import yaml

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
logging.disable(logging.CRITICAL)

from cohort.harness.data import Group, Prompt, Rollout  # noqa: E402
from cohort.harness.run.grading import grade  # noqa: E402
from cohort.tasks.gsm8k import GSM8K  # noqa: E402
from cohort.tasks.math import Math  # noqa: E402

MARKERS = ("####", "\\boxed", "<answer>")
TASKS = {"gsm8k": (GSM8K, "#### {}"), "math": (Math, "\\boxed{{{}}}")}
EXPLAINED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


class Case(NamedTuple):
    source: str
    name: str
    gold: str
    completion: str
    is_right: bool


def cases(folder: Path) -> Iterator[Case]:
    """The cases of both packages; of math-verify's tests those with a gold answer, a completion and a verdict."""
    corpus = importlib.import_module("reward_doctor.corpus").ALL_CASES
    yield from (Case("reward-doctor", one.id, one.reference, one.completion, one.expect) for one in corpus)
    sys.modules["tests"] = tests = ModuleType("tests")  # other packages install one of that name
    tests.__path__ = [str(folder / "tests")]
    for path in sorted((folder / "tests").glob("test_*.py")):
        module = importlib.import_module(f"tests.{path.stem}")
        for name, marks in (
            (n, getattr(f, "pytestmark", [])) for n, f in vars(module).items() if n.startswith("test_")
        ):
            for mark in (one for one in marks if one.name == "parametrize"):
                fields = [field.strip() for field in mark.args[0].split(",")]
                for number, values in enumerate(mark.args[1] if {"gold", "pred"} <= set(fields) else ()):
                    row = dict(zip(fields, values, strict=True))
                    expected = bool(row["expected" if "expected" in row else "result"])
                    yield Case("math-verify", f"{path.stem}.{name}[{number}]", row["gold"], row["pred"], expected)


def verdicts(task: str, case: Case) -> tuple[bool, bool] | None:
    """(strict, last): whether the case is right by either reading; None if the task does not read the gold answer."""
    kind, form = TASKS[task]
    field = "solution" if task == "math" and "\\boxed" in case.gold else "answer"
    try:
        problem = kind().parse_row({"question": "?", field: case.gold})
    except ValueError:
        return None
    assert problem is not None
    is_marked = any(marker in case.completion for marker in MARKERS)

    def is_right(text: str, **settings: str) -> bool:
        group = Group(Prompt("1", "?", problem.answer), (), (Rollout(text, (1,), (0.0,), "stop"),))
        return (grade(kind(**settings), [group], 1)[0].correct or (False,))[0]

    marked = case.completion if is_marked else form.format(case.completion.strip())
    return is_right(marked), is_right(case.completion, answers="last")


def main(folder: Path) -> int:
    why = {name: reason for reason, names in EXPLAINED.items() for name in names}
    counts, needed, held = Counter[tuple[str, str, str]](), set[str](), True
    print(
        f"\n## reward-doctor {version('reward-doctor')}, math-verify {version('math-verify')}: verdicts that differ\n"
    )
    print("| task | case | theirs | ours: strict, last | why |\n| --- | --- | --- | --- | --- |")
    for case in cases(folder):
        for task in TASKS:
            found = verdicts(task, case)
            if found is None or any(found) == case.is_right:
                told = "no gold" if found is None else "right" if case.is_right else "wrong"
                counts[case.source, task, told] += 1
                continue
            key = next((key for key in (case.name, f"{task}:{case.name}") if key in why), "")
            needed.add(key)
            held &= bool(key)
            counts[case.source, task, "false positive" if any(found) else "false negative"] += 1
            ours = ", ".join("right" if one else "wrong" for one in found)
            told = "right" if case.is_right else "wrong"
            print(f"| {task} | {case.name} | {told} | {ours} | {why.get(key, 'UNEXPLAINED')} |")
    print("\n| cases of | task | both right | both wrong | ours alone right | theirs alone right | gold not read |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for source, task in dict.fromkeys(key[:2] for key in counts):
        kinds = ("right", "wrong", "false positive", "false negative", "no gold")
        print(f"| {source} | {task} | {' | '.join(str(counts[source, task, kind]) for kind in kinds)} |")
    for name in sorted(set(why) - needed):
        print(f"NOT NEEDED: the explanation of {name}")
    held &= set(why) <= needed
    print("Every difference is explained." if held else "Some differences are not explained, see above.")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
