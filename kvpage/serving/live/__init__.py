"""An engine for many: one thread steps, any number of threads and coroutines submit, stream and abort."""
