"""X-LoRA (arXiv 2402.07148) as PEFT has it: a classifier on the base's last states weighs adapters for every token.

Only the classifier is trained. PEFT runs the model twice a pass and without a cache, so its engine here computes every
row anew for every token: right, and slow by X-LoRA's own nature.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from models.loracoe.examples import Batch, Example, make_batch, position_ids
from models.loracoe.rivals import Rival
from models.policy import Policy
from models.rollout.engine import EngineDescription, Progress, RolloutInput, RolloutOutput, StopReason
from models.rollout.sampling import sample, uniforms
from models.shared_modules import shared_copy
from models.tokenization import decode


def xlora_model(base: Any, adapters: Mapping[str, Path], seed: int, layerwise: bool = True) -> torch.nn.Module:
    """PEFT's X-LoRA model on a copy of `base` (transformers), its classifier (one linear map) fresh, all else frozen.

    PEFT wants the adapters' names to be 0, 1, ... and a configuration without cache.
    """
    from peft import XLoraConfig, get_peft_model

    network = shared_copy(base)
    network.config = copy.deepcopy(network.config)
    network.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=network.config.get_text_config().hidden_size,
        adapters={str(index): str(folder) for index, folder in enumerate(adapters.values())},
        layerwise_scalings=layerwise,
        xlora_depth=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        model = get_peft_model(network, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("internal_xlora_classifier" in name)
    return model.to(base.device).eval()


def train_xlora(
    model: torch.nn.Module,
    training: Sequence[Example],
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
) -> list[float]:
    """Trains the classifier on mixed demonstrations' responses (AdamW, no decay); returns the loss of every step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed % 2**63)
    losses = []
    for _ in range(steps):
        chosen = torch.randperm(len(training), generator=generator)[:batch_size].tolist()
        loss = xlora_nll(model, make_batch([training[index] for index in chosen], device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def xlora_nll(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of every response token (N,): the whole PEFT model must be called, for its hooks."""
    logits_BTV = model(
        input_ids=batch.ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=position_ids(batch),
        use_cache=False,
    ).logits
    logits_NV = logits_BTV.flatten(0, 1)[batch.targets_N].float()
    return torch.nn.functional.cross_entropy(logits_NV, batch.labels_N, reduction="none")


def xlora_rival(policy: Policy, model: torch.nn.Module) -> Rival:
    """The X-LoRA model with its engine. Every token uses the ranks of all adapters."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and len(module.lora_A)]
    ranks = [sum(factor.weight.shape[0] for factor in layer.lora_A.values()) for layer in layers]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Rival("x_lora", WholeRowEngine(policy, model), max(ranks), sum(ranks) / len(ranks), trained)


class WholeRowEngine:
    """A rollout engine for a model that keeps no cache: every row is computed anew for every token."""

    def __init__(self, policy: Policy, model: torch.nn.Module, batch_size: int = 64) -> None:
        self.policy, self.model, self.batch_size = policy, model, batch_size

    def load_adapter(self, path: Path | None) -> None:
        """Raises ValueError: the model is what it is."""
        raise ValueError("a model without a cache takes no adapter; make another engine")

    def describe(self) -> EngineDescription:
        """Engine, version, dtype, longest row; it has no adapter of its own."""
        dtype = str(self.policy.network.dtype).removeprefix("torch.")
        return EngineDescription("transformers, no cache", transformers.__version__, dtype, self.policy.context, None)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[RolloutInput],
        temperature: float,
        stop_strings: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[RolloutOutput]:
        """Samples every request, as every engine does; stop strings are looked for in the whole completion."""
        outputs: list[RolloutOutput] = []
        for start in range(0, len(requests), self.batch_size):
            outputs += self._batch(requests[start : start + self.batch_size], temperature, stop_strings)
            if progress is not None:
                progress(len(outputs), len(requests))
        return outputs

    def _batch(
        self, requests: Sequence[RolloutInput], temperature: float, stop_strings: Sequence[str]
    ) -> list[RolloutOutput]:
        most = max(request.max_new_tokens for request in requests)
        draws_RN = uniforms([request.seed for request in requests], most) if temperature else None
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons: list[StopReason | None] = [None] * len(requests)
        while live := [row for row, reason in enumerate(reasons) if reason is None]:
            batch = make_batch([Example([*requests[r].prompt_ids, *ids[r]], ()) for r in live], self.policy.device)
            last = torch.tensor([len(requests[r].prompt_ids) + len(ids[r]) - 1 for r in live])
            logits_BTV = self.model(
                input_ids=batch.ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
            ).logits
            logits_RV = logits_BTV[torch.arange(len(live)), last]
            at = torch.tensor([len(ids[r]) for r in live])
            draws_R = draws_RN[live, at].to(self.policy.device) if draws_RN is not None else None
            tokens_R, found_R = sample(logits_RV, temperature, draws_R)
            for row, token, logprob in zip(live, tokens_R.tolist(), found_R.tolist(), strict=True):
                if not torch.isfinite(torch.tensor(logprob)):
                    reasons[row] = "error"
                    continue
                ids[row].append(token)
                logprobs[row].append(logprob)
                reasons[row] = self._reason(requests[row], ids[row], stop_strings)
        return [RolloutOutput(*row) for row in zip(ids, logprobs, reasons, strict=True)]  # type: ignore[arg-type]

    def _reason(self, request: RolloutInput, ids: list[int], stop_strings: Sequence[str]) -> StopReason | None:
        if ids[-1] in self.policy.eos_ids:
            return "eos"
        if stop_strings and any(text in decode(self.policy.tokenizer, ids) for text in stop_strings):
            return "stop_string"
        return "length" if len(ids) >= request.max_new_tokens else None
