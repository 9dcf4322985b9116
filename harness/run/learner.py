"""Owns every parameter of a run: policy, frozen reference, critic and their optimisers.

An update makes mu passes over a batch in minibatches; each minibatch is split into length-sorted micro-batches under a
token budget. Because the weight of every token is fixed on the minibatch (`loss_weight_BT`), the gradient does not
depend on the split.
"""

import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..base.streams import generator
from ..base.tensors import kl_k3
from ..data import Batch, InvalidRun, PolicyOutput
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..devices.sharding import full, is_sharded, local, shard, spread, spread_like
from ..interfaces import Distribution
from ..policy import flops, lora
from ..policy.forward import (
    Critic,
    PromptStates,
    completion_states,
    microbatch_tokens,
    prompt_states,
    prompt_tokens,
    recomputes,
    shared_prompts,
    token_logprobs,
    token_measure,
)
from ..policy.library import clear_gradients
from ..settings.run import Mismatch, RunSpec
from .schedules import adapted_kl_beta, kl_beta_factor, learning_rate_factor
from .value_head import Moments, fitted_head

LEAST_GRADIENT = 1e-6  # gradient norm below which AdamW's epsilon (1e-8 per weight) makes the update vanish
SAMPLED = 4096  # weights of each tensor that show whether an update changed it


class Learner:
    """Gives batches the log-probs and values that the objective reads, and updates policy and critic on them."""

    def __init__(
        self, spec: RunSpec, policy: nn.Module, reference: nn.Module | None = None, origin: nn.Module | None = None
    ):
        """`reference` is the model of `kl.reference`, on its device, which the learner freezes. `origin` is what
        reference and critic are copies of: of a policy that is sharded already a whole copy, by default the policy."""
        self.spec = spec
        self.start = 0  # training steps of the run before its own
        self.sampler_is_exact = False  # whether the engine's log-probs are the policy's before the step, to rounding
        self.algorithm = spec.algorithm  # with the KL weight of the step; spec.algorithm decides what a run needs
        self.policy = policy
        self.adapted = lora.has_adapter(policy)
        if self.adapted and spec.autocast:
            lora.hold_frozen_products(policy, torch.bfloat16)
        self.kl_beta = spec.algorithm.kl_beta  # of the next step, where it is adaptive
        self.warms_critic = False  # whether the last update has trained the critic alone
        self.fits_head = False  # whether the last update has fitted the critic's head
        self.lessons: flops.Lengths = []  # of the last pass over `teacher_logprobs_BT`
        self.still: list[bool] = []  # of each row of the last update, whether it was read without gradient
        self.replays: Batch | None = None  # rows that the next update learns besides, with their weights
        self.replayed: flops.Lengths = []  # the same rows
        self.shares_prompts = True  # unless `check_agreement` finds that it changes log-probs
        if reference is None and spec.algorithm.needs_reference and not self.adapted:
            reference = lora.around_frozen(origin or policy)
        self.reference = reference and lora.hold_scorer(reference, spec.autocast)
        shared = spec.algorithm.shares_trunk
        self.critic = Critic(origin or policy, shared=shared) if spec.algorithm.needs_critic else None
        if ranks.world_size() > 1:
            critic = () if self.critic is None else (self.critic.backbone, self.critic.head)  # each a group of its own
            for part in (policy, self.reference, *critic):
                if part is not None and not is_sharded(part):
                    shard(part, resolve_device(spec.device), autocast=spec.autocast)
        self.older: deque[dict[str, Tensor]] = deque(maxlen=spec.staleness)  # trained weights of the last steps
        rate = 0.0 if spec.control == "frozen" else spec.optimizer.learning_rate  # 0 moves no weight
        self.rates = {"policy": rate, "critic": spec.optimizer.critic_learning_rate}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        adamw = partial(torch.optim.AdamW, betas=(0.9, spec.optimizer.beta2), weight_decay=spec.optimizer.weight_decay)
        for name, module in (("policy", policy), ("critic", self.critic)):
            if module is not None:
                trained = [p for p in module.parameters() if p.requires_grad]
                self.optimizers[name] = adamw(trained, lr=self.rates[name], fused=True)

    @torch.no_grad()
    def annotate(self, batch: Batch) -> Batch:
        """The batch with old and reference log-probs, values and masks, each only if the objective reads it.

        The spec's algorithm decides, so a schedule that lowers the KL weight to 0 changes neither passes nor metrics.
        """
        if self.reads_old:
            old = batch.sampler_logprobs_BT if self.sampler_is_exact else self.logprobs(self.policy, batch)
            batch = batch.replace(old_logprobs_BT=old)
        if self.spec.algorithm.needs_reference:
            with lora.adapter_off(self.policy):  # whose base is the reference, unless there is another
                reference = self.logprobs(self.policy if self.reference is None else self.reference, batch)
            batch = batch.replace(ref_logprobs_BT=reference)
        if self.spec.algorithm.needs_collision:
            batch = batch.replace(collision_BT=self._measured(batch, "collision"))
        if (critic := self.critic) is not None:
            values_BT = self._forward_rows(batch, self._trunks()[-1], lambda own, x: critic(own.completion_mask_BT, x))
            batch = batch.replace(values_BT=values_BT)
        if self.spec.high_entropy_tokens < 1:
            counted = batch.completion_mask_BT & in_loss(batch, self.spec)[:, None]
            entropies_BT = self._measured(batch, "entropy")
            batch = batch.replace(gradient_BT=highest(entropies_BT, counted, self.spec.high_entropy_tokens))
        return batch

    @property
    def reads_old(self) -> bool:
        """Whether the objective reads old log-probs."""
        is_off_policy = self.spec.updates_per_step > 1 or self.spec.staleness > 0
        return self.spec.algorithm.needs_old_logprobs or is_off_policy or self.corrects

    @property
    def corrects(self) -> bool:
        """Whether a batch gets the importance weights of the spec: not if the sampler's log-probs are exact."""
        return self.spec.mismatch.correction != "none" and not self.sampler_is_exact

    def begin_step(self, step: int) -> dict[str, float]:
        """Set rates, KL weight and reference for training step `step`; returns, as metrics, those that vary."""
        metrics: dict[str, float] = {}
        step -= self.start
        settings = self.spec.optimizer
        if settings.schedule != "constant" or settings.warmup_steps:
            for name, optimizer in self.optimizers.items():
                before = self.spec.critic.warmup_steps if name == "policy" else 0  # its first step is after the warm-up
                factor = learning_rate_factor(settings, max(0, step - before), self.spec.steps - before)
                optimizer.param_groups[0]["lr"] = factor * self.rates[name]
            metrics["optimizer/learning_rate"] = self.optimizers["policy"].param_groups[0]["lr"]
        if self.spec.kl.schedule == "cosine":
            self.kl_beta = kl_beta_factor(step, self.spec.steps) * self.spec.algorithm.kl_beta
        if self.spec.kl.schedule != "constant":
            self.algorithm = self.spec.algorithm.model_copy(update={"kl_beta": self.kl_beta})
            metrics["kl/beta"] = self.kl_beta
        every = self.spec.kl.refresh_reference_every
        if every and step and step % every == 0 and self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())
        return metrics

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Make mu passes over the batch, and adapt the KL weight if its schedule says so. InvalidRun on a non-finite
        value.

        Metrics are means over the optimiser steps, but `mismatch/` (`staleness/` if older weights sampled) comes from
        the first step, and `policy/ratio_max` is the largest. `mismatch/kl` is KL(sampler || policy), nats per
        token. A gradient norm of at most `LEAST_GRADIENT` is rounding: weights and moments stay, and `policy/no_signal`
        (or `critic/`) is the share of such steps. `staleness/effective_samples` is the effective sample size of the
        importance weights w (policy / sampler, of whole completions), as a share: (sum of w)^2 / (rows * sum of w^2).
        In the critic's warm-up the policy's passes have no gradient, so its weights, moments and KL weight stay.
        """
        steps: list[dict[str, float]] = []
        self.warms_critic = step - self.start < self.spec.critic.warmup_steps
        if self.spec.staleness:  # later steps sample from these weights
            trained = ((name, p) for name, p in self.policy.named_parameters() if p.requires_grad)
            self.older.append({name: p.detach().clone() for name, p in trained})
        weights = weight_sample(self.policy)
        self.fits_head = step == self.start and self.spec.critic.head == "fitted"
        fitted = self._fit_head(batch) if self.fits_head else {}
        self.still = [] if (still_B := self._still(batch)) is None else still_B.tolist()
        for epoch in range(self.spec.optimizer.num_inner_epochs):
            for minibatch in self._minibatches(batch, step, epoch):
                steps.append(self._optimizer_step(minibatch, first=not steps))
        metrics = {name: float(np.mean([values[name] for values in steps if name in values])) for name in steps[0]}
        metrics |= fitted | left_out(batch, self.spec)
        metrics["policy/ratio_max"] = max(values["policy/ratio_max"] for values in steps)
        if self.critic is not None:
            metrics["critic/explained_variance"] = explained_variance(batch)
        if self.spec.kl.schedule == "adaptive" and not self.warms_critic:
            self.kl_beta = adapted_kl_beta(self.spec.kl, self.kl_beta, metrics["kl/reference"])
        rate = self.optimizers["policy"].param_groups[0]["lr"]
        return metrics | weights_metric(self.policy, weights, gradient_norm=metrics["policy/grad_norm"], rate=rate)

    def operations(
        self, costs: flops.Costs, drawn: flops.Lengths, trained: flops.Lengths, greedy: flops.Lengths
    ) -> dict[str, float]:
        """Operations of the last update's training step by purpose; scoring is every pass without gradient, also of the
        rewards' own models."""
        spec, algorithm = self.spec, self.spec.algorithm
        score = partial(flops.scored, costs, share=self.shares_prompts)
        still, moving = flops.parted(trained, self.still)
        learn = partial(flops.learned, costs, moving, spec, share=self.shares_prompts)
        scoring = score(trained) if self.reads_old and not self.sampler_is_exact else 0.0
        if algorithm.needs_reference:
            scoring += flops.scored(costs.reference or costs.frozen, trained, share=self.shares_prompts)
        scoring += score(trained, headed=False) if algorithm.needs_critic else 0.0
        scoring += score(self.lessons)
        scoring += score(trained) * (algorithm.needs_collision + (spec.high_entropy_tokens < 1))
        asked = {reward.distribution for reward in spec.rewards.values()} - {None}
        scoring += len(asked) * sum(score(rows) for rows in (drawn, greedy))
        for scorer in costs.scorers:
            scoring += sum(flops.scored(scorer, rows, share=False, headed=False) for rows in (drawn, greedy))
        batch_tokens = microbatch_tokens(spec.optimizer, resolve_device(spec.device), costs.vocabulary)
        learning = learn(batch_tokens=batch_tokens, has_gradient=not self.warms_critic)
        learning += spec.optimizer.num_inner_epochs * score(still)
        learning += score(trained, headed=False) if self.fits_head else 0.0
        again = flops.learned(costs, self.replayed, spec, share=False, batch_tokens=batch_tokens)
        learning += spec.optimizer.num_minibatches * again  # each of which replays all
        if algorithm.needs_critic and not algorithm.shares_trunk:
            learning += learn(headed=False)
        sampling = flops.sampled(costs.sampler or costs, [*drawn, *greedy])
        return {"sampling": sampling, "scoring": scoring, "learning": learning}

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's state; with several devices each tensor is spread over them."""
        return self.policy.state_dict()

    def state(self, *, to_train: bool = True) -> dict[str, Any]:
        """Everything that a resumed run needs besides the policy's folder, in the learner's own tensors; a run that
        trains no more needs the adapter alone."""
        state: dict[str, Any] = {"adapter": lora.adapter_weights(self.policy)} if self.adapted else {}
        if not to_train:
            return state
        state |= {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        if self.critic is not None:
            frozen = {name for name, p in self.critic.named_parameters() if not p.requires_grad}
            state["critic_parameters"] = {k: v for k, v in self.critic.state_dict().items() if k not in frozen}
        has_changed = self.start or self.spec.kl.refresh_reference_every  # else it is the run's first policy
        if has_changed and self.spec.kl.reference is None and self.reference is not None:
            state["reference"] = self.reference.state_dict()
        if self.spec.staleness:
            state["older"] = list(self.older)
        return state

    def load_state(self, policy: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from a saved policy and `state()`, which the first process has; ValueError if they do not fit."""
        try:
            if self.adapted:
                lora.load_adapter(self.policy, spread(self.policy, state["adapter"]))
            else:
                self.policy.load_state_dict(spread(self.policy, policy))
            if not state.keys() - {"adapter"}:  # of a run that trains no more
                return
            if self.reference is not None and "reference" in state:
                self.reference.load_state_dict(spread(self.reference, state["reference"]))
            own = dict(self.policy.named_parameters())
            for weights in state.get("older", ()):
                self.older.append({name: spread_like(own[name], value) for name, value in weights.items()})
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(_spread_moments(optimizer, state[name]))
            if self.critic is not None:
                weights = spread(self.critic, state["critic_parameters"])
                self.critic.load_state_dict(weights, strict=not self.adapted)
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"the checkpoint does not fit this run's model and algorithm: {error}") from error

    def _optimizer_step(self, minibatch: Batch, *, first: bool) -> dict[str, float]:
        """The metrics of an optimiser step on a minibatch with loss weights; `first`: the policy is the sampler's."""
        for optimizer in self.optimizers.values():
            clear_gradients(optimizer)
        self._train_mode(recomputes(self.policy))
        found, (still, moving) = _Sums(), self._by_gradient(minibatch)
        if still is not None and self._pass(still, found, first=first, learns=False):
            self.still, found, moving = [], _Sums(), minibatch  # the objective has another term, which teaches them
        if moving is not None:
            self._pass(moving, found, first=first)
        again = [] if (kept := self.replays) is None else [kept.rows(*one) for one in self._rows_by_length(kept, None)]
        for micro in again:
            with mixed_precision(micro.tokens_BT.device, self.spec.autocast):
                output = self._output(micro, [None, None], True)
            loss = -(micro.loss_weight_BT * output.logprobs_BT).sum()
            loss.backward()
            found.totals["replay/loss"] += loss.detach().double()
        self._train_mode(False)
        sums, ratios = found.totals, found.ratios
        if found.log_weights:
            log_weight_B = torch.cat(found.log_weights)
            weight_B = (log_weight_B - ranks.largest(log_weight_B.max())).exp()  # so none overflows, not all vanish
            sums |= {"weights": weight_B.sum(), "squares": weight_B.square().sum()}
        total = ranks.summed(torch.stack(list(sums.values())))
        highest = ranks.largest(torch.stack([torch.stack(values).max().double() for values in ratios.values()]))
        groups = {name: optimizer.param_groups[0]["params"] for name, optimizer in self.optimizers.items()}
        most = self.spec.optimizer.max_grad_norm
        norms = [full(nn.utils.clip_grad_norm_(own, most)).to(total) for own in groups.values()]
        read = torch.cat([total, highest, *(norm[None] for norm in norms)]).tolist()  # a GPU is waited for once
        totals = dict(zip([*sums, *ratios, *(f"{name}/grad_norm" for name in groups)], read, strict=True))
        if self.spec.staleness:
            share = totals.pop("weights") ** 2 / (totals.pop("squares") * len(minibatch))
            totals["staleness/effective_samples"] = share
        if not np.isfinite(totals["policy/loss"]):
            raise InvalidRun(f"the loss is {totals['policy/loss']}; lower optimizer.learning_rate or raise kl_beta")
        for name, optimizer in self.optimizers.items():
            if not np.isfinite(norm := totals[f"{name}/grad_norm"]):
                setting = "learning_rate" if name == "policy" else "critic_learning_rate"
                raise InvalidRun(f"the gradient norm of the {name} is {norm}; lower optimizer.{setting}")
            has_signal = norm > LEAST_GRADIENT
            totals[f"{name}/no_signal"] = float(not has_signal)
            if has_signal:  # or momentum, decay and a rescaled rounding would move the weights
                optimizer.step()
        return totals

    def _by_gradient(self, batch: Batch) -> tuple[Batch | None, Batch | None]:
        """The rows that are `_still`, and the others."""
        if (still_B := self._still(batch)) is None:
            return None, batch
        (still, moving), world = (rows_B.nonzero()[:, 0] for rows_B in (still_B, ~still_B)), ranks.world_size()
        if len(still) < world or 0 < len(moving) < world:  # each process must have one
            return None, batch
        return batch.rows(still), batch.rows(moving) if len(moving) else None

    def _still(self, batch: Batch) -> Tensor | None:
        """[B] bool: the rows without advantage. None if other terms are known to teach, or no row has advantages."""
        others = self.critic is not None or self.algorithm.kl_beta > 0 or self.algorithm.entropy_bonus > 0
        return None if others or batch.advantages_BT is None else (batch.advantages_BT == 0).all(dim=1)

    def _pass(self, batch: Batch, sums: "_Sums", *, first: bool, learns: bool = True) -> bool:
        """Add the gradients of a minibatch's rows, and their metrics to `sums`. Rows from which nothing `learns` are
        read without gradient: whether their loss has one after all."""
        is_on_policy = self.spec.updates_per_step == 1 and not self.spec.staleness
        behind = "staleness" if self.spec.staleness else "mismatch"  # why the sampler's log-probs differ
        has_gradient, missed = learns and not self.warms_critic, []
        held = torch.autocast(batch.tokens_BT.device.type, enabled=False)  # which holds what autocast casts within it
        with nullcontext() if recomputes(self.policy) else held:
            for _, part in self._parts(batch):
                with torch.set_grad_enabled(has_gradient):
                    prompts = [self._prompt_states(self.policy, part)]
                prompts += [self._prompt_states(trunk, part) for trunk in self._trunks()[1:]]
                for rows, width in self._rows_by_length(part, prompts[0]):
                    micro = part.rows(rows, width)
                    with mixed_precision(micro.tokens_BT.device, self.spec.autocast):
                        output = self._output(micro, [states and states.rows(rows) for states in prompts], has_gradient)
                    leaves = [] if learns else [x.requires_grad_() for x in (output.logprobs_BT, output.entropy_BT)]
                    if is_on_policy:  # the ratio is exactly 1, and still has its gradient
                        micro = micro.replace(old_logprobs_BT=output.logprobs_BT.detach())
                    loss, metrics = self.algorithm.minimised(micro, output)
                    loss.backward()
                    missed += [(x.grad != 0).any() for x in leaves if x.grad is not None]
                    logprobs = output.logprobs_BT.detach()
                    if self.spec.staleness:
                        sums.log_weights.append((logprobs - micro.sampler_logprobs_BT).double().sum(dim=1))
                    sums.ratios["policy/ratio_max"].append((logprobs - micro.old_logprobs_BT).abs().max().exp())
                    if first:
                        sampler = micro.sampler_logprobs_BT
                        sums.ratios[f"{behind}/max_ratio"].append((logprobs - sampler).abs().max().exp())
                        metrics = {**metrics, f"{behind}/kl": (micro.loss_weight_BT * kl_k3(sampler, logprobs)).sum()}
                    for name, value in metrics.items():
                        sums.totals[name] += value.detach().double()
                for states in prompts:
                    if states is not None:
                        states.backward()
        return bool(missed) and bool(ranks.largest(torch.stack(missed).any().float()))

    def _train_mode(self, on: bool) -> None:
        """transformers recomputes activations only in training mode, which changes nothing else without dropout."""
        for module in filter(None, (self.policy, self.critic)):
            module.train(on)

    def _trunks(self) -> list[nn.Module]:
        """The networks that read tokens: the policy, and a critic's separate backbone."""
        own = None if self.critic is None else self.critic.backbone
        return [self.policy] if own is None else [self.policy, own]

    def _output(self, micro: Batch, prompts: Sequence[PromptStates | None], has_gradient: bool) -> PolicyOutput:
        """Scores of a micro-batch, given its prompts as each trunk reads them."""
        tokens, mask, temperature = micro.tokens_BT, micro.completion_mask_BT, self.spec.sampling.temperature
        with torch.set_grad_enabled(has_gradient):
            hidden = completion_states(self.policy, tokens, mask, prompts[0])
            wanted = self.spec.algorithm.entropy_bonus > 0
            logprobs, entropy = token_logprobs(self.policy, tokens, mask, temperature, hidden, entropy_gradient=wanted)
        if self.critic is None:
            return PolicyOutput(logprobs, entropy)
        if self.critic.backbone is not None:  # after the log-probs, whose temporaries are freed by now
            hidden = completion_states(self.critic.backbone, tokens, mask, prompts[1])
        return PolicyOutput(logprobs, entropy, self.critic(mask, hidden))

    @torch.no_grad()
    def _fit_head(self, batch: Batch) -> dict[str, float]:
        """Fit the critic's head to the batch's returns. `critic/fitted_variance`: the share of their variance that it
        explains on prompts that it was not fitted on."""
        assert self.critic is not None
        head = self.critic.head
        halves = [Moments.of(full(head.weight)[:0], full(head.bias)[:0])] * 2
        half_B = torch.arange(len(batch), device=batch.tokens_BT.device) // batch.group_size % 2
        for rows, part, states in self._read(batch, self._trunks()[-1]):
            mask = part.completion_mask_BT
            returns, half = part.returns_BT[mask], half_B[rows][:, None].expand_as(mask)[mask]
            halves = [one.plus(Moments.of(states[half == i], returns[half == i])) for i, one in enumerate(halves)]
        fit_D, explained = fitted_head(*(Moments(*map(ranks.summed, one)) for one in halves))
        if is_sharded(head):  # a pass without gradient has left it gathered, and what is gathered is soon dropped
            head.reshard()  # pyright: ignore
        for own, fitted in ((head.weight, fit_D[None, :-1]), (head.bias, fit_D[-1:])):
            local(own).copy_(local(spread_like(own, fitted)))
        return {"critic/fitted_variance": explained}

    def logprobs(self, model: nn.Module, batch: Batch) -> Tensor:
        """[B, T] log-probs (nats) of the completion tokens under `model`, 0 elsewhere."""

        def measure(part: Batch, hidden: Tensor) -> Tensor:
            mask, temperature = part.completion_mask_BT, self.spec.sampling.temperature
            return token_logprobs(model, part.tokens_BT, mask, temperature, hidden)[0]

        return self._forward_rows(batch, model, measure)

    def token_means(self, batch: Batch, distribution: Distribution) -> Tensor:
        """[B]: the mean of a quantity of the policy's next-token distribution over each completion's tokens."""
        return self._measured(batch, distribution).sum(dim=1) / batch.completion_mask_BT.sum(dim=1)

    @torch.no_grad()
    def _measured(self, batch: Batch, distribution: Distribution) -> Tensor:
        measure = partial(token_measure, self.policy, temperature=self.spec.sampling.temperature, name=distribution)
        return self._forward_rows(batch, self.policy, lambda part, states: measure(states, part.completion_mask_BT))

    def _forward_rows(self, batch: Batch, model: nn.Module, measure: Callable[[Batch, Tensor], Tensor]) -> Tensor:
        """[B, T] in the batch's row order, from a function of a micro-batch and its `completion_states`."""
        result = torch.empty(0)
        for rows, part, hidden in self._read(batch, model):
            values = measure(part, hidden)
            if not len(result):
                result = values.new_zeros(batch.tokens_BT.shape)
            result[rows, : values.shape[1]] = values
        return ranks.summed(result)

    def _read(self, batch: Batch, model: nn.Module) -> Iterator[tuple[Tensor, Batch, Tensor]]:
        """The places of this rank's rows, the rows and their `completion_states`, a micro-batch at a time and in the
        run's precision."""
        for places, part in self._parts(batch):
            prompts = self._prompt_states(model, part)
            for rows, width in self._rows_by_length(part, prompts):
                micro, own = part.rows(rows, width), prompts and prompts.rows(rows)
                with mixed_precision(micro.tokens_BT.device, self.spec.autocast):
                    states = completion_states(model, micro.tokens_BT, micro.completion_mask_BT, own)
                    yield places[rows], micro, states

    def _parts(self, batch: Batch) -> list[tuple[Tensor, Batch]]:
        """The rows in parts, with their places, whose prompts each device reads at once: as many as a micro-batch has
        tokens for, or a single one. So the memory of prompts does not grow with their number."""
        every, world = torch.arange(len(batch), device=batch.tokens_BT.device), ranks.world_size()
        found = shared_prompts(self.policy, batch.tokens_BT, batch.completion_mask_BT) if self.shares_prompts else None
        if found is None:
            return [(every, batch)]
        (prompts_UT, prompt_B), budget = found, prompt_tokens(self.spec.optimizer, every.device)
        count, width = prompts_UT.shape
        parts = min(-(-count // (max(1, budget // width) * world)), max(1, count // world))
        if parts == 1:
            return [(every, batch)]
        places = [every[prompt_B * parts // count == i] for i in range(parts)]
        return [(one, batch.rows(one)) for one in places]

    def _prompt_states(self, model: nn.Module, batch: Batch) -> PromptStates | None:
        if not self.shares_prompts:
            return None
        with mixed_precision(batch.tokens_BT.device, self.spec.autocast):
            return prompt_states(model, batch.tokens_BT, batch.completion_mask_BT)

    def _minibatches(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """Row subsets of equal size with their loss weights; drawn again in each pass, keyed by (seed, step, epoch)."""
        count, order = self.spec.optimizer.num_minibatches, np.arange(len(batch))
        if count > 1:
            order = generator("minibatches", self.spec.seed, step, epoch).permutation(len(batch))
        for rows in np.split(order, count):
            part = batch.rows(torch.from_numpy(rows).to(batch.tokens_BT.device))
            kept_B, mask = in_loss(part, self.spec), part.completion_mask_BT
            weights = self.algorithm.loss_weights(mask[kept_B])
            yield part.replace(loss_weight_BT=weights.new_zeros(mask.shape).masked_scatter(kept_B[:, None], weights))

    def _rows_by_length(self, batch: Batch, prompts: PromptStates | None) -> list[tuple[Tensor, int]]:
        """Indices of this rank's rows, longest first, in micro-batches of one pass each, with the length of its longest
        row. With shared `prompts` a pass reads completions alone, whose lengths then count, each beside the longest
        prompt."""
        vocabulary, lengths_B = len(self.policy.get_output_embeddings().weight), batch.lengths_B  # pyright: ignore
        budget = microbatch_tokens(self.spec.optimizer, lengths_B.device, vocabulary)
        if prompts is not None:
            counts_B = batch.completion_mask_BT.sum(dim=1)
            lengths_B = counts_B + (lengths_B - counts_B).max()
        order = torch.argsort(lengths_B, descending=True, stable=True)
        lengths, own = torch.stack([lengths_B, batch.lengths_B])[:, order].tolist()
        sizes = packed(lengths, budget, ranks.world_size())
        widths = [max(own[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return list(zip(order.split(sizes), widths, strict=True))[ranks.rank() :: ranks.world_size()]


@dataclass
class _Sums:
    """What the passes of an optimiser step add up, on the device; read once, because every read waits for a GPU."""

    totals: dict[str, Any] = field(default_factory=partial(defaultdict, float))
    ratios: dict[str, list[Tensor]] = field(default_factory=partial(defaultdict, list))
    log_weights: list[Tensor] = field(default_factory=list)


def in_loss(batch: Batch, spec: RunSpec) -> Tensor:
    """[B] bool: the completions whose tokens are in the loss."""
    cut = batch.truncated_B if spec.overlong == "mask" else None
    return torch.ones_like(batch.lengths_B, dtype=torch.bool) if cut is None else ~cut


def left_out(batch: Batch, spec: RunSpec) -> dict[str, float]:
    """Shares of a batch's tokens: left out by `overlong: mask`; with gradient by `high_entropy_tokens`, of the rest."""
    mask, found = batch.completion_mask_BT, {}
    counted = (mask & in_loss(batch, spec)[:, None]).sum()
    if spec.overlong == "mask":
        found["train/masked_tokens"] = float(1 - counted / mask.sum())
    if batch.gradient_BT is not None:
        found["train/gradient_tokens"] = float(batch.gradient_BT.sum() / counted.clamp(min=1))
    return found


def packed(lengths: Sequence[int], budget: int, world: int = 1) -> list[int]:
    """The numbers of rows of successive micro-batches, from the lengths of all rows in falling order.

    Each is within the budget of tokens once padded to its longest row, or a single row. Of several ranks each takes
    every `world`-th micro-batch: their passes wait for each other, so there are as many for each, of as equal size as
    the order allows, and one after another in length.
    """

    def cut(most: int) -> list[int]:
        sizes, left = [], len(lengths)
        while left:
            sizes.append(min(max(1, most // lengths[-left]), left))
            left -= sizes[-1]
        return sizes

    sizes = cut(budget)
    if world == 1:
        return sizes
    count = -(-len(sizes) // world) * world
    sizes = cut(bisect.bisect_left(range(budget), True, key=lambda most: len(cut(most)) <= count))
    while len(sizes) < count:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest : largest + 1] = [sizes[largest] // 2, sizes[largest] - sizes[largest] // 2]
    return sizes


def highest(values_BT: Tensor, counted_BT: Tensor, share: float) -> Tensor:
    """[B, T] bool: this share of the tokens that count, at least one, of highest value; ties of the lowest are in."""
    values = values_BT[counted_BT]
    if not len(values):
        return counted_BT
    lowest = values.topk(max(1, round(share * len(values)))).values[-1]
    return counted_BT & (values_BT >= lowest)


def correct_mismatch(batch: Batch, settings: Mismatch) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages times the importance weights learner / engine, and metrics of the weights.

    An objective that is linear in its advantages has its policy term weighted, and its KL term as it is. Truncated:
    weights above the bound become the bound (truncated importance sampling). Masked: weights outside [1 / bound, bound]
    become 0. The weight of a completion is the product over its tokens.
    """
    mask = batch.completion_mask_BT
    log_weight_BT = (batch.old_logprobs_BT - batch.sampler_logprobs_BT) * mask
    if settings.level == "sequence":
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    raw_BT = torch.exp(log_weight_BT.clamp(-20, 20))
    outside_BT = (raw_BT > settings.bound) & mask
    if settings.correction == "truncated":
        weight_BT = raw_BT.clamp(max=settings.bound)
    else:
        outside_BT |= (raw_BT < 1 / settings.bound) & mask
        weight_BT = raw_BT.masked_fill(outside_BT, 0.0)
    shares = {"mismatch/weight": (weight_BT * mask).sum(), "mismatch/outside": outside_BT.sum()}
    metrics = {name: float(total / mask.sum()) for name, total in shares.items()}
    return batch.replace(advantages_BT=batch.advantages_BT * weight_BT), metrics


def explained_variance(batch: Batch) -> float:
    """1 - Var(return - value) / Var(return) over completion tokens; 0 where returns do not vary."""
    returns, values = batch.returns_BT[batch.completion_mask_BT], batch.values_BT[batch.completion_mask_BT]
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else 0.0


def _spread_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's saved state, each moment placed like its parameter; rates and decay are this run's."""
    parameters = optimizer.param_groups[0]["params"]

    def moved(like: Tensor, value: Tensor) -> Tensor:
        return spread_like(like, value) if value.dim() else value  # else a count of steps

    moments = {n: {k: moved(parameters[n], v) for k, v in own.items()} for n, own in state["state"].items()}
    return {"param_groups": optimizer.state_dict()["param_groups"], "state": moments}


def weight_sample(policy: nn.Module) -> list[Tensor]:
    """Copies of at most `SAMPLED` weights of each trained tensor, the same ones every time."""
    trained = [local(p.detach()).flatten() for p in policy.parameters() if p.requires_grad]
    return [p[:: p.numel() // SAMPLED | 1].clone() for p in trained]  # an odd stride visits all columns of a matrix


def weights_metric(
    policy: nn.Module, before: Sequence[Tensor], *, gradient_norm: float, rate: float
) -> dict[str, float]:
    """`policy/weights_changed`: the share of the sampled weights that an update changed. Empty if no effect is to be
    expected: the learning rate is 0 or the gradient norm at most `LEAST_GRADIENT`."""
    if not rate > 0 or not gradient_norm > LEAST_GRADIENT:
        return {}
    changed = torch.stack([(old != new).sum() for old, new in zip(before, weight_sample(policy), strict=True)]).sum()
    total = torch.full_like(changed, sum(map(len, before)))
    num_changed, num_sampled = ranks.summed(torch.stack([changed, total])).tolist()
    return {"policy/weights_changed": num_changed / num_sampled}
