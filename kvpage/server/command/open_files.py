"""allow_open_files: as many connections as the system lets a process have."""

import resource

MOST = 65536


def allow_open_files() -> None:
    """Raise this process's limit of open files; shells often begin with 1,024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
