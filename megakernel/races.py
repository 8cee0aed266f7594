"""Races that the simulator finds. JAX says them in words only: up to 0.11 it prints them, later releases log them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import TextIO

from jax.experimental.pallas import tpu as pltpu

from megakernel.report import plural

_MARK = "RACE DETECTED"


class RaceError(RuntimeError):
    """A core used memory that a copy or another core may have been using; results are not to be trusted.

    Attributes:
      races: the two accesses of each.
    """

    def __init__(self, races: list[str]):
        super().__init__(
            f"backend 'simulate' found {plural(len(races), 'race')}, accesses to memory that no wait orders: the "
            f"kernel is wrong, and so may be its results. The first: {races[0]}"
        )
        self.races = races


@dataclasses.dataclass
class Races:
    """What `watch_races` has found: the two accesses of each race."""

    messages: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watch_races() -> Iterator[Races]:
    """Collects the races of the launches inside, and leaves the simulator ready for the next one."""
    races, heard = Races(), _Overheard(sys.stdout)
    logged, loggers = logging.StreamHandler(heard), (logging.getLogger(), logging.getLogger("jax"))
    logged.addFilter(lambda record: _MARK in record.getMessage())
    for logger in loggers:
        logger.addHandler(logged)
    try:
        with contextlib.redirect_stdout(heard):
            yield races
    finally:
        for logger in loggers:
            logger.removeHandler(logged)
        races.messages += [_accesses(text) for text in dict.fromkeys(heard.races)]
        pltpu.reset_tpu_interpret_mode_state()


@contextlib.contextmanager
def refuse_races() -> Iterator[None]:
    """Raises RaceError after the launches inside if there was a race, whatever else they raised."""
    failure = None
    with watch_races() as races:
        try:
            yield
        except Exception as error:
            failure = error
    if races.messages:
        raise RaceError(races.messages) from failure
    if failure is not None:
        raise failure


class _Overheard(io.TextIOBase):
    """Keeps what is said of races and passes everything else on."""

    def __init__(self, onwards: TextIO):
        self.onwards = onwards
        self.races: list[str] = []
        self._ends_race = False  # whether what comes next ends the line of a race: `print` writes that apart

    def write(self, text: str) -> int:
        ends_race, self._ends_race = self._ends_race and text == "\n", _MARK in text
        if self._ends_race:
            self.races.append(text)
        elif not ends_race:
            self.onwards.write(text)
        return len(text)

    def flush(self) -> None:
        self.onwards.flush()


def _accesses(text: str) -> str:
    return ", ".join(line.strip() for line in re.findall(r"^ *(?:read|write) of .*", text, re.MULTILINE))
