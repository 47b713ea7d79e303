"""The guard of the current device makes no context: on no device but the one that was asked for."""

import ctypes

import native_build
import pytest

pytestmark = pytest.mark.skipif(native_build.missing() is not None, reason=str(native_build.missing()))


def play(before: int, device: int, actives: int, failing: int = -1) -> tuple[int, list[str], str]:
    """Return the device afterwards, the runtime's calls, and which devices have a context then."""
    out = ctypes.create_string_buffer(256)
    library = ctypes.CDLL(str(native_build.library("device_switch")))
    after = library.play_device_switch(before, device, actives, failing, out, len(out))
    *calls, contexts = out.value.decode().split(";")
    return after, calls, contexts


def test_a_device_without_a_context_gets_none() -> None:
    """Setting device 0 again would make a context there: half a gigabyte for each rank on another device."""
    assert play(0, 1, actives=0b0000) == (1, ["set 1", "inside 1"], "0100")
    assert play(0, 1, actives=0b0010) == (1, ["set 1", "inside 1"], "0100")


def test_a_device_in_use_is_the_current_one_again() -> None:
    assert play(0, 1, actives=0b0001) == (0, ["set 1", "inside 1", "restore 0"], "1100")
    assert play(2, 0, actives=0b0101) == (2, ["set 0", "inside 0", "restore 2"], "1010")


def test_the_current_device_is_bound_and_stays() -> None:
    assert play(1, 1, actives=0b0010) == (1, ["set 1", "inside 1"], "0100")


def test_a_device_that_cannot_be_set_changes_nothing() -> None:
    assert play(0, 3, actives=0b0001, failing=3) == (-1, [], "1000")
