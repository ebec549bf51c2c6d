"""What stands on the stage before the first act: files, the provider's process, the cluster, the control plane."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from tidegate.cli.demo.digits import write_images
from tidegate.errors import TidegateError
from tidegate.ports import check_port_free
from tidegate.testing import fake_nvml
from tidegate.testing.local_cluster import CHOOSE_ANOTHER, LocalCluster, Ports, end_with_parent

NODES = ("node-a", "node-b", "node-c")
GPUS_PER_NODE = 2
MODEL = "tidegate-digits"
PROVIDER = "stand-in"
JOB = "digits"
NEEDED = ("jobs/train_dit.py", "serve_apps/images.py", "jobs/configs/digits.yaml")


class StageError(TidegateError):
    """A command that a user would type has failed; the text ends with what it printed."""


class WaitedTooLongError(TidegateError):
    """Something that should have happened has not."""


@dataclass(slots=True, kw_only=True)
class Stage:
    root: Path
    """Where jobs/ and serve_apps/ lie."""
    folder: Path
    """Everything the demo writes, but for the report and the pictures."""
    base_port: int
    steps: int | None = None
    nodes: Sequence[str] = NODES
    """GPU nodes; the local cluster names them a, b, c, … itself."""
    policy_changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section of policy.yaml -> what differs from the file."""
    app_args: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the arguments in images.yaml."""
    cluster: LocalCluster = field(init=False)
    provider: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _jobs: JobSubmissionClient | None = field(init=False, default=None)
    """Once the training was submitted."""

    @property
    def http_port(self) -> int:
        return self.base_port + 2

    @property
    def provider_port(self) -> int:
        return self.base_port + 3

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> Path:
        return self.folder / "digits.yaml"

    def gpu_state(self, node: str) -> fake_nvml.NvmlState:
        return fake_nvml.NvmlState(self.folder / "nvml" / f"{node}.state")

    def prepare(self) -> None:
        """Write the files; nothing runs yet.

        Raises:
            StageError: this is not the repository's root.
            PortInUseError: one of the demo's ports is taken.
        """
        missing = [name for name in NEEDED if not (self.root / name).exists()]
        if missing:
            raise StageError(f"{self.root} has no {missing[0]}\nhint: run the demo from the repository's root")
        for port, purpose in ((self.http_port, "the HTTP endpoint"), (self.provider_port, "the stand-in provider")):
            check_port_free(port, purpose, CHOOSE_ANOTHER)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        library = fake_nvml.build(self.folder / "nvml")
        for node in self.nodes:
            fake_nvml.NvmlState(self.folder / "nvml" / f"{node}.state", fake_nvml.gpus_of(node, GPUS_PER_NODE))
        config = yaml.safe_load((self.root / "jobs/configs/digits.yaml").read_text(encoding="utf-8"))
        if self.steps is not None:
            # The same schedule in fewer steps.
            for key in ("warmup_steps", "decay_steps"):
                config["optimizer"][key] = config["optimizer"][key] * self.steps // config["steps"]
            config["steps"] = self.steps
        self.config.write_text(yaml.safe_dump(config), encoding="utf-8")
        policy = yaml.safe_load((self.root / "policy.yaml").read_text(encoding="utf-8"))
        for section, changes in self.policy_changes.items():
            policy[section] = {**policy.get(section, {}), **changes}
        policy["arbiter"]["state_dir"] = str(self.state_dir)
        policy["health"] |= {"nvml_library": str(library), "state_dir": str(self.state_dir / "health")}
        policy["providers"] = [
            {
                "name": PROVIDER,
                "base_url": f"http://127.0.0.1:{self.provider_port}/v1",
                "models": {MODEL: "stand-in-image"},
                "price_per_image_usd": 0.01,
                "slots": 16,
            }
        ]
        (self.folder / "policy.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
        app = yaml.safe_load((self.root / "serve_apps/images.yaml").read_text(encoding="utf-8"))
        app["http_options"]["port"] = self.http_port
        app["applications"][0]["args"] |= {
            "weights": str(self.folder / "fresh"),
            "model": MODEL,
            "policy": str(self.folder / "policy.yaml"),
            **self.app_args,
        }
        (self.folder / "images.yaml").write_text(yaml.safe_dump(app), encoding="utf-8")

    def prepare_data(self) -> None:
        write_images(self.folder / "digits")
        data = ["--images", str(self.folder / "digits"), "--out", str(self.folder / "shards")]
        self.python("jobs/prepare_data.py", *data, "--rows-per-shard", "512")

    def make_fresh_weights(self) -> None:
        config = ["--config", str(self.config)]
        self.python("jobs/export_pipeline.py", *config, "--fresh", "--out", str(self.folder / "fresh"))

    def start_provider(self) -> None:
        command = ["-m", "tidegate.testing.standin_provider", "--port", str(self.provider_port)]
        with (self.folder / "provider.log").open("wb") as out:
            self.provider = subprocess.Popen(
                [sys.executable, *command, "--latency-s", "0.3", "--slots", "16"],
                stdout=out,
                stderr=out,
                preexec_fn=end_with_parent,
            )
        wait_until(lambda: _answers(f"http://127.0.0.1:{self.provider_port}/health"), 30, "the provider answers")

    def local_cluster(self) -> LocalCluster:
        self.cluster = LocalCluster(
            ports=Ports(gcs=self.base_port, dashboard=self.base_port + 1),
            gpus_per_node=(GPUS_PER_NODE,) * len(self.nodes),
            # Ray keeps an idle worker for each CPU, and nothing here asks for one but `serve deploy`.
            head_cpus=2,
            node_cpus=1,
            environment={"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"},
            node_environment=[
                {fake_nvml.STATE_VARIABLE: str(self.folder / "nvml" / f"{node}.state")} for node in self.nodes
            ],
        )
        return self.cluster

    def command(self, *arguments: str, timeout_s: float = 180.0) -> str:
        """Run a command as a user would, against the cluster.

        Raises:
            StageError: it failed, or took longer than `timeout_s`.
        """
        bin_dir = Path(sys.executable).parent
        program = str(bin_dir / arguments[0])
        environment = self.cluster.client_environment() if hasattr(self, "cluster") else dict(os.environ)
        try:
            done = subprocess.run(
                [program, *arguments[1:]],
                env=environment,
                cwd=self.root,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StageError(f"`{' '.join(arguments)}` took longer than {timeout_s:.0f} s") from None
        if done.returncode != 0:
            raise StageError(f"`{' '.join(arguments)}` failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def python(self, *arguments: str) -> str:
        return self.command(Path(sys.executable).name, *arguments)

    def submit_training(self, gpus: int, *options: str) -> None:
        """As a user does; `options` are train_dit.py's."""
        self.command(
            "ray", "job", "submit", "--no-wait", "--submission-id", JOB, "--",
            "python", str(self.root / "jobs/train_dit.py"),
            "--config", str(self.config),
            "--data", str(self.folder / "shards"),
            "--run-dir", str(self.run_dir),
            "--gpus", str(gpus),
            *options,
        )  # fmt: skip
        self._jobs = JobSubmissionClient(self.cluster.dashboard_url)

    def check_job(self) -> None:
        """
        Raises:
            WaitedTooLongError: the training job has failed, so what it should have done never comes.
        """
        if self.job_status() in (JobStatus.FAILED, JobStatus.STOPPED):
            raise WaitedTooLongError("the training job has failed")

    def job_status(self) -> JobStatus | None:
        """The training job's; None before it was submitted, and while the dashboard is too busy to say."""
        if self._jobs is None:
            return None
        try:
            return self._jobs.get_job_status(JOB)
        except (OSError, RuntimeError):
            return None

    def job_log(self) -> str:
        """The last lines of the training job's log; empty before it was submitted."""
        try:
            return self.command("ray", "job", "logs", JOB)[-2000:]
        except StageError:
            return ""

    def stop_provider(self) -> None:
        """It finishes what it has and ends; nobody listens on its port any more."""
        if self.provider is not None and self.provider.poll() is None:
            self.provider.send_signal(signal.SIGTERM)
            try:
                self.provider.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.provider.kill()
                self.provider.wait()


@contextlib.contextmanager
def set_up(stage: Stage, say: Callable[[str], None]) -> Iterator[None]:
    """Everything from nothing to `serve deploy`; all of it is gone when the block is left."""
    try:
        say("writing the files: settings, fake NVML library, 1,797 real digits")
        stage.prepare()
        stage.start_provider()
        with stage.local_cluster():
            say(f"Ray runs: a head and {len(stage.nodes)} GPU nodes of {GPUS_PER_NODE} logical GPUs each")
            stage.prepare_data()
            stage.make_fresh_weights()
            say("data is in Parquet shards, fresh weights are exported")
            stage.command("tidegate", "up", "--policy", str(stage.folder / "policy.yaml"))
            say("the arbiter and the health agents run")
            stage.command("serve", "deploy", str(stage.folder / "images.yaml"))
            yield
    finally:
        stage.stop_provider()


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, every_s: float = 0.25) -> None:
    """Raises WaitedTooLongError when `condition` is not true within `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise WaitedTooLongError(f"waited {deadline_s:.0f} s in vain: {what}")
        time.sleep(every_s)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
