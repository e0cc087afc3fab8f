"""Every error a user can meet, as one tree.

ShoalError                      what shoal raises
├── UserMistake                 the command line prints it as one line and exits with 2
│   ├── SettingsContradict      two settings cannot both hold, one is out of range, or a call is out of place
│   ├── ScriptFailed            the user's script is missing, does not import, or raised
│   ├── ModelUnusable           no parameters, or of a kind that cannot be shared
│   ├── OptimizerUnusable       over other parameters than the model's, or cannot be split
│   ├── DataUnusable            more workers than samples, a batch larger than the data
│   ├── TopologyUnusable        no such graph of neighbors, or weights by which nobody comes to agree
│   ├── WorkersDiffer           models, data or hyperparameters differ between workers
│   ├── LossNotFinite           a loss is NaN or infinite and the policy is to stop
│   ├── OutOfSharedMemory       the arena does not fit
│   ├── DeviceMissing           a GPU is asked for where there is none
│   ├── StateLost               all workers that had the model on their devices died
│   ├── RunDirUnusable          not a run directory, or another job's
│   ├── CheckpointUnusable      damaged, of a newer version, or of another model
│   ├── HostUnusable            a host cannot be reached, has no shoal, or another version
│   ├── JobNotFound             no job of that name answers
│   ├── TokenRefused            the token is missing or not the job's
│   ├── CertificateUnusable     a certificate or key is missing, damaged, or cannot be made
│   └── CertificateRefused      two ends do not believe each other's certificates, or only one of them speaks TLS
├── RestartBudgetSpent          workers died more often than the budget allows
├── StateDrifted                hosts that are to have the same model have not, and none is known to be right
├── CoordinatorLost             the coordinator ended, or does not answer
├── HostLost                the launcher of another host ended, or does not answer
├── ForkServerLost              the process that forks the workers ended
├── LoaderLost                  a loader process of a worker was killed; the worker ends, and is replaced
├── CommunicatorLost            the exchange between devices failed and nobody died; the worker ends, and is replaced
├── Stalled                     some workers have not asked for an operation that others wait for
└── Changed                     the generation is over: the step comes again, what collectives had under way is lost
"""

from __future__ import annotations


class ShoalError(Exception):
    """The root: catch it to catch whatever shoal raises."""


class UserMistake(ShoalError):
    """Something the user can put right; its text says what, where and what next."""


class SettingsContradict(UserMistake):
    pass


class ScriptFailed(UserMistake):
    pass


class ModelUnusable(UserMistake):
    pass


class OptimizerUnusable(UserMistake):
    pass


class DataUnusable(UserMistake):
    pass


class TopologyUnusable(UserMistake):
    pass


class WorkersDiffer(UserMistake):
    pass


class LossNotFinite(UserMistake):
    pass


class OutOfSharedMemory(UserMistake):
    pass


class DeviceMissing(UserMistake):
    pass


class StateLost(UserMistake):
    pass


class RunDirUnusable(UserMistake):
    pass


class CheckpointUnusable(UserMistake):
    pass


class HostUnusable(UserMistake):
    pass


class JobNotFound(UserMistake):
    pass


class TokenRefused(UserMistake):
    pass


class CertificateUnusable(UserMistake):
    pass


class CertificateRefused(UserMistake):
    final = True  # it will be so the next time too


class RestartBudgetSpent(ShoalError):
    pass


class StateDrifted(ShoalError):
    pass


class CoordinatorLost(ShoalError):
    pass


class HostLost(ShoalError):
    pass


class ForkServerLost(ShoalError):
    pass


class LoaderLost(ShoalError):
    pass


class CommunicatorLost(ShoalError):
    pass


class Stalled(ShoalError):
    pass


class Changed(ShoalError):
    """The generation a wait belonged to is over. Scripts see it from the handles of `Worker.collectives` only."""


def named(name: str, message: str) -> ShoalError:
    """The error of that class, as another process told it; ScriptFailed for a class that is not ours."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, ShoalError):
        return found(message)
    return ScriptFailed(f"{name}: {message}")


def trained_nothing(script: str) -> ScriptFailed:
    return ScriptFailed(
        f"{script} trained nothing: main(worker) must go over worker.batches(…) and call worker.step(loss)"
    )


def exit_code(error: ShoalError) -> int:
    return 2 if isinstance(error, UserMistake) else 1
