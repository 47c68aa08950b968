"""Which processes a run computes with: the shipped accelerate configurations, or one of the user's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from flows.settings import ComputeSettings
from models.requests import Launch

SHIPPED = Path(__file__).parent / "accelerate"
FIELD = "compute.accelerate_config"


@dataclass(frozen=True)
class Layout:
    """The processes of a run."""

    processes: int
    machines: int
    sharded: bool
    """Whether parameters, gradients and moments are divided over the processes in updates."""
    config: Path | None
    """accelerate's configuration file; None: one process, started without a launcher."""

    @property
    def launch(self) -> Launch | None:
        """What the computing process is told; None: one process."""
        if self.config is None:
            return None
        return Launch(config=self.config, processes=self.processes, machines=self.machines)


def layout(compute: ComputeSettings) -> Layout:
    """The processes that `compute` asks for. Raises UserError for a configuration file that is not one of these."""
    if compute.accelerate_config is not None:
        return _own(Path(compute.accelerate_config).expanduser())
    if compute.processes == 1:
        return Layout(1, 1, False, None)
    return Layout(compute.processes, 1, compute.sharding == "fsdp2", SHIPPED / f"{compute.sharding}.yaml")


def _own(path: Path) -> Layout:
    if not path.is_file():
        raise UserError(f"{FIELD}: {path} does not exist (looked in {Path.cwd()}); make one with `accelerate config`")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{FIELD}: {path} is no YAML ({' '.join(str(error).split())}); correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{FIELD}: {path} holds no settings; make it with `accelerate config`")
    kind = values.get("distributed_type")
    sharded = kind == "FSDP"
    if kind not in ("MULTI_GPU", "FSDP"):
        raise UserError(f"{FIELD}: distributed_type is {kind!r} in {path}; use MULTI_GPU or FSDP")
    version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
    if sharded and str(version) != "2":
        raise UserError(f"{FIELD}: fsdp_version is {version} in {path}; set fsdp_config.fsdp_version to 2")
    machines = _count(values, "num_machines", path)
    if _count(values, "machine_rank", path, least=0) != 0:
        raise UserError(f"{FIELD}: machine_rank is not 0 in {path}; `ratchet run` belongs on the machine of rank 0")
    return Layout(_count(values, "num_processes", path, least=2), machines, sharded, path.absolute())


def _count(values: dict[str, Any], name: str, path: Path, least: int = 1) -> int:
    found = values.get(name, 1 if least else 0)
    if not isinstance(found, int) or found < least:
        raise UserError(f"{FIELD}: {name} is {found!r} in {path}; give a whole number of at least {least}")
    return found
