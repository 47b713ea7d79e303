"""The one place that checks plain arguments, and the care for threads, forks and interrupts.

To check arguments:

    a number, a flag, a list, a namespace       values.py     as_integer, check_at_least, check_flag, as_list, ...
    one number a sequence                       values.py     as_counts, as_positions
    token ids                                   tokens.py     as_tokens, as_array
    a tensor to read by its address             tensors.py    check_dense, check_plain, readable
    a tensor to write by its address            tensors.py    check_writable
    a tensor of numbers, indices or rows        tensors.py    as_numbers, as_floats, as_indices, as_selection
    a field of a parameter class                fields.py     at_least, real, ...
    a device                                    tensors.py    as_device, parse_device

Functions named `check_...` return None. Functions named `as_...` return the argument in its one form. Either kind
raises TypeError for another type and ValueError for a wrong value.

To survive threads, forks and Ctrl-C:

    work that Ctrl-C must not leave half done   interrupts.py      HeldInterrupts, uninterrupted, interruptible
    an object that a forked child must not use  fork_guard.py      ForkGuard
    a pool whose threads all run                started_pool.py    started_pool
    an end that a finalizer must not wait for   close_later.py     close_later
"""
