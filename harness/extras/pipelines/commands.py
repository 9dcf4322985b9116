"""`cohort reward-model`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ...cli import options
from ...cli.commands import command
from ...console import terminal


@command(
    "reward-model",
    "cohort reward-model runs/train/my-run --model tiny --out models/reward",
    "cohort reward-model runs/studies/my-study/trials/* --model runs/train/my-run --out reward --by correct",
)
def reward_model_train(
    rollouts: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or files of rollouts.")],
    model: Annotated[str, typer.Option(help="Model to start from: 'tiny', a Hub id, a model folder or a run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the reward model.")],
    by: Annotated[str, typer.Option(help="What ranks completions: reward, correct, or a reward's name.")] = "reward",
    seed: Annotated[int, typer.Option(min=0, max=2**53, metavar="N", help="Seed of data order and initial head.")] = 0,
    sets: options.Sets = None,
    as_json: options.Json = False,
) -> None:
    """Fit a Bradley-Terry reward model on ranked rollouts (RLHF's second step).

    --set takes the settings of the stage reward_model (`cohort list stages`), such as epochs=2. Train with the model:
    --set rewards.reward_model.path=DIR.
    """
    from ...console.progress import phase_bar
    from ...record.run import model_folder
    from ...settings.errors import parsed
    from ...settings.raw import parse_overrides
    from .bradley_terry import train_reward_model
    from .stages.reward_model import RewardFit

    how = parsed(RewardFit, parse_overrides(sets or ()), "--set")
    with phase_bar("reward model") as bar:
        fit = train_reward_model(
            rollouts, model_folder(model), out, how, by=by, seed=seed,
            on_progress=lambda done, total: bar("fit", done, total),
        )  # fmt: skip
    if as_json:
        terminal.print_json({"directory": out, **vars(fit)})
        return
    rows = [
        ["fitted", f"{fit.num_prompts:,}", f"{fit.num_pairs:,}", terminal.percent(fit.accuracy)],
        ["held out", f"{fit.held_out_prompts:,}", f"{fit.held_out_pairs:,}", terminal.percent(fit.held_out_accuracy)],
    ]
    headers = ["prompts", "number", "pairs", "ranked rightly"]
    terminal.show_table("Bradley-Terry reward model", headers, rows, numeric=headers[1:])
    count, equal = fit.dropped_prompts, "rewards" if by == "reward" else f"values of '{by}'"
    groups, were = ("group", "was") if count == 1 else ("groups", "were")
    terminal.say(f"{count:,} {groups} had equal {equal} throughout and {were} skipped; last mean loss {fit.loss:.4f}")
    terminal.say(f"Use it: --set rewards.reward_model.path={shlex.quote(str(out))}")
