"""Gates that depend on the input: from the prompt, frozen for the decode (sequence), or anew for every token.

Neither needs the task. A token's gates depend on that token's own input alone, so decoding with a key/value cache gives
the same tokens as without; a sequence's are computed once from the prompt. Router arithmetic is in float32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.loracoe.examples import Batch, Example, make_batch, position_ids
from models.loracoe.gated import GatedModel, GateFunction
from models.loracoe.pool import Pool

INITIAL_STD = 0.02
"""Of the router's weights, as MixLoRA's published code has it."""


def largest_mask(values: Tensor, active: int | None) -> Tensor:
    """1 on the `active` largest of each row of `values` (..., R), 0 elsewhere; None: 1 everywhere. Of equals any."""
    if active is None or active >= values.shape[-1]:
        return torch.ones_like(values)
    chosen = values.topk(active, dim=-1).indices
    return torch.zeros_like(values).scatter_(-1, chosen, 1.0)


def keep_largest(gates: Tensor, active: int | None, straight_through: bool = False) -> Tensor:
    """`gates` (..., R) with all but the `active` largest of each row set to 0.

    With `straight_through` the values are the same, but the gradient passes as if every gate were open.
    """
    return close(gates, largest_mask(gates.detach(), active), straight_through)


def close(gates: Tensor, open_mask: Tensor, straight_through: bool) -> Tensor:
    """`gates` where `open_mask` is 1, and 0 elsewhere; with `straight_through` the gradient ignores the mask."""
    kept = gates * open_mask
    return kept + (1 - open_mask) * (gates - gates.detach()) if straight_through else kept


@torch.no_grad()
def prompt_states(gated: GatedModel, batch: Batch) -> Tensor:
    """Mean of the base model's last hidden states over each row's prompt (B, H), float32. Switches the gates off.

    Attention is causal, so the response behind a prompt does not change its states.
    """
    gated.set_gates(None)
    hidden_BTH = gated.model.base_model(
        input_ids=batch.ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=position_ids(batch),
        use_cache=False,
    ).last_hidden_state.float()
    weights_BT1 = batch.prompt_mask_BT[..., None].float()
    return (hidden_BTH * weights_BT1).sum(1) / weights_BT1.sum(1)


class SequenceRouter(nn.Module):
    """One linear map from the prompt's mean state to the gates of all layers: sigmoid, no renormalisation.

    The bias starts at logit(1/T) for T adapters, so the gates' mass starts at that of one adapter. `active`: how many
    gates of a layer stay open (None: all). States are standardised by `mean` and `spread`, which `fit_scale` sets from
    training prompts: raw mean states of different tasks differ by little beside what they share. Our choice.
    """

    def __init__(
        self, width: int, pool: Pool, active: int | None = None, seed: int = 0, straight_through: bool = False
    ):
        super().__init__()
        self.active, self.straight_through = active, straight_through
        self.sizes = {name: module.rank for name, module in pool.modules.items()}
        self.linear = nn.Linear(width, pool.ranks)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        share = min(1 / len(pool.sources), 0.9)
        with torch.no_grad():
            self.linear.weight.normal_(std=INITIAL_STD, generator=torch.Generator().manual_seed(seed % 2**63))
            self.linear.bias.fill_(math.log(share / (1 - share)))

    @torch.no_grad()
    def fit_scale(self, states_NH: Tensor) -> None:
        """Standardises by the mean and spread of the training prompts' states; constant components stay as they are."""
        self.mean.copy_(states_NH.mean(0))
        spread = states_NH.std(0, correction=0)
        self.spread.copy_(torch.where(spread > 1e-6, spread, torch.ones_like(spread)))

    def logits(self, states_BH: Tensor) -> Tensor:
        """(B, H) → (B, all ranks of all layers), before the sigmoid."""
        return self.linear((states_BH - self.mean) / self.spread)

    def forward(self, states_BH: Tensor) -> dict[str, Tensor]:
        """(B, H) → module name → gates (B, 1, R)."""
        probabilities = torch.sigmoid(self.logits(states_BH))[:, None]
        parts = probabilities.split(list(self.sizes.values()), dim=-1)
        return {
            name: keep_largest(part, self.active, self.straight_through)
            for name, part in zip(self.sizes, parts, strict=True)
        }

    def install(self, gated: GatedModel, batch: Batch) -> None:
        """Sets the gates of the rows of `batch`; they stay for whatever the model does next with the same rows."""
        gated.set_dynamic(self(prompt_states(gated, batch)))


class SequenceGates:
    """A sequence router's gates for the rollout engine (`models.rollout.engine.RowGates`): a row keeps its prompt's.

    A revealed prefix belongs to the prompt, so nested start states have gates of their own.
    """

    def __init__(self, gated: GatedModel, router: SequenceRouter):
        self.gated, self.router = gated, router

    @torch.no_grad()
    def of(self, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Module → gates (B, 1, R) of these B prompts. Leaves the gates off."""
        device = next(iter(self.gated.modules.values())).scale_R.device
        return self.router(prompt_states(self.gated, make_batch([Example(ids, ()) for ids in prompts], device)))

    def set(self, gates: dict[str, Tensor] | None) -> None:
        """Gates of the rows of the passes to come; None: off."""
        if gates is None:
            self.gated.set_gates(None)
        else:
            self.gated.set_dynamic(gates)


class TokenRouter(nn.Module):
    """For each layer, sigmoid(W x) of its own input; `active` of R ranks are selected and renormalised to `mass`.

    g_i = mass · p_i / (sum of the selected p), so equal gates have the mass of one adapter (`mass` None: the layer's
    mean rank of an adapter). A bias for each rank is added for selection only, never to a gate's value; `update_bias`
    moves it against the load (loss-free balancing, arXiv 2408.15664). Gradients pass through the selected p, or through
    all with `straight_through`. `shared`: layers of one input width and rank use the same W.
    """

    def __init__(
        self,
        pool: Pool,
        active: int | None = None,
        mass: float | None = None,
        seed: int = 0,
        shared: bool = False,
        straight_through: bool = False,
    ):
        super().__init__()
        self.active, self.straight_through = active, straight_through
        self.names = list(pool.modules)
        self.masses = [mass or module.rank / len(module.blocks) for module in pool.modules.values()]
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        self.weight_of: list[int] = []
        """Index of each layer's W."""
        known: dict[tuple[int, int], int] = {}
        for module in pool.modules.values():
            shape = (module.rank, module.A_RI.shape[1])
            if not shared or shape not in known:
                known[shape] = len(self.weights)
                self.weights.append(nn.Parameter(torch.randn(shape, generator=generator) * INITIAL_STD))
            self.weight_of.append(known[shape])
            self.biases.append(nn.Parameter(torch.zeros(module.rank), requires_grad=False))
        self.load: dict[str, Tensor] = {}
        """Share of the last training batch's real tokens that selected each rank. Overwritten by every forward pass, so
        a pass that gradient checkpointing repeats does not count twice."""
        self._preference: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._mask_BT: Tensor | None = None

    def gates(self, index: int, x_BTI: Tensor) -> Tensor:
        """Gates (B, T, R) of layer `index` for its input."""
        logits = x_BTI.float() @ self.weights[self.weight_of[index]].T
        probabilities = torch.sigmoid(logits)
        selected = largest_mask(probabilities.detach() + self.biases[index], self.active)
        if self._mask_BT is not None:
            self._count(self.names[index], logits, probabilities, selected, self._mask_BT)
        total = (probabilities * selected).sum(-1, keepdim=True)
        return close(self.masses[index] * probabilities / total, selected, self.straight_through)

    def _count(self, name: str, logits: Tensor, probabilities: Tensor, selected: Tensor, mask_BT: Tensor) -> None:
        real = mask_BT[..., None].float()
        self.load[name] = ((selected * real).sum((0, 1)) / real.sum()).detach()
        shares = probabilities / probabilities.sum(-1, keepdim=True)
        self._preference[name] = (shares * real).sum((0, 1)) / real.sum()
        self._squares[name] = (logits.square() * real).sum() / (real.sum() * logits.shape[-1])

    def functions(self) -> dict[str, GateFunction]:
        """Gate functions by module name, for `GatedModel.set_dynamic`."""
        return {name: lambda x_BTI, index=index: self.gates(index, x_BTI) for index, name in enumerate(self.names)}

    def install(self, gated: GatedModel, batch: Batch | None = None) -> None:
        """Sets the gate functions; with a training `batch`, its real tokens are counted into `load`."""
        self._mask_BT = None if batch is None else batch.attention_mask_BT
        gated.set_dynamic(self.functions())

    def switch_loss(self) -> Tensor:
        """R · sum f_i P_i, mean over layers, of the last training batch (Switch Transformer, arXiv 2101.03961).

        f_i: rank i's share of the selections, without gradient; P_i: its mean share of the sigmoids, over real tokens.
        1 when both are uniform, larger the more both prefer the same ranks.
        """
        losses = [len(load) * (load / load.sum() * self._preference[name]).sum() for name, load in self.load.items()]
        return torch.stack(losses).mean()

    def z_loss(self) -> Tensor:
        """Mean squared logit over real tokens, ranks and layers: keeps sigmoids from saturating.

        Our choice, in the place of the squared log-sum-exp that softmax routers use.
        """
        return torch.stack(list(self._squares.values())).mean()

    def update_bias(self, rate: float) -> None:
        """b_i += rate · sign(mean load - load_i), from the last batch. Call it after the optimiser's step."""
        for name, bias in zip(self.names, self.biases, strict=True):
            if name in self.load:
                bias.data += rate * torch.sign(self.load[name].mean() - self.load[name])
