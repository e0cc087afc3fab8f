"""Tools to test a training script against workers that die, hang, leave and join.

from shoal.testing import FaultPlan, LocalJob

plan = FaultPlan().kill("w1", step=2, during="reduce").join(at_step=5)
result = LocalJob("train.py", workers=3, plan=plan, directory=tmp_path / "run").run()
assert result.exit_code == 0
assert result.audit.clean
assert len(set(result.digests.values())) == 1      # all workers ended with the same state

The coordinator dies at a point of a decision with `FaultPlan().kill_coordinator(generation=2, during="journaled")`, or
at any moment with `LocalJob.kill_coordinator()`; with `journal="deleted"`, its journal is lost too.
"""

from shoal.testing.clock import Clock
from shoal.testing.faults import Fault, FaultPlan
from shoal.testing.job import JobResult, LocalJob

__all__ = ["Clock", "Fault", "FaultPlan", "JobResult", "LocalJob"]
