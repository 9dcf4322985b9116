"""Plugins are found by file name or entry point, loaded on demand, and refused with the nearest name."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import cohort.algorithms
import pytest
from cohort.harness import plugins
from cohort.harness.interfaces import Algorithm, Reward, Task
from cohort.harness.settings.load import load_run, load_study
from entry_points import declare
from queues import python

ROOT = Path(__file__).resolve().parents[1]
FOLDERS: dict[plugins.Kind, str] = {
    "algorithm": "algorithms", "task": "tasks", "reward": "harness/rewards", "sampler": "harness/samplers",
    "engine": "harness/engines", "mirror": "no folder but those of extras", "stage": "no folder but those of extras",
}  # fmt: skip

THIRD_PARTY = """
from typing import Literal
from cohort.algorithms.grpo import GRPO

class Elsewhere(GRPO):
    name: Literal["{name}"] = "{name}"
"""


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, class_name: str, kind: str = "algorithm",
    entry: str | None = None,
) -> None:  # fmt: skip
    """Put a distribution with one plugin on the path, as an installer would; `entry` is its name, if not `name`."""
    module = f"plugin_{name}"
    (folder / f"{module}.py").write_text(source)
    declare(folder, monkeypatch, module, {f"{kind}s": {entry or name: f"{module}:{class_name}"}})


def printed(page: str, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)[number]


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_public_file_of_the_folder_is_a_plugin_and_no_other(kind):
    folders = [ROOT / FOLDERS[kind], *(ROOT / "harness/extras").glob(f"*/{kind}s")]
    folders += [ROOT / "tests/engines"] if kind == "engine" else []  # as conftest adds it
    files = {f.stem for folder in folders for f in folder.glob("*.py") if not f.stem.startswith("_")}
    assert set(plugins.names(kind)) == files
    assert plugins.names(kind) == sorted(files)


def test_listing_names_imports_no_plugin():
    code = "import sys; from cohort.harness import plugins; print(*plugins.names('algorithm')); print(*sys.modules)"
    listed, loaded = python(code, check=True).stdout.splitlines()
    assert "grpo" in listed.split()
    assert [name for name in loaded.split() if name.startswith("cohort.algorithms.")] == []


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("algorithm", "grpoo", "did you mean 'grpo'? "),
        ("task", "arithmatic", "did you mean 'arithmetic'? "),
        ("reward", "acuracy", "did you mean 'accuracy'? "),
        ("engine", "transformer", "did you mean 'transformers'? "),
        *(("algorithm", name, "") for name in ("_functional", "__init__", "../tasks/arithmetic", "os", "", "zzzzzz")),
    ],
)
def test_what_is_no_plugin_is_refused_with_the_nearest_name_if_it_resembles_one(kind, name, hint):
    with pytest.raises(ValueError, match=rf"^unknown {kind} '{re.escape(name)}'; {re.escape(hint)}available: "):
        plugins.load(kind, name)


def test_a_plugin_without_a_method_that_all_need_is_told_which(tmp_path, monkeypatch):
    source = printed("docs/extending.md", "python", 3).replace("def score(", "def scores(")
    install(tmp_path, monkeypatch, "unfinished", source, "StatesOnce", kind="reward")
    message = (
        r"reward 'unfinished' of .*: StatesOnce must define score, as each Reward does; add it in .*plugin_unfinished"
    )
    with pytest.raises(ValueError, match=message):
        load_run(None, ["task=arithmetic", "algorithm=grpo", "rewards.unfinished=0.5"])


def test_the_algorithm_of_the_docs_works_as_printed(tmp_path, monkeypatch):
    import torch
    from fakes import batch_of

    source = printed("docs/extending.md", "python")
    install(tmp_path, monkeypatch, "positive_grpo", source, "PositiveGRPO")
    settings = ["algorithm=positive_grpo", "algorithm.negative_scale=0.5"]
    algorithm = load_run(None, ["task=arithmetic", *settings]).algorithm
    # rewards 1 and 0: standardised +-0.5 / (sqrt(0.5) + 0.0001), the negative one halved
    advantages = algorithm.advantages(batch_of([[1], [1]], [1.0, 0.0], 2)).advantages_BT
    assert torch.allclose(advantages[:, 0], torch.tensor([0.70701, -0.35350]), atol=1e-5)


def test_the_reward_of_the_docs_works_as_printed_and_the_study_of_the_tutorial_is_valid(tmp_path, monkeypatch):
    from fakes import graded_group

    file = tmp_path / "my_study.yaml"
    file.write_text(printed("docs/tutorial.md", "yaml"))
    assert [arm.label for arm in load_study(str(file)).design_arms()] == ["group_size=4", "group_size=16"]
    source = printed("docs/extending.md", "python", 3)
    install(tmp_path, monkeypatch, "states_once", source, "StatesOnce", kind="reward")
    spec = load_run(None, ["task=arithmetic", "algorithm=grpo", "rewards.states_once=0.5"])
    assert {name: reward.weight for name, reward in spec.rewards.items()} == {"accuracy": 1.0, "states_once": 0.5}
    group = graded_group([0, 1], completions=("#### 1", "#### 1 #### 2"))
    assert spec.rewards["states_once"].score(group) == [1.0, 0.0]


@pytest.mark.parametrize("method", ["advantages", "loss", "loss_weights"])
def test_an_algorithm_with_a_method_of_its_own_must_state_its_objective(method):
    from cohort.algorithms.grpo import GRPO

    own = {"__module__": __name__, method: lambda self, *arguments: getattr(GRPO, method)(self, *arguments)}
    with pytest.raises(ValueError) as refused:
        type("Changed", (GRPO,), own)
    assert str(refused.value) == (
        f"{__name__}.Changed must state its own `objective`, because it has its own {method}; "
        "write objective = {...} with what differs"
    )
    stated = type("Stated", (GRPO,), {**own, "objective": {"clip": "none"}})
    assert stated.objective == {**GRPO.objective, "clip": "none"}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="because it has its own advantages and loss"):
        type("Bare", (Algorithm,), {"__module__": __name__, "advantages": GRPO.advantages, "loss": GRPO.loss})
    facts = {"__module__": __name__, "sees_gold": False, "needs_old_logprobs": property(lambda self: True)}
    assert type("Facts", (GRPO,), facts).objective == GRPO.objective  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_without_exactly_one_public_class_is_refused(count):
    module = ModuleType("cohort.algorithms.broken")
    base = plugins.load("algorithm", "grpo")
    for number in range(count):
        setattr(module, f"Made{number}", type(f"Made{number}", (base,), {"__module__": module.__name__}))
    # Imported and private classes do not count.
    module.GRPO = base  # pyright: ignore[reportAttributeAccessIssue]
    module._Hidden = type("_Hidden", (base,), {"__module__": module.__name__})  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=f"must define exactly one public Algorithm class, found {count}"):
        plugins._only_plugin(module, "algorithm")


def test_a_new_file_alone_makes_an_algorithm(tmp_path, monkeypatch):
    (tmp_path / "brand_new.py").write_text(THIRD_PARTY.format(name="brand_new"))
    monkeypatch.setattr(cohort.algorithms, "__path__", [*cohort.algorithms.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    assert "brand_new" in plugins.names("algorithm")
    spec = load_run(None, ["task=arithmetic", "algorithm=brand_new", "algorithm.kl_beta=0"])
    assert type(spec.algorithm).__module__ == "cohort.algorithms.brand_new"
    assert not spec.algorithm.needs_reference


@pytest.mark.attack("An installed package that takes the name of a built-in plugin")
def test_an_entry_point_with_the_name_of_a_built_in_is_refused(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "shadow", THIRD_PARTY.format(name="dr_grpo"), "Elsewhere", entry="dr_grpo")
    plugins.load.cache_clear()
    with pytest.raises(ValueError) as caught:
        plugins.load("algorithm", "dr_grpo")
    assert str(caught.value) == (
        "algorithm 'dr_grpo' is declared by Cohort itself and package plugin_shadow; a name means one algorithm, "
        "so rename the entry point under cohort.algorithms or uninstall its package"
    )
    assert plugins.load("algorithm", "grpo").__module__ == "cohort.algorithms.grpo"  # what is not ambiguous still works
    for package in ("first", "second"):
        install(tmp_path, monkeypatch, package, THIRD_PARTY.format(name="twice"), "Elsewhere", entry="twice")
    with pytest.raises(ValueError, match="is declared by package plugin_first and package plugin_second; "):
        plugins.load("algorithm", "twice")


@pytest.mark.parametrize(
    ("source", "class_name", "complaint"),
    [
        (THIRD_PARTY.format(name="other"), "Elsewhere", r"must declare name: Literal\['wrong'\] .*, got 'other'$"),
        ("class Elsewhere: pass", "Elsewhere", "must be a class that inherits from .*interfaces.Algorithm$"),
        ("", "Elsewhere", "cannot be loaded: .*Elsewhere"),
        ("import no_such_module", "Elsewhere", "cannot be loaded: No module named 'no_such_module'"),
        ("x = 1\n1 / 0", "Elsewhere", r"cannot be loaded \(.*plugin_wrong.py, line 2\): ZeroDivisionError"),
        ("def f(:", "Elsewhere", r"cannot be loaded \(.*plugin_wrong.py, line 1\): SyntaxError"),
    ],
)
def test_an_entry_point_that_is_no_plugin_says_what_is_wrong(tmp_path, monkeypatch, source, class_name, complaint):
    install(tmp_path, monkeypatch, "wrong", source, class_name)
    monkeypatch.delitem(sys.modules, "plugin_wrong", raising=False)
    start = r"^algorithm 'wrong' of package plugin_wrong \(plugin_wrong:Elsewhere\) "
    with pytest.raises(ValueError, match=start + complaint):
        plugins.load("algorithm", "wrong")


def test_an_error_that_an_installed_plugin_raises_names_it_with_file_and_line(tmp_path, monkeypatch):
    source = "from cohort.harness.interfaces import Reward\n\nclass Boom(Reward):\n"
    source += "    def score(self, group):\n        return {}['key']\n"
    install(tmp_path, monkeypatch, "boom", source, "Boom", kind="reward")
    reward = plugins.load("reward", "boom")
    assert issubclass(reward, Reward)
    with pytest.raises(KeyError) as raised:
        reward().score(None)  # pyright: ignore[reportArgumentType]
    place = f"{tmp_path / 'plugin_boom.py'}, line 5"
    assert plugins.raised_by(raised.value) == f"reward 'boom' of package plugin_boom failed ({place}): KeyError: 'key'"
    assert plugins.raised_by(ValueError("raised by no plugin")) is None
    task = plugins.load("task", "gsm8k")  # what a plugin of Cohort tells a user stays as it is
    assert issubclass(task, Task)
    with pytest.raises(ValueError) as told:
        task.model_validate({"path": str(tmp_path)}).prompts("train")
    assert plugins.raised_by(told.value) is None
