"""The policy: a base model with a LoRA adapter (or trained whole), its tokenizer and what ends its rows.

The base is read once per process and stays resident. Each policy gets modules of its own around the same parameter
tensors, so several policies (one being trained, a frozen reference) share a base that none of them can change.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data.errors import UserError
from models.adapter_modules import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdaptedModules, quiet
from models.base import base_hash, base_name, load_base, read_base
from models.device import select_device
from models.loracoe.files import has_router
from models.requests import Device, PolicyFiles
from models.scoring import TokenRow, completion_logits, completion_logprobs
from models.settings import VOCABULARY_CHUNK, FullTraining, LoraTraining, Parameters
from models.shared_modules import copy_with, shared_copy
from models.tokenization import eos_ids

FULL_WEIGHTS = "model.safetensors"


@dataclass
class _Resident:
    key: str
    model: Any
    tokenizer: Any
    adapted: AdaptedModules


_resident: list[_Resident] = []


def release_base() -> None:
    """Forgets the resident base: its tensors live as long as a policy uses them."""
    _resident.clear()


def _resident_in(folder: Path, device: torch.device) -> _Resident:
    key = f"{base_hash(folder)} {device}"
    if not (_resident and _resident[0].key == key):
        _resident.clear()
        model, tokenizer = load_base(folder)
        model.to(device).eval().requires_grad_(False)
        _resident.append(_Resident(key, model, tokenizer, AdaptedModules(model)))
    return _resident[0]


def resident_base(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """The base model of `folder` on `device` and its tokenizer: read at first use, then kept by content hash.

    One base stays resident (a large one fills a GPU); it must not be changed.
    """
    resident = _resident_in(folder, device)
    return resident.model, resident.tokenizer


class Policy:
    """A causal language model to sample from and to train.

    `model` is a PeftModel, a plain transformers model, or one with a router's gates (`routed`), always in evaluation
    mode (no dropout: the first ratio of an update is 1); `network` is the transformers model inside; `context` the
    longest row in tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, files: PolicyFiles, compute: Device) -> None:
        self.model = model.eval()
        self.routed: Any = None
        """A composition's router (`models.loracoe.routed.Routed`), on layers of `model`; None: no gates."""
        self.tokenizer = tokenizer
        self.files = files
        self.compute = compute
        self.device = select_device(compute)
        self.context = _context(self.network, read_base(files.base)["context"])
        self.eos_ids = eos_ids(self.network, tokenizer)

    @classmethod
    def load(
        cls,
        files: PolicyFiles,
        parameters: Parameters | None = None,
        compute: Device = Device(),  # noqa: B008 - frozen settings
        trainable: bool = False,
        seed: int = 0,
    ) -> "Policy":
        """Loads the policy in `files`.

        With `trainable` and no weights, `parameters` says what is trained: a new adapter (B = 0, so it is the base;
        A drawn from `seed`), or every parameter. With weights, they say what they are (a PEFT adapter or full weights).
        What is trained is kept, and saved, in float32 whatever the base's type, which stays the type of the products.
        Raises UserError where weights and `parameters` do not fit together, or where nothing would be trained.
        """
        device = select_device(compute)
        resident = _resident_in(files.base, device)
        base, tokenizer = resident.model, resident.tokenizer
        if trainable and parameters is None:
            raise UserError("a policy to train needs `parameters` (lora or full)")
        weights = files.weights
        if has_router(weights):
            return cls._routed(shared_copy(base), tokenizer, files, compute, trainable)
        if weights is not None and (weights / ADAPTER_CONFIG).is_file():
            model = _with_adapter(resident.adapted, weights, parameters, trainable)
        elif weights is not None:
            whole = _trained_whole(base, device) if trainable else copy.deepcopy(base)
            model = _with_full_weights(whole, weights, parameters, trainable)
        elif trainable and isinstance(parameters, LoraTraining):
            model = _with_new_adapter(shared_copy(base), parameters, seed)
        elif trainable:
            model = _trained_whole(base, device)
        else:
            model = shared_copy(base)
        policy = cls(model, tokenizer, files, compute)
        if trainable and not policy.trainable_parameters():
            raise UserError(
                "no parameter would be trained; check parameters.target_modules against the model's modules"
            )
        return policy

    @classmethod
    def _routed(cls, model: Any, tokenizer: Any, files: PolicyFiles, compute: Device, trainable: bool) -> "Policy":
        from models.loracoe.routed import Routed

        if trainable:
            raise UserError(f"{files.weights} is a composition with a router, which `ratchet compose` trains, not RL")
        policy = cls(model, tokenizer, files, compute)
        policy.routed = Routed(model, files.weights, policy.device)
        return policy

    @property
    def network(self) -> Any:
        """The transformers model itself, adapters inside it included."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def has_adapter(self) -> bool:
        """Whether a LoRA adapter is attached (otherwise the model is plain, or trained whole)."""
        return hasattr(self.model, "peft_config")

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that an optimiser moves, in a fixed order."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def adapter_hash(self) -> str | None:
        """SHA-256 over the adapter's tensors: whether an engine samples with what was trained; None: no adapter.

        Of a composition with a router, over the pool's and the router's.
        """
        if self.routed is not None:
            return self.routed.hash()
        if not self.has_adapter:
            return None
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if "lora_" in name:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def sampling_network(self) -> Any:
        """The transformers model to sample with: in float32 the adapter is merged into copies of its own matrices.

        A merged matrix costs one product where an adapter costs three; log-probabilities move by rounding alone. In
        16-bit types merging would move them by far more than rounding of the result, so the adapter stays beside.
        The policy and the resident base are left as they are.
        """
        if not self.has_adapter or self.network.dtype != torch.float32:
            return self.network
        shared = {id(tensor): tensor for tensor in (*self.network.parameters(), *self.network.buffers())}
        copies: dict[int, Any] = {}
        for module in self.network.modules():
            if hasattr(module, "base_layer"):
                merged = copy_with(module.base_layer, dict(shared))
                with torch.no_grad():
                    weight = module.base_layer.weight + module.get_delta_weight("default")
                merged.weight = torch.nn.Parameter(weight, requires_grad=False)
                copies[id(module)] = merged
        return copy_with(self.network, shared | copies)

    def save(self, folder: Path) -> None:
        """Writes an ordinary PEFT adapter, or full weights with their configuration: same policy, same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.has_adapter:
            self.model.save_pretrained(folder)
            return
        self.model.peft_config["default"].base_model_name_or_path = base_name(self.files.base)
        # No model card: it names library versions, and its template takes longer than the adapter.
        self.model.create_or_update_model_card = _no_card
        self.model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
        # peft writes sets in hash order, which is not the same in two processes.
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        for key in ("target_modules", "modules_to_save"):
            if isinstance(config.get(key), list):
                config[key] = sorted(config[key])
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def completion_logprobs(
        self,
        rows: Sequence[TokenRow],
        temperature: float = 1.0,
        tokens_per_micro_batch: int = 8192,
        vocabulary_chunk: int = VOCABULARY_CHUNK,
    ) -> list[torch.Tensor]:
        """log π(completion | prompt) of each row's completion tokens; see `models.scoring.completion_logprobs`."""
        self._check_scored()
        return completion_logprobs(self.network, rows, temperature, tokens_per_micro_batch, vocabulary_chunk)

    def completion_logits(
        self, rows: Sequence[TokenRow], temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] / temperature in front of every completion token, and those tokens [N]; one forward pass."""
        self._check_scored()
        return completion_logits(self.network, rows, temperature)

    def _check_scored(self) -> None:
        if self.routed is not None and self.routed.rows is not None:
            raise UserError("gates that a row takes from its prompt are set by the engine only; score a task's adapter")

    @contextmanager
    def reference(self, files: PolicyFiles) -> Iterator["Policy"]:
        """The frozen policy in `files` for reference log-probabilities, on the same base tensors as this one."""
        policy = Policy.load(files, compute=self.compute)
        with torch.no_grad():
            yield policy


def _context(base: Any, wanted: int | None) -> int:
    """Longest row: what the settings say, at most what the model was made for.

    A sliding window is a limit as well: within it windowed attention is ordinary attention, which is what the rollout
    engine's masks and the trainer compute.
    """
    config = base.config.get_text_config()
    windowed = getattr(config, "use_sliding_window", True)
    limits = [
        wanted,
        getattr(config, "max_position_embeddings", None),
        getattr(config, "sliding_window", None) if windowed else None,
    ]
    known = [limit for limit in limits if limit]
    if not known:
        raise UserError("the model's configuration does not say how long a row may be; set model.context")
    return min(known)


class _Autocast:
    """Hooks that run a network's forward pass under autocast; they go with a copy of the network."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.entered: list[Any] = []

    def attach(self, network: Any) -> None:
        """From here on every forward pass of `network` computes in `dtype`."""
        network.register_forward_pre_hook(self.enter)
        network.register_forward_hook(self.leave, always_call=True)

    def enter(self, *_: Any) -> None:
        """Before the pass."""
        self.entered.append(torch.autocast(self.device.type, self.dtype))
        self.entered[-1].__enter__()

    def leave(self, *_: Any) -> None:
        """After it, also where it failed."""
        self.entered.pop().__exit__(None, None, None)


def _trained_whole(base: Any, device: torch.device) -> Any:
    """A copy of `base` whose parameters are trained. Those of 16 bit are kept in float32, computing goes on in 16.

    A step of Adam is as large as the rate, mostly far below the spacing of 16-bit numbers: 16-bit weights would stay
    where they are, step after step.
    """
    dtype = base.dtype
    if dtype == torch.float16:
        raise UserError(
            "parameters.kind is 'full' and model.dtype is 'float16', in which small gradients vanish; use 'bfloat16'"
        )
    model = copy.deepcopy(base).float().requires_grad_(True)
    if dtype != torch.float32:
        _Autocast(device, dtype).attach(model)
    return model


def _no_card(folder: str) -> None:
    """In place of PEFT's model card."""


def _with_new_adapter(base: Any, parameters: LoraTraining, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    from models.lora_linear import use_lora_products

    config = LoraConfig(
        r=parameters.rank,
        lora_alpha=parameters.alpha,
        use_rslora=parameters.rslora,
        target_modules=list(parameters.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(seed % 2**63)
        try:
            model = get_peft_model(base, config)
        except ValueError as error:
            raise UserError(f"parameters.target_modules {list(parameters.target_modules)}: {error}") from None
    use_lora_products(model)
    return model


def _with_adapter(adapted: AdaptedModules, folder: Path, parameters: Parameters | None, trainable: bool) -> Any:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}; adapters are read from safetensors only")
    if trainable and isinstance(parameters, FullTraining):
        raise UserError(
            f"{folder} holds an adapter, but parameters.kind is 'full'; use 'lora' or start from full weights"
        )
    model = adapted.load(folder, trainable)
    if trainable and isinstance(parameters, LoraTraining) and model.peft_config["default"].r != parameters.rank:
        found = model.peft_config["default"].r
        raise UserError(f"{folder} holds an adapter of rank {found}, but parameters.rank is {parameters.rank}")
    return model


def _with_full_weights(model: Any, folder: Path, parameters: Parameters | None, trainable: bool) -> Any:
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise UserError(
            f"{folder} has neither {ADAPTER_CONFIG} nor *.safetensors; weights are read from safetensors only"
        )
    if trainable and isinstance(parameters, LoraTraining):
        raise UserError(
            f"{folder} holds full weights, but parameters.kind is 'lora'; use 'full' or start from an adapter"
        )
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise UserError(f"{folder} holds weights of another model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return model.requires_grad_(trainable)
