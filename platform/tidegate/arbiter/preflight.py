"""Claims that could never be granted are refused when they are filed, with the numbers. Pure."""

from __future__ import annotations

from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.placement import most_ever
from tidegate.arbiter.view import View
from tidegate.errors import ClaimNeverFitsError
from tidegate.spec.policy import Policy


def check_fits(view: View, policy: Policy, spec: ClaimSpec) -> None:
    """Compare a claim with the live cluster as if everybody else had left (C025).

    Raises:
        ClaimNeverFitsError: with what it asks, what there is, and what to change.
    """
    nodes = len(view.nodes)
    all_gpus = most_ever(view)
    if spec.claim_class not in policy.claims.classes or spec.claim_class == "serving":
        known = ", ".join(name for name in policy.claims.classes if name != "serving")
        fix = "name one of these, or add it to policy.yaml"
        raise ClaimNeverFitsError(spec.name, f"class {spec.claim_class!r}", f"classes {known}", fix)
    if not 1 <= spec.min_gpus <= spec.max_gpus:
        asked = f"{spec.min_gpus} to {spec.max_gpus} GPUs"
        fix = "min GPUs must be at least 1 and at most max GPUs"
        raise ClaimNeverFitsError(spec.name, asked, f"{all_gpus} GPUs on {nodes} nodes", fix)
    for name in ("gpus_per_node", "deadline_s", "drain_deadline_s", "patience_s"):
        value = getattr(spec, name)
        if value is not None and value <= 0:
            raise ClaimNeverFitsError(spec.name, f"{name} {value}", "nothing below 0", f"{name} must be above 0")
    largest = max((node.gpu_slots for node in view.nodes.values()), default=0)
    if (spec.gpus_per_node or 1) > largest:
        asked = f"{spec.gpus_per_node or 1} GPUs on one node"
        fix = f"lower GPUs per node to {largest} or less" if largest else "start nodes that declare GPUs"
        raise ClaimNeverFitsError(spec.name, asked, f"{all_gpus} GPUs, at most {largest} on one node", fix)
    there = most_ever(view, spec)
    if spec.min_gpus > there:
        shape = "" if spec.gpus_per_node is None else f", {spec.gpus_per_node} on each"
        where = " in one network domain" if spec.one_domain else ""
        raise ClaimNeverFitsError(
            spec.name,
            f"at least {spec.min_gpus} GPUs on nodes of one size{shape}{where}",
            f"{there} GPUs on {nodes} live nodes{where}, all else gone",
            f"lower min GPUs to {there} or less, or add {spec.min_gpus - there} GPUs",
        )
