"""What trackers get is what metrics.parquet holds: once, in order, whether the cell is interrupted or not."""

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest

from data.artifacts import read_rows
from data.progress import Silent
from models import trackers
from models.cell import flat, run_rounds
from models.settings import Tracking
from tests.models.test_cell import Lines, contents, inputs, request_for, straight  # noqa: F401 - fixtures

ROUNDS = 3


@pytest.fixture(autouse=True)
def nothing_open():
    trackers._open.clear()
    yield
    for tracker in trackers._open.values():
        tracker.finish()
    trackers._open.clear()


def tracked(inputs, url, folder, names, last_round=None):  # noqa: F811
    tracking = Tracking(trackers=names, project="lab", run_name="tiny-sums-r3-7", folder=str(folder))
    request = request_for(inputs, url, max_rounds=ROUNDS, last_round=last_round)
    return request.model_copy(update={"tracking": tracking})


def new_process() -> None:
    """What a process that is killed forgets; what it has sent stays sent."""
    for tracker in trackers._open.values():
        tracker.finish()
    trackers._open.clear()


def wanted(url) -> dict[str, list[tuple[int, float]]]:
    """Name → (step, value) in metrics.parquet."""
    found = defaultdict(list)
    for row in read_rows(url / "result/metrics.parquet", "metrics"):
        found[row["name"]].append((row["step"], row["value"]))
    return {name: sorted(points) for name, points in found.items()}


def test_tensorboard_and_mlflow_hold_the_tables(inputs, tmp_path, monkeypatch):  # noqa: F811
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    url, folder, names = tmp_path / "cell", tmp_path / "trackers", ("tensorboard", "mlflow")
    run_rounds(tracked(inputs, url, folder, names, last_round=0), Silent())
    run_rounds(tracked(inputs, url, folder, names, last_round=0), Silent())
    new_process()
    assert run_rounds(tracked(inputs, url, folder, names), Silent())["finished"]
    run_rounds(tracked(inputs, url, folder, names), Silent())
    table = wanted(url)
    events = EventAccumulator(str(folder / "lab" / "tiny-sums-r3-7"), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(table)
    for name, points in table.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert sorted(found) == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], name
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert run.info.run_name == "tiny-sums-r3-7"
    assert run.data.params["rl.prompts"] == "4"
    assert set(run.data.metrics) == set(table)
    for name, points in table.items():
        found = [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, name)]
        assert sorted(found) == points, name


class Service:
    """Stands for wandb or trackio: modules with `init`, `config` and runs that log."""

    def __init__(self, name: str):
        self.module = ModuleType(name)
        self.module.init = self.init
        self.module.config = SimpleNamespace(update=lambda values, **_: self.configurations.append(values))
        self.starts, self.logged, self.configurations, self.finished, self.broken = [], [], [], 0, False

    def init(self, project, **options):
        self.starts.append({"project": project, **options})
        return SimpleNamespace(id="abc", log=self.log, finish=self.finish)

    def log(self, values, step=None, **_):
        if self.broken:
            raise ConnectionError("no route")
        assert step is None
        self.logged.append(values)

    def finish(self):
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def service(request, monkeypatch):
    service = Service(request.param)
    monkeypatch.setitem(sys.modules, request.param, service.module)
    return service


def test_services_get_every_value_with_its_axes(inputs, tmp_path, service):  # noqa: F811
    url, name = tmp_path / "cell", service.module.__name__
    run_rounds(tracked(inputs, url, tmp_path, (name,), last_round=1), Silent())
    new_process()
    run_rounds(tracked(inputs, url, tmp_path, (name,)), Silent())
    found = defaultdict(list)
    for values in service.logged:
        for key, value in values.items():
            if not key.startswith("axis/"):
                found[key].append((values["axis/step"], value))
    assert {key: sorted(points) for key, points in found.items()} == wanted(url)
    assert [start["project"] for start in service.starts] == ["lab", "lab"]
    assert {start["name"] for start in service.starts} == {"tiny-sums-r3-7"}
    if name == "wandb":
        assert "id" not in service.starts[0]
        assert service.starts[1]["id"] == "abc"
    assert len(service.configurations) == 1
    assert service.finished == 2


def test_a_tracker_that_fails_ends_no_run(inputs, tmp_path, service):  # noqa: F811
    service.broken = True
    report = Lines()
    name = service.module.__name__
    assert run_rounds(tracked(inputs, tmp_path / "cell", tmp_path, (name,)), report)["finished"]
    said = [line for line in report.lines if line.startswith(f"tracker {name}: ConnectionError: no route")]
    assert len(said) == 1
    service.broken = False
    run_rounds(tracked(inputs, tmp_path / "cell", tmp_path, (name,)), report)
    assert service.logged == []


def test_trackers_change_no_number(inputs, straight, tmp_path, service):  # noqa: F811
    """The same cell, file for file, but for the file that says what was sent."""
    tracking = Tracking(trackers=(service.module.__name__,), run_name="x", folder=str(tmp_path))
    request = request_for(inputs, tmp_path / "cell").model_copy(update={"tracking": tracking})
    run_rounds(request, Silent())
    assert {name: h for name, h in contents(tmp_path / "cell").items() if name != trackers.LEDGER} == contents(straight)


def test_settings_as_one_table():
    assert flat({"rl": {"loss": {"kind": "x"}, "cap": None}, "seed": 3, "names": ["a"]}) == {
        "rl.loss.kind": "x",
        "rl.cap": "None",
        "seed": 3,
        "names": "['a']",
    }
