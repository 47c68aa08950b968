"""A whole run with meta-actions as its user starts it, made small."""

import json

import pytest

from data.artifacts import read_rows
from tests.documented import documented, general
from tests.end_to_end.mini import ratchet

pytestmark = pytest.mark.prefect

ARGUMENTS = """
--preset tiny-metaact --model.hidden_size 32 --model.layers 2 --model.intermediate_size 64 --model.pretrain_steps 60
--model.pretrain_batch 16 --experts.totals.source.demonstrations 200 --experts.totals.source.difficulty 3
--splits.validation 8 --splits.test 12 --warmup.epochs 12 --warmup.batch_size 16 --warmup.learning_rate 6e-3
--rl.generated_tokens 6000 --rl.prompts 4 --rl.samples 4 --rl.steps 2 --rl.max_new_tokens 110 --rl.rounds_per_task 3
--rl.validate_every 3 --evaluation.max_new_tokens 110 --reasoning.restarts.share 0.5
""".split()


def test_a_run_with_meta_actions(tmp_path):
    process = ratchet("run", "--root", str(tmp_path), *ARGUMENTS, home=tmp_path / "prefect")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    run = tmp_path / "tiny-metaact"
    card = json.loads((run / "experts/totals/traces/data_card.json").read_text())
    assert card["traces"] + sum(n for name, n in card["refused"].items() if not name.startswith("no_")) == 200
    assert set(card["kinds"]) == {"plain", "confirm", "fix", "two_fixes"}
    result = run / "experts/totals/metaact/0/result"
    names = {row["name"] for row in read_rows(result / "metrics.parquet", "metrics")}
    assert {general(name) for name in names} <= documented()
    assert {"meta/boundary_entropy", "meta/share_critique", "meta/restart_states", "action_entropy"} <= names
    plain = {row["name"] for row in read_rows(run / "experts/totals/outcome/0/result/metrics.parquet", "metrics")}
    assert "meta/accuracy_first" in plain and not {"action_entropy", "meta/restart_states"} & plain
    assert all(row["trace"] for row in read_rows(result / "rollouts.parquet", "rollouts"))
    html = (run / "report/report.html").read_text()
    assert "First and last attempts at the test questions" in html and "Alarms" in html
    assert "alarm gate_" in printed  # so short a warm-up is caught
