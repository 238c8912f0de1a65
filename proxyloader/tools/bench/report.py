"""The record of a comparison, and its comparison with an earlier record."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .case_process import Epoch, RoundResult
from .cases import BY_DEFAULT, OURS, Ranges
from .config import BenchConfig
from .runner import Outcome
from .sweep import Sweep
from .system_info import machine

METHOD = 3
"""Number of the way of measuring. ``benchmarks/README.md`` says how the ways differ."""

SLOWER = 0.9
"""A figure below this share of the earlier one counts as worse. Equal runs differ by up to 10 %."""

BESIDE_SETTINGS = (
    "date",
    "benchmark",
    "method",
    "command",
    "machine",
    "cases",
    "left_out",
    "augmentations",
    "datasets",
)
"""Keys in which two records that are compared may differ. Each augmentation and each dataset is a case of its own."""

SUMMARIES: dict[str, tuple[Callable[[Sequence[float]], float], int]] = {
    "images_per_s": (statistics.median, 1),
    "cpu_ms_per_image": (statistics.median, 3),
    "loop_cpu_ms_per_image": (statistics.median, 3),
    "pause_ms": (statistics.median, 3),
    "host_mb": (max, 1),
    "gpu_mb": (max, 1),
    "gpu_percent": (statistics.median, 1),
    "jpeg_percent": (statistics.median, 1),
}
"""How the rounds of a case are summarized in a record, and the digits."""

Record = dict[str, Any]


def record_of(
    setting: BenchConfig,
    ranges: Ranges,
    outcomes: Mapping[str, Outcome],
    sweeps: Mapping[str, Sweep],
    command: str,
    **more: Any,
) -> Record:
    """Return a record, which is one line of a file of results, with ``more`` entries about all cases."""
    there = {name: outcome for name, outcome in outcomes.items() if not outcome.is_missing}
    trials = {name: {"trials": sweep.in_record()} for name, sweep in sweeps.items() if sweep.trials}
    return {
        "date": datetime.date.today().isoformat(),
        "benchmark": "bench",
        "method": METHOD,
        "command": command,
        "machine": machine(),
        **setting.in_record(),
        **{name: list(values) for name, values in vars(ranges).items()},
        **more,
        "cases": {name: _summary(outcome) | trials.get(name, {}) for name, outcome in there.items()},
        "left_out": {name: outcome.failure for name, outcome in outcomes.items() if outcome.is_missing},
    }


def _summary(outcome: Outcome) -> dict[str, Any]:
    """Return the medians of the rounds, and the maximum of memory and of the longest wait."""
    rounds = outcome.rounds
    found: dict[str, Any] = {"failure": outcome.failure} if outcome.failure else {}
    found["tuning"] = asdict(outcome.setting.tuning)
    if outcome.first_batch_s is not None:
        found["first_batch_s"] = round(outcome.first_batch_s, 3)
    if outcome.epochs:
        found["epochs"] = [_epoch(same) for same in zip(*outcome.epochs)]
    if not rounds:
        return found
    p50, p99, longest = zip(*(each.wait_ms for each in rounds))
    found["images_per_s_rounds"] = _speeds(rounds)
    found["wait_ms"] = {"p50": _median(p50), "p99": _median(p99), "max": round(max(longest), 3)}
    for name, (summarize, digits) in SUMMARIES.items():
        values = [getattr(each, name) for each in rounds if getattr(each, name) is not None]
        if values:
            found[name] = round(float(summarize(values)), digits)
    return found


def _epoch(rounds: Sequence[Epoch]) -> dict[str, Any]:
    """Return the medians of the rounds, and the speeds of all rounds."""
    found = {field: _median([getattr(each, field) for each in rounds]) for field in asdict(rounds[0])}
    return {**found, "images_per_s_rounds": _speeds(rounds)}


def _speeds(rounds: Sequence[RoundResult | Epoch]) -> list[float]:
    return [round(each.images_per_s, 1) for each in rounds]


def _median(values: Sequence[float]) -> float:
    return round(float(statistics.median(values)), 3)


def last_of(path: Path) -> Record:
    """Return the last record of a file, or raise ValueError if it has none."""
    lines = path.read_text().splitlines()
    try:
        record: Record = json.loads(lines[-1])
        record["cases"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its last line is no record of proxyloader bench") from error
    return record


def check_settings(earlier: Record, record: Record) -> None:
    """Raise ValueError if an earlier record has another method, or a setting that differs."""
    if (method := earlier.get("method", 1)) != METHOD:
        raise ValueError(
            f"the record to compare with was measured in another way (method {method}, now {METHOD}), so its figures "
            "are of something else; measure that version once more"
        )
    before = {"size": "imagenet"} | earlier  # as of records that do not say so
    pairs = {name: (before.get(name), record[name]) for name in record if name not in BESIDE_SETTINGS}
    pairs["gpu"] = earlier["machine"]["gpu"], record["machine"]["gpu"]
    others = [f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if then != now]
    if others:
        raise ValueError(f"the record to compare with is of other settings: {'; '.join(others)}. Give the same options")


def check_cases(earlier: Record, names: Sequence[str]) -> None:
    """Raise ValueError if none of the cases that will be measured can be compared with an earlier record."""
    measured = [name for name, case in earlier["cases"].items() if "images_per_s" in case]
    if OURS not in measured:
        raise ValueError(f"the record to compare with has no speed of {OURS} (perhaps it was interrupted)")
    if OURS not in names:
        raise ValueError(f"{OURS} is what is compared: name it in --only, too")
    ours = {OURS, OURS + BY_DEFAULT}
    if not {*measured} & {*names} - ours:
        others = " and ".join(", ".join(name for name in of if name not in ours) or "none" for of in (measured, names))
        raise ValueError(
            f"speeds are compared as shares of those of other cases, and the two runs have none in common ({others})"
        )


def worse_than(earlier: Record, record: Record) -> list[str]:
    """Return a sentence for each figure that is worse than in an earlier record.

    Speeds are compared relative to the other cases of the same run, so that the state of the machine cancels out.
    """
    found = []
    now = record["cases"].get(OURS, {})
    if "images_per_s" not in now:
        return [f"{OURS} failed: {now.get('failure', 'it was not run')}"]
    for name in earlier["cases"]:
        ours = ours_beside(name)
        names = [each["cases"].get(case, {}).get("images_per_s") for each in (earlier, record) for case in (ours, name)]
        if name == ours or None in names:
            continue
        before, after = names[0] / names[1], names[2] / names[3]
        if after < SLOWER * before:
            found.append(f"{ours} is at {after:.2f} of {name}, and was at {before:.2f}")
    return found


def ours_beside(name: str) -> str:
    """Return the name of our case that another case is compared with. Both are tuned, or both use defaults."""
    return OURS + BY_DEFAULT if name.endswith(BY_DEFAULT) else OURS
