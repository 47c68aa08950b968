"""Other ways to compose the same adapters, each as something the rollout engine samples from, with what it costs.

Merges are PEFT's own and come out as ordinary adapters. Arrow and X-LoRA take PEFT's prototypes and PEFT's model. The
others are special cases of our gates, re-implemented from their descriptions: what they share with ours (pool,
training, sampling) is then the same code, and what is compared is the gates. Differences from the originals stand in
each docstring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from data.errors import UserError
from models.loracoe.examples import Batch, Example, make_batch, mean_loss, response_nll
from models.loracoe.gated import GatedModel, GateFunction
from models.loracoe.pool import Gates, Pool, PoolModule
from models.loracoe.routers import INITIAL_STD, SequenceGates, SequenceRouter
from models.policy import Policy
from models.requests import PolicyFiles
from models.rollout.engine import RolloutEngine
from models.rollout.transformers_engine import TransformersEngine
from models.settings import TokenRouterSettings
from models.shared_modules import shared_copy

Merge = Literal["cat", "cat_mean", "linear", "svd", "ties_svd", "dare_linear_svd"]
MERGES: tuple[Merge, ...] = ("cat", "cat_mean", "linear", "svd", "ties_svd", "dare_linear_svd")
DENSITY = 0.5
"""Share of entries that ties and dare keep."""
L1_WEIGHT, BOUND = 0.05, 1.5
"""Of LoraHub's search: the weight of the mean absolute value, and how far a weight may go from 0 (our choice)."""


@dataclass(frozen=True)
class Rival:
    """A composition to sample from, and what it costs.

    `stored_rank`: ranks kept in a layer, the largest; `active_rank`: ranks that a token uses in a layer, on average;
    `trainable_parameters`: trained on the tasks' demonstrations to compose the experts (the experts' own not counted).
    """

    name: str
    engine: RolloutEngine
    stored_rank: int
    active_rank: float
    trainable_parameters: int


def merged(
    how: Merge, policy: PolicyFiles, adapters: Mapping[str, Path], out: Path, *, seed: int, **load: Any
) -> Rival:
    """PEFT's `add_weighted_adapter`: `cat` (weights 1), `cat_mean` (1/T), the others with weights 1.

    The svd family has the largest rank of the adapters. Writes the merged adapter into `out`. `load`: further arguments
    of `Policy.load`. Raises UserError where an adapter uses rsLoRA (PEFT 0.21.2 merges those too strongly), or where
    ranks differ and `how` is linear, which PEFT refuses.
    """
    from peft import PeftModel

    host = Policy.load(PolicyFiles(base=policy.base), **load)
    model = None
    for name, folder in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(shared_copy(host.network), folder, adapter_name=name)
        else:
            model.load_adapter(folder, adapter_name=name)
    assert model is not None
    configs = {name: model.peft_config[name] for name in adapters}
    if rank_stabilised := [name for name, config in configs.items() if config.use_rslora]:
        raise UserError(f"PEFT merges rank-stabilised adapters too strongly: {rank_stabilised}; leave this rival out")
    ranks = {config.r for config in configs.values()}
    if how == "linear" and (len(ranks) > 1 or any(config.rank_pattern for config in configs.values())):
        raise UserError(f"linear adds factors, so it needs adapters of one rank, not {sorted(ranks)}")
    options: dict[str, Any] = {"density": DENSITY} if how in ("ties_svd", "dare_linear_svd") else {}
    if how in ("svd", "ties_svd", "dare_linear_svd"):
        options["svd_rank"] = max(ranks)
    weight = 1 / len(adapters) if how == "cat_mean" else 1.0
    kind = "cat" if how == "cat_mean" else how
    with torch.random.fork_rng(), torch.no_grad():  # dare drops entries at random
        torch.manual_seed(seed % 2**63)
        model.add_weighted_adapter(list(adapters), [weight] * len(adapters), "merged", combination_type=kind, **options)
    model.save_pretrained(out, selected_adapters=["merged"], save_embedding_layers=False)
    folder = out / "merged"
    rank = max([model.peft_config["merged"].r, *model.peft_config["merged"].rank_pattern.values()])
    loaded = Policy.load(PolicyFiles(base=policy.base, weights=folder), **load)
    return Rival(how, TransformersEngine(loaded), rank, float(rank), 0)


def gated_rival(
    name: str,
    policy: Policy,
    pool: Pool,
    gates: Gates | Mapping[str, GateFunction] | nn.Module,
    trained: int,
    active: float | None = None,
) -> Rival:
    """A plain `policy` whose layers get the pool with these gates: static, functions of the input, or a router of ours.

    `trained`: how many parameters were; `active`: ranks that a token uses in a layer, None: all of them.
    """
    gated = GatedModel(policy.network, pool)
    rows = None
    if isinstance(gates, SequenceRouter):
        rows = SequenceGates(gated, gates)
    elif isinstance(gates, nn.Module):
        gates.install(gated)
    elif all(isinstance(value, Tensor) for value in gates.values()):
        gated.set_gates(gates)
        active = sum(int(value.count_nonzero()) for value in gates.values()) / len(pool.modules)
    else:
        gated.set_dynamic(gates)
    stored = max(module.rank for module in pool.modules.values())
    mean = pool.ranks / len(pool.modules)
    return Rival(name, TransformersEngine(policy, gates=rows), stored, mean if active is None else active, trained)


def spread(coefficients: Tensor, module: PoolModule) -> Tensor:
    """One coefficient an adapter (..., T of this layer) → gates constant on each adapter's ranks (..., R)."""
    sizes = torch.tensor([block.rank for block in module.blocks], device=coefficients.device)
    return coefficients.repeat_interleave(sizes, dim=-1)


def arrow(
    policy: Policy,
    adapters: Mapping[str, Path],
    pool: Pool,
    *,
    top: int = 3,
    temperature: float = 1.0,
    seed: int = 0,
) -> Rival:
    """Arrow (arXiv 2405.11157) with the prototypes that PEFT finds: no training.

    A token's coefficients are the softmax over the `top` adapters of |x · v|, v an adapter's first right singular
    vector; as gates they give what PEFT's own layers give (E5 of the equivalence tests). PEFT finds v by power
    iteration from a random vector, hence the seed; it wants one rank and one set of target modules, and raises
    ValueError otherwise.
    """
    from peft import ArrowConfig, create_arrow_model

    top = min(top, len(adapters))
    config = ArrowConfig(top_k=top, router_temperature=temperature)
    model = create_arrow_model(
        shared_copy(policy.network), [str(folder) for folder in adapters.values()], config
    ).eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=policy.device))  # the prototypes are made now
    network = model.base_model.model
    functions = {
        name: _arrow_gates(network.get_submodule(name).lora_arrow["arrow_router"].prototypes, module, top, temperature)
        for name, module in pool.modules.items()
    }
    active = top * pool.ranks / sum(len(module.blocks) for module in pool.modules.values())
    return gated_rival("arrow", policy, pool, functions, 0, active)


def _arrow_gates(prototypes_TI: Tensor, module: PoolModule, top: int, temperature: float) -> GateFunction:
    def gates(x_BLI: Tensor) -> Tensor:
        similarity = (x_BLI.to(prototypes_TI.dtype) @ prototypes_TI.T).abs()
        best, index = similarity.topk(top, dim=-1)
        score = torch.full_like(similarity, -torch.inf).scatter(-1, index, best)
        return spread(torch.softmax(score / temperature, -1), module)

    return gates


class BlockRouter(nn.Module):
    """Softmax over whole adapters for every layer and token, from the layer's input: MoLE-like (arXiv 2404.13628).

    MoLE gates from the concatenated expert outputs; here the layer's input is read, as in LoRAMoE and MixLoRA, so that
    it has what our token router has. With 0 weights every adapter has 1/T.
    """

    def __init__(self, pool: Pool, seed: int = 0):
        super().__init__()
        self.modules_by_name, self.active = dict(pool.modules), None
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(len(module.blocks), module.A_RI.shape[1], generator=generator) * INITIAL_STD)
            for module in pool.modules.values()
        )

    def install(self, gated: GatedModel, batch: Batch | None = None) -> None:
        """Sets the gate functions of all layers."""
        gated.set_dynamic(
            {
                name: lambda x_BLI, index=index, module=module: spread(
                    torch.softmax(x_BLI.float() @ self.weights[index].T, -1), module
                )
                for index, (name, module) in enumerate(self.modules_by_name.items())
            }
        )


def smora_settings(active: int, steps: int, learning_rate: float, batch_size: int = 32) -> TokenRouterSettings:
    """SMoRA-like (arXiv 2501.15103): every rank an expert, top-k by token, loss-free balance; router, A and B trained.

    The gates are renormalised sigmoids and closed in stages, as in our token router. Train it with `train_router` on a
    pool of fresh ranks (`fresh_pool`), which is how SMoRA starts, or on the experts' own.
    """
    return TokenRouterSettings(
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        active=active,
        balance="loss_free",
        unfreeze="A_and_B",
        unfreeze_from=0.0,
        factor_rate=1.0,
    )


def fresh_pool(pool: Pool, seed: int) -> Pool:
    """The same layers and ranks before any training, as LoRA starts: B = 0, A uniform within ±1/sqrt(d_in)."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    modules = {}
    for name, module in pool.modules.items():
        A_RI = (2 * torch.rand(module.A_RI.shape, generator=generator) - 1) / module.A_RI.shape[1] ** 0.5
        modules[name] = replace(module, A_RI=A_RI, B_OR=torch.zeros(module.B_OR.shape))
    return Pool(modules, pool.sources)


def lora_soups(
    gated: GatedModel, training: Sequence[Example], *, steps: int, learning_rate: float, batch_size: int, seed: int
) -> Gates:
    """LoRA Soups' CAT (arXiv 2410.13025): one learned weight for each adapter and layer, from 1/T, AdamW.

    Static gates for all tasks at once; the weights are not normalised.
    """
    device = next(iter(gated.modules.values())).scale_R.device
    modules = gated.pool.modules
    weights = {
        name: torch.full((len(module.blocks),), 1 / len(module.blocks), device=device, requires_grad=True)
        for name, module in modules.items()
    }
    optimizer = torch.optim.AdamW(list(weights.values()), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(steps):
        chosen = torch.randperm(len(training), generator=generator)[:batch_size].tolist()
        gated.set_dynamic({name: spread(weight, modules[name]) for name, weight in weights.items()})
        loss = response_nll(gated.model, make_batch([training[index] for index in chosen], device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gated.set_gates(None)
    return {name: spread(weight.detach().cpu(), modules[name]) for name, weight in weights.items()}


def lorahub(
    gated: GatedModel,
    examples: Sequence[Example],
    *,
    trials: int,
    batch_size: int,
    seed: int,
    l1_weight: float = L1_WEIGHT,
) -> tuple[Gates, list[float]]:
    """LoraHub (arXiv 2307.13269): one weight an adapter, found without gradients; gates, and the best score by trial.

    From weights 0, a (1+1) evolution strategy whose step grows by 1.5 on success and shrinks by 1.5^(-1/4) on failure
    (the one-fifth rule), in place of the original's nevergrad; it lowers the mean loss plus an L1 term. The original
    weights A and B apart, whose product has cross terms; here the deltas are weighted.
    """
    device = next(iter(gated.modules.values())).scale_R.device
    names = [source.name for source in gated.pool.sources]
    generator = torch.Generator().manual_seed(seed % 2**63)

    def gates_of(weights_T: Tensor) -> Gates:
        by_name = dict(zip(names, weights_T.tolist(), strict=True))
        return {
            name: torch.tensor([by_name[source] for source in module.sources_of_ranks()])
            for name, module in gated.pool.modules.items()
        }

    def score(weights_T: Tensor) -> float:
        gated.set_gates(gates_of(weights_T))
        return mean_loss(gated.model, examples, batch_size, device) + l1_weight * float(weights_T.abs().mean())

    best_T, size = torch.zeros(len(names)), 0.5
    scores = [score(best_T)]
    for _ in range(trials):
        tried_T = (best_T + size * torch.randn(len(names), generator=generator)).clamp(-BOUND, BOUND)
        found = score(tried_T)
        if found < scores[-1]:
            best_T, size = tried_T, size * 1.5
        else:
            size *= 1.5**-0.25
        scores.append(min(found, scores[-1]))
    gated.set_gates(None)
    return gates_of(best_T), scores
