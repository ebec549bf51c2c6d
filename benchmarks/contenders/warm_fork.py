"""The floor: the same ranks forked from one warm forkserver, with no cluster around them.

It waits until the forkserver has imported everything, notes the time in the run's directory, and forks; it ends when it
is told to.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

from tidegate.gang import beat
from tidegate.gang.plan import Plan, Slot
from tidegate.gang.rank import PRELOAD, RankJob, rank_main
from tidegate.ids import Generation, GpuId, NodeId
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig

FORKED = "forked_at_s"
"""File in the run's directory: when the first rank was about to be forked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True, help="with a checkpoint to start from")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    arguments = parser.parse_args()
    config = load_model(arguments.config, RunConfig)
    context = multiprocessing.get_context("forkserver")
    # A forked process runs its parent's main module again, this one: its imports must be warm too.
    context.set_forkserver_preload([*PRELOAD, "benchmarks.contenders.warm_fork"])
    # The forkserver answers its first request only after its imports.
    warm = context.Process(target=os.getpid)
    warm.start()
    warm.join()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    slots = tuple(
        Slot(rank=rank, local_rank=rank, node=NodeId("here"), gpu=GpuId(str(rank))) for rank in range(arguments.ranks)
    )
    plan = Plan(generation=Generation(arguments.generation), master_address="127.0.0.1", master_port=port, slots=slots)
    (arguments.run_dir / FORKED).write_text(str(time.time()), encoding="utf-8")
    for slot in slots:
        cells = context.RawArray("d", beat.FIELDS)
        beat.clear(cells)
        job = RankJob(config=config, data_dir=str(arguments.data), run_dir=str(arguments.run_dir), plan=plan, slot=slot)
        context.Process(target=rank_main, args=(job, cells)).start()
    # The default action ends this process, then its forkserver, then the ranks.
    signal.pause()


if __name__ == "__main__":
    main()
