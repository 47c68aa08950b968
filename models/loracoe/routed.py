"""A composition with a router as a policy that answers without the task's name."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import UserError
from models.loracoe.files import POOL, ROUTER, ROUTER_SETTINGS
from models.loracoe.gated import GatedModel
from models.loracoe.pool import Pool
from models.loracoe.router_training import AnyRouter, load_router
from models.loracoe.routers import SequenceGates, TokenRouter
from models.rollout.engine import RowGates


class Routed:
    """The router of the composition in `folder`, on the layers of `network`, which stay gated from now on.

    `rows` are the gates that a row takes from its prompt; None for a token router, whose gates are functions of the
    layers' inputs and need nobody to set them. Raises UserError where the pool is not of this network.
    """

    def __init__(self, network: Any, folder: Path, device: torch.device):
        pool, router = load_router(folder / ROUTER, folder / POOL, network.config.get_text_config().hidden_size)
        _check_fits(network, pool, folder)
        self._settings = (folder / ROUTER / ROUTER_SETTINGS).read_bytes()
        self.router: AnyRouter = router.to(device)
        self.gated = GatedModel(network, pool)
        self.rows: RowGates | None = None
        if isinstance(self.router, TokenRouter):
            self.router.install(self.gated)
        else:
            self.rows = SequenceGates(self.gated, self.router)

    def hash(self) -> str:
        """SHA-256 over the pool's factors and scales, the router's tensors and its settings."""
        digest = hashlib.sha256(self._settings)
        tensors: dict[str, Tensor] = {f"router.{name}": value for name, value in self.router.state_dict().items()}
        for name, module in self.gated.modules.items():
            tensors |= {f"{name}.A": module.A_RI, f"{name}.B": module.B_OR, f"{name}.scale": module.scale_R}
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _check_fits(network: Any, pool: Pool, folder: Path) -> None:
    layers = dict(network.named_modules())
    for name, module in pool.modules.items():
        wanted = (module.B_OR.shape[0], module.A_RI.shape[1])
        found = tuple(layers[name].weight.shape) if name in layers else None
        if found != wanted:
            has = f"has weights {found}" if found else "is not in it"
            raise UserError(f"{folder} is of another base: {name} should have weights {wanted}, but {has}; see --base")
