"""`EagleWorkerV2`: speculative decoding whose rounds overlap (spec v2)."""

from __future__ import annotations

from adaptive_spec.workers.eagle import EagleWorker

__all__ = ["EagleWorkerV2"]


class EagleWorkerV2(EagleWorker):
    """`EagleWorker` with two rounds in flight: a round is launched before the results of the one
    before it are on the host, so that the device never waits for the host's work.

    The tokens are the same. What differs is when the host learns them and what it can act on:

    - Tokens come one round late, and a prompt's first token comes with its first round.
    - Round r runs with the S that round r - 2 led to, exactly.
    - A request that ended in round r - 1 still ran in round r. Remove its row when the end is seen;
      `DecodeResult.rows` says which of a round's rows are still there.
    - Each row reserves cache slots for two rounds at the largest S.
    """

    rounds_in_flight = 2
