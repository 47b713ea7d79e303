"""The kinds of groups: Window and States are their options, of which a manager makes its groups.

A new kind has its options and its GroupManager in one file, and is made here.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvpage.blocks.groups.group import Groups
from kvpage.blocks.groups.states.state_group import StateGroup
from kvpage.blocks.groups.states.state_space import States
from kvpage.blocks.groups.window_blocks import Window
from kvpage.blocks.groups.window_group import WindowGroup
from kvpage.blocks.groups.windows import Windows
from kvpage.blocks.sequences.sequences import Sequences
from kvpage.blocks.space import BlockSpace
from kvpage.checks.values import as_list

GroupOptions = Window | States


class MadeGroups(NamedTuple):
    """The groups of one manager.

    Attributes:
        windows: Those of windows, in the order of their options.
        states: That of states; None without one.
        all_groups: All of them. Windows come before states: a state's tails go into blocks that windows have by then.
    """

    windows: Windows
    states: StateGroup | None
    all_groups: Groups


def checked_options(groups: Iterable[GroupOptions]) -> list[GroupOptions]:
    """Return the options as a list.

    Raises:
        ValueError: There are two groups of states.
        TypeError: One is of another type.
    """
    options = as_list("groups", groups)
    for option in options:
        if not isinstance(option, GroupOptions):
            raise TypeError(f"groups must be Windows and States, got {type(option).__name__}")
    num_states = sum(isinstance(option, States) for option in options)
    if num_states > 1:
        raise ValueError(f"groups must hold at most one States, got {num_states}")
    return options


def make_groups(
    options: Iterable[GroupOptions], space: BlockSpace, sequences: Sequences, is_caching: bool
) -> MadeGroups:
    """Return the groups of a manager."""
    options = list(options)
    has_states = any(isinstance(option, States) for option in options)
    windows = [WindowGroup(option, space, sequences, has_states) for option in options if isinstance(option, Window)]
    states = [
        StateGroup(option, space, sequences, is_caching, windows) for option in options if isinstance(option, States)
    ]
    groups: Groups = (*windows, *states)
    space.watch(groups)
    return MadeGroups(Windows(windows, sequences, groups), states[0] if states else None, groups)
