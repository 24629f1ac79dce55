"""The critic: a value for every token of a completion, learned beside the policy on the same minibatches."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from suite import distributed, optim, sharding
from suite.batch import Batch, masked_mean
from suite.config import RunConfig
from suite.objectives import objective_reads
from suite.objectives.aggregation import keep
from suite.objectives.gae import value_targets
from suite.objectives.value_loss import value_loss
from suite.policy import Policy
from suite.reward_model import ScalarReward
from suite.run import NonFiniteLoss


class ValueModel(torch.nn.Module):
    """A language model's backbone with a linear head: one value per token, in fp32, after reading it."""

    def __init__(self, backbone: PreTrainedModel, head: torch.nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone.eval().requires_grad_(True), head.float().requires_grad_(True)

    def forward(self, ids_BL: torch.Tensor, attention_BL: torch.Tensor) -> torch.Tensor:
        """Values (B, L), reward units; those of padding mean nothing. Positions count from the first real token."""
        position = (attention_BL.cumsum(-1) - 1).clamp(min=0)
        out = self.backbone(input_ids=ids_BL, attention_mask=attention_BL, position_ids=position, use_cache=False)
        # a copy, no view: a sharded model's output must not be changed in place
        return self.head(out.last_hidden_state.float()).squeeze(-1).clone()

    @classmethod
    def from_policy(cls, policy: Policy) -> ValueModel:
        """The policy's backbone, copied, under a head of zeros: every value starts at 0, without any randomness."""
        backbone = copy.deepcopy(policy.model.base_model)
        head = torch.nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False, device=policy.model.device)
        torch.nn.init.zeros_(head.weight)
        return cls(backbone, head)

    @classmethod
    def from_reward_model(cls, config: RunConfig, policy: Policy) -> ValueModel:
        """A reward model's backbone and head: the value at a completion's last token is the reward model's score.

        Raises ValueError, naming `critic.init`, if it is no reward model (see `suite.reward_model`), has no head that
        reads every token, or numbers the policy's tokens otherwise.
        """
        name = config.critic.init
        try:
            reward = ScalarReward.load(name, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"critic.init: {error}") from error
        head, words = getattr(reward.model, "score", None), reward.tokenizer.get_vocab()
        if not isinstance(head, torch.nn.Linear):
            raise ValueError(
                f"critic.init: {name!r} has no linear head that reads every token; take another or 'policy'"
            )
        other = [word for word, index in policy.tokenizer.get_vocab().items() if words.get(word) != index]
        if other:
            raise ValueError(
                f"critic.init: {name!r} numbers {len(other)} of the policy's tokens otherwise ({other[0]!r} among "
                "them); the reward model and model.path must have one tokenizer"
            )
        return cls(reward.model.base_model, head)


class Critic:
    """A value model with its optimizer: AdamW as the policy's, but for a rate and a gradient bound of its own.

    The value of a token is that of the state in which it was chosen: read off the token before it. `evaluate`,
    then the objective, then `aim` prepare a rollout batch; `update` takes one optimizer step on a minibatch of it.
    """

    def __init__(self, config: RunConfig, model: ValueModel) -> None:
        self._config, self._critic, self.model = config, config.critic, model
        self._optim = replace(
            config.optim, lr=self._critic.lr, warmup_steps=self._critic.warmup_steps, schedule="constant"
        )
        self.optimizer = optim.build(model.parameters(), self._optim)

    def _values(self, batch: Batch) -> torch.Tensor:
        values_BL = self.model(batch.input_ids_BL, batch.attention_mask_BL)
        return keep(values_BL[:, -batch.mask_BT.shape[1] - 1 : -1], batch.mask_BT)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        """Fills `values_BT` (fp32, 0 at masked positions), micro-batch by micro-batch."""
        batch.values_BT = distributed.values(batch, self._optim.micro_batch_size, self._values)

    def aim(self, batch: Batch, step: int) -> dict[str, float]:
        """Fills `returns_BT` from `values_BT` and the objective's `rewards_BT`; the batch's metrics.

        The targets have lambda `gae_lambda_value`, or 1 (Monte-Carlo returns) in a batch that pretrains. Explained
        variance is 1 - Var(return - value) / Var(return) with Monte-Carlo returns in either case, over the trained
        tokens; it is left out where the returns do not vary.
        """
        assert batch.values_BT is not None
        assert batch.rewards_BT is not None
        mask_BT, gamma = batch.mask_BT, self._config.objective.gamma
        pretrains = step < self._critic.pretrain_steps
        sampled_BT = value_targets(batch.rewards_BT, batch.values_BT, mask_BT, gamma, 1.0)
        gae_lambda = 1.0 if pretrains else self._critic.gae_lambda_value
        batch.returns_BT = value_targets(batch.rewards_BT, batch.values_BT, mask_BT, gamma, gae_lambda).float()
        metrics = {"critic/value_mean": masked_mean(batch.values_BT, mask_BT)}
        returns, values = sampled_BT[mask_BT].double(), batch.values_BT[mask_BT].double()
        spread = float(returns.var(correction=0)) if len(returns) else 0.0
        if spread > 0:
            metrics["critic/explained_variance"] = 1 - float((returns - values).var(correction=0)) / spread
        return metrics

    def update(self, mini: Batch, step: int) -> dict[str, float]:
        """One optimizer step on a minibatch; its metrics. Without a trained token the weights stay as they are.

        Raises NonFiniteLoss.
        """
        tokens, total, clipped = float(mini.mask_BT.sum()), 0.0, 0.0
        self.optimizer.zero_grad()
        for micro, real in distributed.micro_batches(mini, self._optim.micro_batch_size) if mini.units else []:
            if not real:
                self._values(micro).sum().backward()
                continue
            assert micro.values_BT is not None
            assert micro.returns_BT is not None
            loss, share = value_loss(
                self._values(micro), micro.values_BT, micro.returns_BT, micro.mask_BT,
                tokens=tokens, cliprange=self._critic.cliprange_value,
            )  # fmt: skip
            loss.backward()
            total, clipped = total + float(loss.detach()), clipped + share
        summed, _ = distributed.merged({"loss": total, "clipped": clipped}, {})
        total, clipped = summed["loss"], summed["clipped"]
        norm = sharding.clip(self.model.parameters(), self._critic.max_grad_norm)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise NonFiniteLoss(f"step {step + 1}: the critic's loss is {total} and its gradient's norm {norm}")
        rate = optim.learning_rate(self._optim, step, self._config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if tokens:
            self.optimizer.step()
        return {
            "critic/loss": total, "critic/clip_frac": clipped, "critic/grad_norm": norm, "critic/lr": rate,
            "critic/trained_tokens": tokens, "critic/pretrain_steps": min(step + 1, self._critic.pretrain_steps),
        }  # fmt: skip

    def tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The groups of a checkpoint that are the critic's."""
        return {"critic": self.model.state_dict(), "critic_optimizer": optim.state_tensors(self.optimizer)}

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put back what `tensors` gave, bit for bit."""
        sharding.load(self.model, tensors["critic"])
        optim.load_state_tensors(self.optimizer, tensors["critic_optimizer"])


def build(config: RunConfig, policy: Policy) -> Critic | None:
    """The critic that the objective asks for, freshly initialised; None if it asks for none.

    Raises ValueError as `ValueModel.from_reward_model` says.
    """
    if "critic.init" not in objective_reads(config):
        return None
    given = config.critic.init != "policy"
    model = ValueModel.from_reward_model(config, policy) if given else ValueModel.from_policy(policy)
    model.to(policy.model.device)
    sharding.prepare(model, config, trains=True, whole=[model.head])
    return Critic(config, model)
