"""Times at which a recurring schedule is due, and which missed firings are caught up.

A schedule has a cron expression with five fields, evaluated in a time zone, or an interval, counted from its creation.
Cron expressions are those of Debian's cron, as the library cronsim implements it, with its rules for changes of
daylight saving time: an expression with `*` in the field of minutes or hours is due whenever the wall clock shows a
matching time; another one is due once per matching time, at the first of two equal times, and for a time that is
skipped at the end of the gap.

Invariants:
* A time that is returned is later than the moment that was asked for.
* All functions are pure. The rules of time zones are read from the machine's database, once per zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidSchedule
from mansio.wire.batch.schedule_control_records import CatchUpMode

if TYPE_CHECKING:
    from datetime import tzinfo

LATE_MS_MAX: Final = 60_000
"""A firing that is later than this was missed."""

INTERVAL_MS_MIN: Final = 1_000
INTERVAL_MS_MAX: Final = 366 * 24 * 60 * 60 * 1000
CRON_FIELDS: Final = 5
CRON_LENGTH_MAX: Final = 200

CRON_NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""Nicknames of Debian's cron, which are refused with the expression that they stand for."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """When a schedule is due. `cron` is empty if it has an interval; `created_ms` is since the Unix epoch."""

    cron: str
    every_ms: int
    timezone: str
    created_ms: int

    def check(self) -> None:
        """Raise `InvalidSchedule` if the schedule has no valid expression, interval or zone, or is never due."""
        if bool(self.cron) == bool(self.every_ms):
            raise InvalidSchedule("a schedule has either a cron expression or an interval")
        if self.every_ms:
            if self.timezone:
                raise InvalidSchedule("an interval has no time zone")
            if not INTERVAL_MS_MIN <= self.every_ms <= INTERVAL_MS_MAX:
                raise InvalidSchedule("an interval is at least 1 second and at most 366 days")
            return
        if not self.timezone:  # one spelling of each definition: they are compared
            raise InvalidSchedule("a cron expression has a time zone, UTC for example")
        if len(self.cron) > CRON_LENGTH_MAX:
            raise InvalidSchedule(f"a cron expression has at most {CRON_LENGTH_MAX} characters")
        fields = len(self.cron.split())
        if not fields:
            raise InvalidSchedule("the cron expression is empty")
        if (expression := CRON_NICKNAMES.get(self.cron.strip().lower())) is not None:
            raise InvalidSchedule(f"cron {self.cron!r} has to be written as {expression!r}")
        if fields != CRON_FIELDS:
            plural = "" if fields == 1 else "s"
            raise InvalidSchedule(
                f"cron {self.cron!r} has {fields} field{plural}, not 5:"
                " minute, hour, day of month, month, day of week"
            )
        if self.next_after(self.created_ms) is None:
            raise InvalidSchedule(f"cron {self.cron!r} never matches in the next 50 years")

    def next_after(self, moment_ms: int) -> int | None:
        """Return the first time after a moment at which the schedule is due, ms since the Unix epoch; None if there is
        none in the next 50 years. Raises `InvalidSchedule`."""
        if self.every_ms:
            passed = max(moment_ms - self.created_ms, 0) // self.every_ms
            return self.created_ms + (passed + 1) * self.every_ms
        from cronsim import CronSim, CronSimError  # only brokers with schedules need it

        try:
            start = datetime.fromtimestamp(moment_ms // 1000, find_zone(self.timezone))
            for found in CronSim(self.cron, start):
                found_ms = int(found.timestamp()) * 1000
                if found_ms > moment_ms:  # in the second of two equal hours, cronsim returns the first one
                    return found_ms
        except CronSimError as error:
            reason = str(error)
            raise InvalidSchedule(f"cron {self.cron!r}: {reason[:1].lower()}{reason[1:]}") from error
        except (ValueError, AssertionError) as error:
            raise InvalidSchedule(f"cron {self.cron!r} is invalid") from error
        except OverflowError:
            return None
        return None

    def last_before(self, limit_ms: int, known_ms: int) -> int:
        """Return the latest time below a limit at which the schedule is due, `known_ms` if there is none after it.
        Raises `InvalidSchedule`."""
        if self.every_ms:
            return max(
                known_ms, self.created_ms + (limit_ms - 1 - self.created_ms) // self.every_ms * self.every_ms
            )
        guess_ms = self._guess_before(limit_ms)
        if guess_ms is None or guess_ms <= known_ms:
            guess_ms = known_ms
        elif self.next_after(guess_ms - 1) != guess_ms:
            return self._search_before(limit_ms, known_ms)
        found_ms = self.next_after(guess_ms)
        if found_ms is None or found_ms >= limit_ms:
            return guess_ms
        return self._search_before(limit_ms, known_ms)

    def _guess_before(self, limit_ms: int) -> int | None:
        """Return the latest time below a limit as cronsim finds it backwards: not always one at which the schedule is
        due, because the rules for changes of daylight saving time are those of the way forward."""
        from cronsim import CronSim, CronSimError

        try:
            start = datetime.fromtimestamp(-(-limit_ms // 1000), find_zone(self.timezone))
            return int(next(CronSim(self.cron, start, reverse=True)).timestamp()) * 1000
        except (CronSimError, ValueError, AssertionError, OverflowError, StopIteration):
            return None

    def _search_before(self, limit_ms: int, known_ms: int) -> int:
        """Bisect the time between a known due time and a limit: as many evaluations as its logarithm."""
        low_ms, high_ms = known_ms, limit_ms
        while high_ms - low_ms > 1:
            middle_ms = (low_ms + high_ms) // 2
            found_ms = self.next_after(middle_ms)
            if found_ms is None or found_ms >= limit_ms:
                high_ms = middle_ms
            else:
                low_ms = found_ms
        return low_ms


class Step(NamedTuple):
    """What happens next to a schedule that is due: the due time of the record that is appended now, None for none, and
    the next due time, None for never."""

    fired_ms: int | None
    next_due_ms: int | None


def next_step(recurrence: Recurrence, due_ms: int, now_ms: int, catch_up: CatchUpMode) -> Step:
    """Return what happens to a schedule whose due time has come. Repeated until the next due time is later than now.

    Raises `InvalidSchedule`, for example if the machine does not have the time zone."""
    missed_before_ms = now_ms - LATE_MS_MAX
    if due_ms >= missed_before_ms or catch_up is CatchUpMode.ALL:
        return Step(due_ms, recurrence.next_after(due_ms))
    if catch_up is CatchUpMode.NONE:
        return Step(None, recurrence.next_after(missed_before_ms - 1))
    last_ms = recurrence.last_before(missed_before_ms, due_ms)
    return Step(last_ms, recurrence.next_after(last_ms))


def find_zone(name: str) -> tzinfo:
    """Return a time zone of the IANA database; "" is UTC. Raises `InvalidSchedule`."""
    if name in ("", "UTC"):
        return UTC
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        if _has_zones():
            raise InvalidSchedule(f"time zone {name!r} is unknown") from error
        raise InvalidSchedule(
            f"time zone {name!r} cannot be used: this machine has no time zone database (tzdata)"
        ) from error


_ZONES_FOUND: Final[list[bool]] = []


def _has_zones() -> bool:
    """Whether the machine has a time zone database. It is searched until it is found once, which takes milliseconds."""
    import zoneinfo

    if not _ZONES_FOUND and zoneinfo.available_timezones():
        _ZONES_FOUND.append(True)
    return bool(_ZONES_FOUND)
