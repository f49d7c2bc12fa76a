"""Has a worker fallen behind? Its time, against what its own past says of a batch of that size.

A long-remembering line t = fixed + slope * b per worker is the past, with the errors it usually makes. A worker is behind when it takes
`slow` times as long, by more than four usual errors, in `windows` windows on end. What has changed is the phase (data, compute,
optimizer) that grew most. Then the past begins anew: a worker that stays slow is told of once. The exchange is watched in the
same way, as worker -1.

Balancing takes samples from a worker as soon as it slows down, so the windows to judge have other batches than the past. Lines are
believed where two sizes have been seen, and as far as half the smallest and twice the largest. Where only one was seen, what a
smaller batch should take lies between its share of the old time and all of it: the middle is expected, once a window of the old size was
slow. Windows that cannot be judged while that is pending are neither counted nor learned.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.policies.balance.fit import Fit, Lines
from paceline.policies.balance.level import Floats
from paceline.types import to_plain

Bools = NDArray[np.bool_]
PHASES = ("data", "compute", "optimizer")
_APART = 1.1  # two sizes of a batch
_REACH = 2.0  # how far beyond them a line is believed
_PAST = 4  # windows before anything is judged
_SIGMA = 4.0
_LEAST_ERROR = 0.02  # relative: no clock and no machine is better


@dataclass(frozen=True, slots=True)
class Behind:
    """Who is slow, since when, in what, by how much.

    Args:
        worker: its number; -1 is the exchange between all.
        since: the step its first slow window began with.
        phase: `data`, `compute`, `optimizer` or `exchange`.
        ratio: its time over what was to be expected.
        confidence: at least this sure that it is not noise, whatever the noise is like: z^2 / (1 + z^2) for z usual errors (Cantelli).
        text: a sentence.
    """

    worker: int
    since: int
    phase: str
    ratio: float
    confidence: float
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What is known of every worker, and of the exchange as the last one.

    Args:
        lines: the times to be expected.
        least: the smallest batch in its past.
        most: the largest.
        error: mean squared relative error of the line.
        phases: seconds per sample and phase, a running mean.
        count: windows in which each was slow, since it was last as expected.
        since: the step the first of them began with.
        score: the least of their errors, in usual ones.
        seen: windows in its past.
        best: when it was at its best: usual batch, its time, mean squared error, the line's fixed time and time per sample, the smallest
            and largest batch in its past; 0 where that is not known.
        best_since: the step at which it was.
        best_phases: the phases then.
    """

    lines: Lines
    least: Floats
    most: Floats
    error: Floats
    phases: Floats
    count: Floats
    since: Floats
    score: Floats
    seen: Floats
    best: Floats
    best_since: Floats
    best_phases: Floats

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Past) and to_plain(self) == to_plain(other)


@dataclass(frozen=True, slots=True)
class Watch:
    """Looks out for stragglers.

    Args:
        slow: times as long as expected.
        windows: that were.
        fit: how the past is remembered; it takes no jump for a new line.
    """

    slow: float = 1.25
    windows: int = 3
    fit: Fit = field(default_factory=lambda: Fit(memory=0.97, jump=math.inf))

    def init(self, num_workers: int) -> Past:
        """Nothing seen."""
        nothing = np.zeros(num_workers + 1)
        return Past(
            lines=Lines.unknown(num_workers + 1),
            least=nothing,
            most=nothing,
            error=nothing,
            phases=np.zeros((num_workers + 1, len(PHASES))),
            count=nothing,
            since=nothing,
            score=nothing,
            seen=nothing,
            best=np.zeros((num_workers + 1, 7)),
            best_since=nothing,
            best_phases=np.zeros((num_workers + 1, len(PHASES))),
        )

    def update(
        self,
        step: int,
        samples: Floats,
        busy_s: Floats,
        noise_s: Floats,
        phases_s: Floats,
        exchange_s: float,
        past: Past,
    ) -> tuple[list[Behind], Past]:
        """Take in a window.

        Args:
            step: its first step.
            samples: the batch of every worker; 0 where it told nothing.
            busy_s: the typical time it took.
            noise_s: standard error of that time.
            phases_s: the same time in its phases, shape (workers, 3).
            exchange_s: the exchange of a step; 0 where nothing is known.
            past: what was known before.
        """
        told = (samples > 0) & (busy_s > 0)
        b = np.append(np.where(told, samples, 0.0), 1.0 if exchange_s > 0 else 0.0)
        t = np.append(np.where(told, busy_s, 0.0), exchange_s)
        noise = np.append(noise_s, 0.0)
        rows = np.vstack([phases_s, np.zeros((1, len(PHASES)))])
        expected, known = self._expected(b, past)
        judged = (b > 0) & (past.seen >= _PAST) & known & (expected > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(judged, t / expected, 1.0)
            usual = np.sqrt(np.maximum(past.error, _LEAST_ERROR**2) + np.where(judged, noise / expected, 0.0) ** 2)
            score = (ratio - 1.0) / usual
        busiest = float(np.max(np.where(told, busy_s, 0.0), initial=0.0))
        matters = np.append(np.ones(len(samples), bool), t[-1] - expected[-1] > 0.1 * busiest)
        slow = judged & (ratio > self.slow) & (score > _SIGMA) & matters
        pending = (past.count > 0) & (b > 0) & ~judged
        count = np.where(slow, past.count + 1, np.where(pending | (b == 0), past.count, 0.0))
        since = np.where(slow & (past.count == 0), float(step), past.since)
        lowest = np.where(slow, np.where(past.count > 0, np.minimum(past.score, score), score), past.score)
        behind = count >= self.windows
        found = [
            self._said(
                int(who) if who < len(samples) else -1,
                int(since[who]),
                rows[who] - past.phases[who] * b[who],
                float(ratio[who]),
                float(lowest[who]),
            )
            for who in np.flatnonzero(behind)
        ]
        learned = np.where(slow | pending, 0.0, b)  # what may be the beginning of a fall is not yet the past
        after = self._learned(learned, t, noise, rows, ratio, judged, ~behind, count, since, lowest, past)
        return self._crept(step, b, learned, behind, found, past, after)

    def _crept(
        self, step: int, b: Floats, learned: Floats, behind: Bools, found: list[Behind], past: Past, after: Past
    ) -> tuple[list[Behind], Past]:
        """Whoever becomes slower little by little takes its past along: it is compared with itself at its best."""
        usual_b, usual_t = after.lines.mean_b, after.lines.mean_t
        settled = (learned > 0) & (after.seen >= 2 * _PAST) & ~behind
        settled[-1] = False  # the exchange has no best of its own
        best_b, best_t, error, fixed, slope, least, most = past.best.T
        alike = (best_b > 0) & (np.abs(usual_b - best_b) <= (_APART - 1) * best_b)
        on_line = (best_b > 0) & (most >= _APART * least) & (usual_b * _REACH >= least) & (usual_b <= _REACH * most)
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = best_t * np.maximum(
                1.0, usual_b / best_b
            )  # a smaller batch takes no longer, a larger one no more than in proportion
        expected = np.where(alike, best_t, np.where(on_line, np.minimum(fixed + slope * usual_b, bound), bound))
        known = settled & (best_b > 0) & (expected > 0)
        ratio = np.where(known, usual_t / np.where(known, expected, 1.0), 1.0)
        score = (ratio - 1.0) / np.sqrt(np.maximum(error, _LEAST_ERROR**2))
        far = (ratio > self.slow) & (score > _SIGMA)
        for who in np.flatnonzero(far):
            grown = (after.phases[who] - past.best_phases[who]) * b[who]
            found.append(self._said(int(who), int(past.best_since[who]), grown, float(ratio[who]), float(score[who])))
        anew = behind | far | (settled & (best_b <= 0)) | (known & (alike | on_line) & (ratio < 1.0))
        lines = after.lines
        now = np.stack([usual_b, usual_t, after.error, lines.fixed_s, lines.slope_s, after.least, after.most], axis=1)
        best = np.where(behind[:, None], 0.0, now)
        return found, dataclasses.replace(
            after,
            best=np.where(anew[:, None], best, past.best),
            best_since=np.where(anew, float(step), past.best_since),
            best_phases=np.where(anew[:, None], after.phases, past.best_phases),
        )

    def _expected(self, b: Floats, past: Past) -> tuple[Floats, Bools]:
        """What a batch should take, and whether that can be said."""
        lines = past.lines
        two = past.most >= _APART * past.least
        near = np.abs(b - lines.mean_b) <= (_APART - 1) * lines.mean_b
        within = (b * _REACH >= past.least) & (b <= _REACH * past.most)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(lines.mean_b > 0, b / lines.mean_b, 1.0)
        middle = lines.mean_t * (1.0 + part) / 2.0
        guessed = ~two & ~near & (past.count > 0) & (part < 1.0)
        expected: Floats = np.where(guessed, middle, lines.fixed_s + lines.slope_s * b)
        known: Bools = near | (two & within) | guessed
        return expected, known

    def _learned(
        self,
        b: Floats,
        t: Floats,
        noise: Floats,
        rows: Floats,
        ratio: Floats,
        judged: Bools,
        kept: Bools,
        count: Floats,
        since: Floats,
        score: Floats,
        past: Past,
    ) -> Past:
        """The past with a window more; it begins anew for those that are not `kept`."""
        took = b > 0
        lines, fresh = self.fit.update(past.lines, b, t, noise), Lines.unknown(len(b))
        names = [one.name for one in dataclasses.fields(Lines)]
        weight = np.where(took, np.where(past.seen > 0, 0.1, 1.0), 0.0)
        off: Floats = np.minimum((ratio - 1.0) ** 2, 0.25)  # one wild window is not what is usual
        share: Floats = np.where(took & judged, np.where(past.seen > _PAST, 0.05, 0.25), 0.0)
        error: Floats = past.error + share * (off - past.error)
        each = rows / np.maximum(b, 1.0)[:, None]
        return Past(
            Lines(*(np.where(kept, getattr(lines, name), getattr(fresh, name)) for name in names)),
            np.where(kept, np.where(took & ((past.least == 0) | (b < past.least)), b, past.least), 0.0),
            np.where(kept, np.maximum(past.most, b), 0.0),
            np.where(kept, error, 0.0),
            np.where(kept[:, None], past.phases + weight[:, None] * (each - past.phases), 0.0),
            np.where(kept, count, 0.0),
            since,
            score,
            np.where(kept, past.seen + took, 0.0),
            past.best,
            past.best_since,
            past.best_phases,
        )

    def _said(self, who: int, since: int, grown: Floats, ratio: float, score: float) -> Behind:
        confidence = score**2 / (1.0 + score**2)
        phase = "exchange" if who < 0 else PHASES[int(np.argmax(grown))]
        name = "the exchange" if who < 0 else f"worker {who}"
        what = "" if who < 0 else f", for {phase}"
        text = f"{name} takes {ratio:.1f} times as long as before since step {since}{what} (surely no noise: {confidence:.0%})"
        return Behind(who, since, phase, ratio, confidence, text)
