"""The Slurm job script under a real Slurm: its directives are lawful, and a job that is preempted goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from examples.multi_node import drill
from tests.support.local_slurm import local_slurm

SCRIPT = Path(drill.__file__).parent / "slurm.sbatch"
REPOSITORY = SCRIPT.parents[2]
ITERATIONS = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _losses(log: str) -> dict[int, str]:
    """The loss of each iteration, of which none may have two."""
    assert "srun: error" not in log, log[-3000:]
    found: dict[int, str] = {}
    for iteration, loss in re.findall(r"iteration +(\d+)/.*?exact loss: (\S+)", log):
        assert found.setdefault(int(iteration), loss) == loss, f"iteration {iteration} was trained twice, differently"
    return found


def test_a_preempted_job_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """Two nodes of one rank each. Preemption is what ``scontrol requeue`` does: SIGTERM, and after a while SIGKILL."""
    run, log = tmp_path / "run", tmp_path / "log"
    flags = [*drill.MODEL_FLAGS.split(), "--train-iters", str(ITERATIONS)]
    settings = {
        "RUN": str(run),
        "RANKS_PER_NODE": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with local_slurm(tmp_path) as slurm:
        given = ("--nodes=2", f"--chdir={REPOSITORY}")
        assert "to start at" in slurm.run("sbatch", "--test-only", *given, str(SCRIPT)), "as it is, on nodes of 8 GPUs"
        job = slurm.run(
            *("sbatch", "--parsable", *given, f"--output={log}"), str(SCRIPT), *flags, settings=settings
        ).strip()
        slurm.wait_until(lambda: log.exists() and len(_losses(log.read_text())) > 10, 120)
        slurm.run("scontrol", "requeue", job)
        slurm.wait_until(lambda: "SIGTERM was received" in log.read_text(), 60)
        # A job that is queued again waits for a while; an operator may let it go at once.
        slurm.wait_until(lambda: "PENDING" in slurm.run("squeue", "-h", "-o", "%T"), 60)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        slurm.wait_until(lambda: "all iterations are done" in log.read_text(), 240)
        slurm.wait_until(lambda: "COMPLETED" in slurm.run("scontrol", "show", "job", job), 60)
        assert "Restarts=1 " in slurm.run("scontrol", "show", "job", job)
    text = log.read_text()
    (ended,) = re.findall(r"training ended after iteration (\d+): SIGTERM was received", text)
    assert f"training continues after iteration {ended}" in text and 10 < int(ended) < ITERATIONS
    assert list(_losses(text)) == list(range(1, ITERATIONS + 1))
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
