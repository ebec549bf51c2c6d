"""The images application: the gateway, and the plan by which the arbiter gives each GPU node its pool of replicas.

tidegate up --app serve_apps/images.yaml     # or: serve deploy serve_apps/images.yaml
"""

import math
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve

from tidegate.serve.about import look_at
from tidegate.serve.admission import Limits, parse_size
from tidegate.serve.gateway import Gateway
from tidegate.serve.options import EngineOptions
from tidegate.serve.pools import images_plan
from tidegate.spec.load import load_policy
from tidegate.train.config import Compile

# No `from __future__ import annotations` here: Serve reads `build`'s annotation to check the arguments.


class ImagesArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weights: str
    """A folder written by `jobs/export_pipeline.py`, or any pipeline that diffusers saved; every node must see it under
    this path. Or `s3://bucket/prefix`: each node fetches it."""
    model: str = "tidegate-digits"
    """The name that clients ask for."""
    quality_steps: dict[str, int] = Field(default_factory=dict)
    """OpenAI's `quality` as denoise steps, `{low: 8, high: 28}`; without it only `auto` is accepted."""
    images_max: int = Field(default=10, ge=1, le=100)
    """In one request."""
    prompt_chars_max: int = Field(default=4000, ge=1, le=32_000)
    steps_max: int = Field(default=200, ge=1)
    waiting_max: int = Field(default=2000, ge=1)
    """Requests that may wait for a place in one gateway; more are answered 429."""
    policy: str = "policy.yaml"
    gateways: int = Field(default=1, ge=1)
    gateway_labels: dict[str, str] = Field(default_factory=dict)
    """Node labels, as in Ray's label selectors: where gateways may run. Empty = anywhere. A gateway's own requests die
    with its node, so keep them off machines that are likely to be lost."""
    deployed_at_s: float | None = None
    """Filled in by `tidegate up --redeploy`, so that Serve builds anew what has not changed."""
    threads_per_replica: int = Field(default=1, ge=1)
    sizes: list[str] = Field(default_factory=list)
    """What is made, `[1024x1024, 1280x768]`, the first by default; none = the one that the weights were made for. Each
    is compiled and warmed before a replica is ready."""
    batch_max: int = Field(default=4, ge=1, le=64)
    """Pictures stepped at once, at most. Warm-up measures whether more than one pays, and how many."""
    requests_per_replica: int = Field(default=2, ge=1, le=64)
    """That a replica has at a time: one at work, one ready to follow. Where batches pay, `batch_max` + 1 fills them."""
    compile: Compile = "none"
    """Have torch compile the network: replicas start later and are faster from then on."""
    memory_bytes: int | None = Field(default=None, ge=2**20)
    """What an engine may take; none = all of its GPU. Sizes that don't fit are refused with 400."""
    embeddings_bytes: int = Field(default=256 * 2**20, ge=0)
    """Of encoded prompts that each replica keeps."""
    text_length: int = Field(default=512, ge=1)
    """Tokens of a prompt, for a Krea 2 pipeline without `recipe.json`."""
    gpus_per_replica: float = 1
    """The pools count one whole GPU for each replica; another number is refused."""

    @field_validator("sizes")
    @classmethod
    def _sizes(cls, sizes: list[str]) -> list[str]:
        for size in sizes:
            parse_size(size)
        return sizes

    @field_validator("gpus_per_replica")
    @classmethod
    def _whole(cls, gpus: float) -> float:
        if gpus == 1:
            return gpus
        # A replica never lies across two GPUs, so shares don't add up over them.
        fit = int(1 / gpus + 1e-9) if 0 < gpus < 1 else 0
        why = "one GPU holds one replica"
        if fit:
            why = f"{fit} of them fit on one GPU, so 6 need {math.ceil(6 / fit)} GPUs, not {math.ceil(6 * gpus)}"
        raise ValueError(f"{gpus} GPUs a replica: {why}; leave it at 1")


def build(args: ImagesArgs) -> serve.Application:
    policy = load_policy(Path(args.policy))
    sizes = tuple(parse_size(size) for size in args.sizes)
    options = EngineOptions(
        threads=args.threads_per_replica,
        sizes=sizes,
        batch_max=args.batch_max,
        compile=args.compile,
        memory_bytes=args.memory_bytes,
        embeddings_bytes=args.embeddings_bytes,
        text_length=args.text_length,
    )
    about = look_at(args.weights)
    limits = Limits(
        model=args.model,
        sizes=sizes or about.sizes,
        guidance=about.guidance,
        quality_steps=args.quality_steps,
        images_max=args.images_max,
        prompt_chars_max=args.prompt_chars_max,
        steps_max=args.steps_max,
        waiting_max=args.waiting_max,
    )
    gateway = Gateway.options(
        num_replicas=args.gateways,
        ray_actor_options={"num_cpus": 0, "label_selector": args.gateway_labels},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=policy.serving.request_deadline_s,
    )
    plan = images_plan(
        app=policy.serving.app,
        weights=args.weights,
        options=options,
        rollout=policy.serving.rollout,
        requests_per_replica=args.requests_per_replica,
        stuck_after_s=2 * policy.serving.request_deadline_s,
        drain_s=policy.serving.drain_deadline_s,
        at_s=time.time(),
    )
    return gateway.bind(policy, limits, plan)
