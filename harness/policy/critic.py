"""PPO's critic: a value head on a copy of the policy's backbone, or on the policy's own hidden states."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from harness.policy.forward import backbone, token_values


class Critic(nn.Module):
    """A value per token: a linear head that starts at zero, on a copy of the policy's backbone, or (`shared`) on the
    policy's own hidden states, which its loss then moves too."""

    def __init__(self, policy: nn.Module, *, shared: bool = False):
        super().__init__()
        body = backbone(policy)
        frozen = {id(p): p for p in body.parameters() if not p.requires_grad}  # under an adapter: shared, not copied
        self.backbone = None if shared else deepcopy(body, frozen)
        self.head = nn.Linear(policy.config.hidden_size, 1)  # pyright: ignore
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        first = next(policy.parameters())
        self.head.to(device=first.device, dtype=torch.float32 if frozen else first.dtype)

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        assert self.backbone is not None, "without a backbone of its own: state_values(critic.head, ...)"
        return token_values(self.backbone, self.head, tokens_BT, mask_BT)
