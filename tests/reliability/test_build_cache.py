"""The folder of compiled tests: bounded, and keyed by the headers that count."""

import os
import time

import build_cache
import pytest

HOUR = 3600


def file_of(path, num_bytes, hours_unused):
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (time.time() - hours_unused * HOUR,) * 2)
    return path


@pytest.mark.parametrize("most_bytes, left", [(30, "abc"), (29, "bc"), (10, "c"), (0, "c")])
def test_the_longest_unused_files_leave_first(tmp_path, most_bytes, left):
    for name, hours in (("a", 5), ("b", 4), ("c", 0.5)):  # the last one may be in use
        file_of(tmp_path / name, 10, hours)
    build_cache.trim(tmp_path, most_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(left)


def test_a_use_keeps_a_file(tmp_path):
    used, unused = (file_of(tmp_path / name, 10, hours) for name, hours in (("used", 9), ("unused", 8)))
    assert build_cache.note_use(used) and not build_cache.note_use(tmp_path / "absent")
    build_cache.trim(tmp_path, 10)
    assert used.exists() and not unused.exists()


def test_a_source_depends_on_what_it_includes(tmp_path):
    texts = {
        "a.cpp": '#include <vector>\n#include "a.h"\n#include "deep/b.h"\n',
        "a.h": '#include "deep/b.h"\n',
        "deep/b.h": '#include "c.h"\n#include "of_the_system.h"\n',
        "deep/c.h": '#include "a.h"\n',
        "unused.h": "",
    }
    (tmp_path / "deep").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = build_cache.sources_of(tmp_path / "a.cpp", [tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.cpp", "a.h", "deep/b.h", "deep/c.h"]


def test_the_folder_is_the_users_or_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build_cache.folder(tmp_path / "other") == tmp_path / "cache" / "kvpage" / "native"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build_cache.folder(tmp_path / "other") == tmp_path / "other"
