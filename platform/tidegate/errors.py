"""The error tree. Each error carries its data, names the next step, and survives a pickle (they cross processes)."""

from __future__ import annotations


class TidegateError(Exception):
    """Root of all errors that tidegate raises on purpose."""


class PolicyError(TidegateError):
    """A settings file has a wrong key, unit or type; the text names path, line and the nearest right key."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigError(TidegateError):
    """A run's config asks for what this machine, or this many ranks, can't do. The text names the field and the fix."""


class ClaimNeverFitsError(TidegateError):
    """The claim asks for more than the cluster could give if all else left."""

    def __init__(self, claim: str, wanted: str, there: str, fix: str) -> None:
        super().__init__(claim, wanted, there, fix)
        self.claim, self.wanted, self.there, self.fix = claim, wanted, there, fix

    def __str__(self) -> str:
        return f"claim {self.claim} can never fit: wants {self.wanted}; there is {self.there}\nhint: {self.fix}"


class ClaimUndoneError(TidegateError):
    """The claim was undone; the reason is the arbiter's."""

    def __init__(self, claim: str, reason: str) -> None:
        super().__init__(claim, reason)
        self.claim, self.reason = claim, reason

    def __str__(self) -> str:
        return f"claim {self.claim} was undone: {self.reason}"


class RunExistsError(TidegateError):
    """A run of this name goes on already, with other settings."""

    def __init__(self, run: str, differs: tuple[str, ...]) -> None:
        super().__init__(run, differs)
        self.run, self.differs = run, differs

    def __str__(self) -> str:
        return (
            f"run {self.run} goes on already, with other settings: {', '.join(self.differs)}\n"
            f"hint: give this run another name in its config, or stop the other one first"
        )


class RunRefusedError(TidegateError):
    """The run's settings and the policy's contradict each other."""

    def __init__(self, run: str, why: str) -> None:
        super().__init__(run, why)
        self.run, self.why = run, why

    def __str__(self) -> str:
        return f"run {self.run} is refused: {self.why}\nhint: change either of the two"


class UnknownSubjectError(TidegateError):
    """A person named a claim, node or GPU that is not there, or not exactly one."""

    def __init__(self, subject: str, known: tuple[str, ...]) -> None:
        super().__init__(subject, known)
        self.subject, self.known = subject, known

    def __str__(self) -> str:
        return f"no single thing is meant by {self.subject!r}\nhint: known here: {', '.join(self.known) or 'nothing'}"


class PortInUseError(TidegateError):
    """A port that we need is taken."""

    def __init__(self, port: int, purpose: str, how_to_choose: str) -> None:
        super().__init__(port, purpose, how_to_choose)
        self.port, self.purpose, self.how_to_choose = port, purpose, how_to_choose

    def __str__(self) -> str:
        return f"port {self.port} ({self.purpose}) is in use\nhint: {self.how_to_choose}"


class NoArbiterError(TidegateError):
    """No arbiter answers on the cluster."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return f"no arbiter answers: {self.detail}\nhint: start it with `tidegate up`"


class ArbiterSilentError(NoArbiterError):
    """It is there, but did not answer in time: it restarts, or its machine is busy."""

    def __str__(self) -> str:
        return f"the arbiter does not answer: {self.detail}\nhint: it may be restarting or very busy; ask again"


class NoRecordsError(TidegateError):
    """The arbiter's files are not where they were looked for, or say nothing of that time."""

    def __init__(self, folder: str, detail: str) -> None:
        super().__init__(folder, detail)
        self.folder, self.detail = folder, detail

    def __str__(self) -> str:
        return (
            f"{self.detail} in {self.folder}\n"
            "hint: the files lie on the head node (`arbiter.state_dir` in policy.yaml); name a copy with --state-dir"
        )


class CheckpointError(TidegateError):
    """A checkpoint can't be written or read. The text names the directory and what is wrong with it."""


class UnfinishedError(CheckpointError):
    """It was never committed: a save of it goes on, or was cut short. That is how crashes look, and no sign of rot."""


class DivergedError(TidegateError):
    """The loss has gone wrong and no checkpoint helps."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(step, why)
        self.step, self.why = step, why

    def __str__(self) -> str:
        return (
            f"training has diverged at step {self.step}: {self.why}\n"
            "hint: events.jsonl names the samples; lower optimizer.lr, or raise guard.rollbacks_max and submit again"
        )


class DataError(TidegateError):
    """A data set can't be read or is not what the run's config says."""


class NothingToRollBackError(TidegateError):
    """There are no published weights to take back."""

    def __init__(self, app: str) -> None:
        super().__init__(app)
        self.app = app

    def __str__(self) -> str:
        return (
            f"{self.app}: no published weights serve or are tried\nhint: `tidegate publish` the ones that shall serve"
        )


class ModelRefusedError(TidegateError):
    """An export is incomplete or corrupt; what serves now keeps serving."""

    def __init__(self, uri: str, why: str) -> None:
        super().__init__(uri, why)
        self.uri, self.why = uri, why

    def __str__(self) -> str:
        return f"weights at {self.uri} refused: {self.why}"
