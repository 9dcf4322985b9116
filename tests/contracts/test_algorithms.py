"""What holds for all algorithms of Cohort; tests/test_objectives.py has their numbers and their words."""

import ast
from pathlib import Path

import pytest
from cohort.harness import plugins

FILES = sorted((Path(__file__).resolve().parents[2] / "algorithms").glob("[!_]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_algorithm_fits_on_two_screens_and_its_reader_opens_one_other_file(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 80
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert len({node.module or alias.name for node in nodes for alias in node.names}) == 1


def test_the_rewards_that_algorithms_bring_and_the_losses_that_are_a_mean_over_all_tokens():
    brought = {name: plugins.load("algorithm", name).default_rewards for name in plugins.names("algorithm")}
    special = {"dapo": {"accuracy": 1.0, "overlong": 0.5}, "distill": {"accuracy": 0.0},
               "grpo_self_consistency": {"majority_vote": 1.0}}  # fmt: skip
    assert {name: own for name, own in brought.items() if own != {"accuracy": 1.0}} == special
    found = {name for name in plugins.names("algorithm") if plugins.load("algorithm", name).token_mean}
    named = {"cispo", "dapo", "distill", "kl_cov", "lite_ppo", "ppo", "reinforce_plus_plus", "vespo"}
    assert found == named  # the words of `objective` follow this fact, so that no reference sees another one
