"""The flow `expert-training`: one expert of a run, by itself or for a run that fans out."""

from prefect import flow, get_run_logger, runtime

from data import storage
from data.errors import UserError
from flows import parameters
from flows.locks import run_lock
from flows.parameters import Overrides, Preset, RunName, Seed, Tokens
from flows.pipeline import Pipeline
from tasks.compute import close_shared


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    return f"{given.get('name') or given.get('preset')}-{given.get('task')}"


@flow(name="expert-training", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
def expert_training(
    task: str,
    preset: Preset = "tiny",
    name: RunName | None = None,
    root: str | None = None,
    seed: Seed | None = None,
    generated_tokens: Tokens | None = None,
    overrides: Overrides | None = None,
) -> str:
    """Trains one expert of a run: its demonstrations, warm-up and arms. Finished steps are never done again.

    Args:
        task: Which expert, by its name in the settings (arithmetic, programs, state in the preset tiny).
        preset: The shipped settings to start from.
        name: The run's name; empty means the preset's name. A run of the same name and settings finds what this made.
        root: Folder of the runs, a path or any fsspec URL; empty means the setting's own (runs).
        seed: Seed of everything random; empty means the setting's own (0).
        generated_tokens: Budget of an arm in generated tokens; empty means the setting's own.
        overrides: Any other setting, nested, as in a settings file; for example {"rl": {"samples": 16}}.

    Returns:
        The URL of the expert's folder.
    """
    log = get_run_logger()
    settings = parameters.load(preset, overrides, name=name, root=root, seed=seed, generated_tokens=generated_tokens)
    if task not in settings.experts:
        raise UserError(f"task: there is no expert {task!r}; choose from {', '.join(settings.experts)}")
    try:
        pipeline = Pipeline(settings)
        # every expert needs all held-out questions and the base: the first that comes makes them, the others find them
        with run_lock(settings.root, settings.name, "base", wait=True, log=log.info):
            demonstrations, base = pipeline.prepare()
        with run_lock(settings.root, settings.name, f"expert-{task}", wait=True, log=log.info):
            pipeline.expert(task, base, demonstrations[task])
        return storage.join(settings.root, settings.name, "experts", task)
    finally:
        close_shared()
