"""StoreConnectorStats: what an engine and its store have done."""

from dataclasses import dataclass


@dataclass(slots=True)
class StoreConnectorStats:
    """Counters since the engine was made.

    Attributes:
        num_lookups: Prompts that the store was asked for. A prompt counts once.
        num_lookup_tokens: Their tokens.
        num_found_tokens: Tokens that the store had beyond those that were cached, when a prompt could first be loaded.
        num_loads: Loads that have reached the prefix tree. One prompt may have several, as after a preemption.
        num_loaded_tokens: Their tokens.
        num_early_loads: Loads whose bytes were still on their way.
        num_refused_tokens: Tokens found and left there: computing was expected to be faster.
        num_late: Loads that their requests did not wait for.
        num_errors: Exceptions of the store, and answers that are no counts.
        num_stores: Prompts that were handed to the store.
        num_stored_tokens: Tokens that it held afterwards.
        num_skipped: Prompts that were not stored because too many were on their way.
        load_seconds: Time that the threads spent on loads.
        store_seconds: The same for storing.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_found_tokens: int = 0
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_early_loads: int = 0
    num_refused_tokens: int = 0
    num_late: int = 0
    num_errors: int = 0
    num_stores: int = 0
    num_stored_tokens: int = 0
    num_skipped: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0

    def note_load(self, num_tokens: int, is_early: bool) -> None:
        """Count a load that has reached the prefix tree.

        Args:
            num_tokens: Its tokens.
            is_early: Whether its bytes are on their way still.
        """
        self.num_loads += 1
        self.num_loaded_tokens += num_tokens
        self.num_early_loads += is_early

    def note_load_time(self, seconds: float) -> None:
        """Add the time of a load.

        Args:
            seconds: In its thread.
        """
        self.load_seconds += seconds

    def note_saved(self, num_tokens: int) -> None:
        """Count a prompt that was handed to the store.

        Args:
            num_tokens: Tokens of it that the store holds.
        """
        self.num_stores += 1
        self.num_stored_tokens += num_tokens

    def note_skipped(self) -> None:
        """Count a prompt that was not handed to the store."""
        self.num_skipped += 1

    def note_saves(self, num_errors: int, seconds: float) -> None:
        """Count errors of saves and prefetches, and note the time of saves.

        Args:
            num_errors: New ones.
            seconds: Of all saves so far.
        """
        self.num_errors += num_errors
        self.store_seconds = seconds
