"""Define what a source of running simulations needs of its transport: messages of one job, or a folder between jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from mpizero.data.online.sample import Sample


@dataclass
class Arrivals:
    """Hold what has arrived from the producers, and what has become of them.

    Attributes
    ----------
    samples : list of Sample
        The samples that have arrived and are not in a batch yet, in the order in which batches take them.
    ended : set of str
        The producers that will send no more.
    failures : dict
        The errors of those that have failed, by producer.
    """

    samples: list[Sample] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)


class Receiver(ABC):
    """Receive samples on rank 0 of the trainers; no method waits.

    Attributes
    ----------
    arrivals : Arrivals
        What has arrived.
    first_end_stops : bool
        Whether no samples are taken after the first end of a producer.
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.first_end_stops = False

    @abstractmethod
    def poll(self, wanted: int) -> bool:
        """Take in what has arrived, until ``arrivals`` has ``wanted`` samples; tell whether anything has."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """True if all producers have ended and all of their samples are in ``arrivals``."""

    @abstractmethod
    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""

    @abstractmethod
    def release(self, samples: list[Sample]) -> None:
        """Forget samples on which all ranks have trained."""

    @abstractmethod
    def stop(self) -> None:
        """Tell the producers that nobody trains any more."""

    @abstractmethod
    def gone(self) -> bool:
        """Go on to tell the producers; tell whether nothing is left to do."""
