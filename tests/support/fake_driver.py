"""A driver of Triton without a device: it compiles for a GPU of sm_90, and keeps what it was to launch."""

from triton.backends.compiler import GPUTarget

DEVICE = 99  # no other test's: what was compiled stays with the kernels


class FakeDriver:
    """`launches` holds the name, grid, stream and arguments of each. `early`: of a launch, whether it may begin before
    the end of the one ahead of it."""

    def __init__(self):
        self.launches, self.early, self.utils = [], [], self

    def get_current_device(self):
        return DEVICE

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}

    def load_binary(self, name, binary, shared, device):
        return name, name, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *args):
            self.launches.append((function, (x, y, z), stream, args))
            self.early.append(getattr(metadata, "launch_pdl", False))

        return launch
