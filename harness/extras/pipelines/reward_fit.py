"""The step of a stage that fits a reward model on the run's own rollouts.

DeepSeekMath's iterative GRPO (arXiv:2402.03300, section 4.1.4): the reward model of each round goes on from the last
one, with the policy's new samples and a tenth of the historical ones. Departures: correctness ranks completions, and
the first reward model starts from the policy that the run starts from.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...base.streams import generator
from ...data import InvalidRun
from ...devices import ranks
from ...policy import flops
from ...policy.sources import start_name
from ...run.build import Run, note_progress
from ...run.rollout import Clock
from .bradley_terry import fit_ranked, read_ranked, split


def reward_fit_step(
    fit: Any, run: Run, kept: Sequence[Sequence[Path]], models: Sequence[Path], should_stop: Callable[[], bool]
) -> tuple[dict[str, float], list[flops.Lengths]]:
    """The metrics of the fit, whose operations it charges, and no lengths: the policy neither samples nor learns.

    `fit` is a `RewardFit`; `kept` has the files of rollouts since the fit before it, and of older ones; `models` the
    folders of all fits up to this one. InvalidRun if no completions of a prompt differ in correctness, StoppedEarly if
    asked to stop meanwhile.
    """
    stage, clock = run.stage, Clock(run.now)
    run.engine.sleep()
    new, older = ranks.same(lambda: [read_ranked(files, "correct")[0] for files in kept])
    order = generator("reward model replay", run.spec.seed, stage.start).permutation(len(older))
    replayed = [older[i] for i in sorted(order[: round(fit.replay * len(older))])]
    parts = split([*new, *replayed])
    if not parts[0]:
        raise InvalidRun(
            f"stage '{stage.name}' has nothing to rank, because the kept answers to each problem are all right or all "
            "wrong; keep answers of more steps (checkpoints.rollouts_every)"
        )
    *before, out = models
    start = str(before[-1]) if before else start_name(run.whole, run.cache)
    on_progress = partial(note_progress, run.log, should_stop, "reward model")
    found = ranks.from_first(lambda: fit_ranked(parts, start, out, fit, run.spec.seed, on_progress))
    read, said = run.codec.encode, run.codec.encode_completion
    rows, held_out = ([(len(read(p)), [len(said(text)) for text in texts]) for p, texts in part] for part in parts)
    run.charge_flops(
        lambda costs: {
            "learning": fit.epochs * flops.fitted(costs, rows, headed=False),
            "scoring": flops.scored(costs, rows + held_out, share=False, headed=False),
        }
    )
    clock.lap("update")
    metrics = {
        "prompts": found.num_prompts, "pairs": found.num_pairs, "replayed": len(replayed), "loss": found.loss,
        "accuracy": found.accuracy, "held_out_pairs": found.held_out_pairs,
        "held_out_accuracy": found.held_out_accuracy,
    }  # fmt: skip
    logged = {f"reward_model/{name}": float(value) for name, value in metrics.items() if value is not None}
    return {**logged, **clock.metrics}, [[], [], []]
