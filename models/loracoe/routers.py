"""Gates that depend on the input: from the prompt, frozen for the decode (sequence), or anew for every token.

Neither needs the task. A token's gates depend on that token's own input alone, so decoding with a key/value cache gives
the same tokens as without; a sequence's are computed once from the prompt. Router arithmetic is in float32.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.loracoe.examples import Batch, Example, make_batch, position_ids, response_nll
from models.loracoe.gated import GatedModel, GateFunction
from models.loracoe.pool import Pool

INITIAL_STD = 0.02
"""Of the router's weights, as MixLoRA's published code has it."""


def keep_largest(gates: Tensor, active: int | None) -> Tensor:
    """`gates` (..., R) with all but the `active` largest of each row set to 0; None keeps all. Of equals any."""
    if active is None or active >= gates.shape[-1]:
        return gates
    chosen = gates.topk(active, dim=-1).indices
    return gates * torch.zeros_like(gates).scatter_(-1, chosen, 1.0)


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
    gates of a layer stay open (None: all). Our choice.
    """

    def __init__(self, width: int, pool: Pool, active: int | None = None, seed: int = 0):
        super().__init__()
        self.active = active
        self.sizes = {name: module.rank for name, module in pool.modules.items()}
        self.linear = nn.Linear(width, pool.ranks)
        share = min(1 / len(pool.sources), 0.9)
        with torch.no_grad():
            self.linear.weight.normal_(std=INITIAL_STD, generator=torch.Generator().manual_seed(seed))
            self.linear.bias.fill_(math.log(share / (1 - share)))

    def forward(self, states_BH: Tensor) -> dict[str, Tensor]:
        """(B, H) → module name → gates (B, 1, R)."""
        probabilities = torch.sigmoid(self.linear(states_BH))[:, None]
        parts = probabilities.split(list(self.sizes.values()), dim=-1)
        return {name: keep_largest(part, self.active) for name, part in zip(self.sizes, parts, strict=True)}

    def install(self, gated: GatedModel, batch: Batch) -> None:
        """Sets the gates of the rows of `batch`; they stay for whatever the model does next with the same rows."""
        gated.set_dynamic(self(prompt_states(gated, batch)))


class TokenRouter(nn.Module):
    """For each layer, sigmoid(W x) of its own input; `active` of R ranks are selected and renormalised to `mass`.

    g_i = mass · p_i / (sum of the selected p), so equal gates have the mass of one adapter (`mass` None: the layer's
    mean rank of an adapter). A bias for each rank is added for selection only, never to a gate's value; `update_bias`
    moves it against the load (loss-free balancing, arXiv 2408.15664). Gradients pass through the selected p.
    """

    def __init__(self, pool: Pool, active: int | None = None, mass: float | None = None, seed: int = 0):
        super().__init__()
        self.active = active
        self.names = list(pool.modules)
        self.masses = [mass or module.rank / len(module.blocks) for module in pool.modules.values()]
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for module in pool.modules.values():
            start = torch.randn(module.rank, module.A_RI.shape[1], generator=generator) * INITIAL_STD
            self.weights.append(nn.Parameter(start))
            self.biases.append(nn.Parameter(torch.zeros(module.rank), requires_grad=False))
        self.load: dict[str, Tensor] = {}
        """Share of the last training batch's real tokens that selected each rank. Overwritten by every forward pass, so
        a pass that gradient checkpointing repeats does not count twice."""
        self._mask_BT: Tensor | None = None

    def gates(self, index: int, x_BTI: Tensor) -> Tensor:
        """Gates (B, T, R) of layer `index` for its input."""
        probabilities = torch.sigmoid(x_BTI.float() @ self.weights[index].T)
        count = min(self.active or probabilities.shape[-1], probabilities.shape[-1])
        chosen = (probabilities.detach() + self.biases[index]).topk(count, dim=-1).indices
        selected = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
        if self._mask_BT is not None:
            real = self._mask_BT[..., None].float()
            self.load[self.names[index]] = ((selected * real).sum((0, 1)) / real.sum()).detach()
        kept = probabilities * selected
        return self.masses[index] * kept / kept.sum(-1, keepdim=True)

    def functions(self) -> dict[str, GateFunction]:
        """Gate functions by module name, for `GatedModel.set_dynamic`."""
        return {name: lambda x_BTI, index=index: self.gates(index, x_BTI) for index, name in enumerate(self.names)}

    def install(self, gated: GatedModel, batch: Batch | None = None) -> None:
        """Sets the gate functions; with a training `batch`, its real tokens are counted into `load`."""
        self._mask_BT = None if batch is None else batch.attention_mask_BT
        gated.set_dynamic(self.functions())

    def update_bias(self, rate: float) -> None:
        """b_i += rate · sign(mean load - load_i), from the last batch. Call it after the optimiser's step."""
        for name, bias in zip(self.names, self.biases, strict=True):
            if name in self.load:
                bias.data += rate * torch.sign(self.load[name].mean() - self.load[name])


def train_router(
    gated: GatedModel,
    router: SequenceRouter | TokenRouter,
    examples: Sequence[Example],
    *,
    steps: int,
    learning_rate: float = 1e-2,
    batch_size: int = 32,
    seed: int = 0,
    stages: Sequence[tuple[float, int | None]] = ((0.0, None),),
    balance_rate: float = 0.0,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Trains the router alone on mixed tasks' demonstrations (response loss only) and returns the loss of every step.

    AdamW without decay, cosine to 0. `stages`: from which share of the steps how many gates of a layer stay open, such
    as ((0, None), (0.4, 24), (0.7, 16)): cutting to few at once fails. Balancing is over the mixed batch.
    """
    device = next(iter(gated.modules.values())).scale_R.device
    router.to(device).train()
    trainable = [parameter for parameter in router.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses, order = [], []
    for step in range(steps):
        router.active = [active for share, active in stages if step >= share * steps][-1]
        if len(order) < min(batch_size, len(examples)):
            order = torch.randperm(len(examples), generator=generator).tolist()
        batch = make_batch([examples[order.pop()] for _ in range(min(batch_size, len(examples)))], device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        router.install(gated, batch)
        loss = response_nll(gated.model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if balance_rate and isinstance(router, TokenRouter):
            router.update_bias(balance_rate)
        losses.append(loss.item())
        on_step(step + 1)
    router.eval()
    return losses
