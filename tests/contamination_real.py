"""One model trained on 100 test questions of real GSM8K and 20 clean ones, probed: `python tests/contamination_real.py
DATA` prints a line for each. Questions are short ones (150 characters at most), models `tiny`; minutes on one core.

The clean ones learn other questions of the training split for as many steps. Beside the p-values of the probe stands
that of a one-sample test (sign test of question against variants), which shows why the probe has a reference.
"""

import sys
import time

import numpy as np
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.run.contamination import knowledge
from cohort.harness.spec.run import parse_run
from contaminated import findings, trained_on
from scipy import stats

CODEC = TextCodec(tiny_tokenizer())
STEPS = 100


def main(path: str) -> None:
    spec = parse_run({"task": {"name": "gsm8k", "path": path}, "algorithm": "grpo"}, "here")
    probed, reference, train = (
        {key: text for key, text in spec.task.questions(split).items() if len(text) <= 150}
        for split in ("test", "validation", "train")
    )
    others = list(train.values())
    start = trained_on(others[:400], tiny_model(0), CODEC, steps=100)
    models = {"trained on 100 test questions": list(probed.values())[:100]}
    random = np.random.default_rng(0)
    models |= {f"clean {n}": list(random.choice(others[400:], 100, replace=False)) for n in range(1, 21)}
    for name, texts in models.items():
        began = time.perf_counter()
        policy = trained_on(texts, start, CODEC, steps=STEPS)
        found = findings(probed, reference, policy, CODEC, spec)
        known = knowledge(probed, policy, CODEC, spec)
        above = [one.renumbered > 0 for one in known.values() if one.renumbered == one.renumbered]
        naive = stats.binomtest(sum(above), len(above), alternative="greater").pvalue
        exact = sum(one.exact for one in known.values())
        print(
            f"{name}: {'flagged' if any(one.is_flagged for one in found) else 'not flagged'};",
            "; ".join(f"{one.probe} {one.probed:.3f} / {one.reference:.3f}, p {one.p_adjusted:.2g}" for one in found),
            f"; {exact} of {len(known)} word for word; one-sample p {naive:.2g}; {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
