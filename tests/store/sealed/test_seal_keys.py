"""SealKeys: keys of a file, and what is refused. No secret is shown."""

import re

import pytest

from kvpage.store import KVStore, KVStoreConfig, KVStoreMetadata, SealKeys

SECRET, OTHER = bytes(range(32)), bytes(range(32, 64))


def test_a_file_names_ids_and_secrets(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"2026-11 {SECRET.hex()}\n\n  old\t{OTHER.hex().upper()}  \n")
    keys = SealKeys.from_file(path)
    assert keys == SealKeys((("2026-11", SECRET), ("old", OTHER)))
    assert keys.ids == ("2026-11", "old")
    assert (keys.secret("old"), keys.secret("none")) == (OTHER, None)


@pytest.mark.parametrize(
    "text", ["", "\n", "id", f"id {SECRET.hex()[:-1]}", f"id {SECRET.hex()}0", f"{SECRET.hex()}", f"i d {SECRET.hex()}"]
)
def test_other_files_are_refused_without_their_text(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        SealKeys.from_file(path)
    assert SECRET.hex()[:8] not in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (("", SECRET),),
        (("a b", SECRET),),
        (("ä", SECRET),),
        (("i" * 65, SECRET),),
        (("a", SECRET[1:]),),
        (("a", SECRET.hex()),),
        (("a", SECRET), ("a", OTHER)),
    ],
)
def test_wrong_keys_are_refused(keys):
    with pytest.raises(ValueError) as error:
        SealKeys(keys)
    assert SECRET.hex()[:8] not in str(error.value) and repr(SECRET)[2:10] not in str(error.value)


def test_no_secret_is_shown(tmp_path):
    pytest.importorskip("cryptography")
    path = tmp_path / "keys"
    path.write_text(f"a {SECRET.hex()}")
    assert repr(SealKeys.from_file(path)) == "SealKeys()"
    config = KVStoreConfig(4, (f"disk:{tmp_path}/kv?size=1MiB&seal_key_file={path}",))
    with KVStore(config, KVStoreMetadata("m")) as store:
        shown = f"{store.stats()} {config} {store.config}"
    assert SECRET.hex() not in shown and repr(SECRET)[2:-1] not in shown
    with pytest.raises(OSError):
        KVStore(KVStoreConfig(4, (f"disk:{tmp_path}/kv?seal_key_file={tmp_path}/none",)), KVStoreMetadata("m"))


@pytest.mark.parametrize("keys", [None, 3, [("a", SECRET)], {"a": SECRET}, (("a", SECRET, 1),), ("ab",)])
def test_keys_are_pairs(keys):
    with pytest.raises(TypeError, match="pairs"):
        SealKeys(keys)
