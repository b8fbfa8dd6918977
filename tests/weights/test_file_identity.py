"""Identities of files: another content in the same place has another one."""

import os
from random import Random
from types import SimpleNamespace

import pytest

from quire.weights import file_identity as module
from quire.weights.file_identity import file_identity

# of a sampled file: its begin, and a page of every 4 MiB (`FileIdentity.content`)
HEAD, PAGE, STRIDE = 2**20, 4096, 2**22
SIZE = 3 * STRIDE + 12345


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(Random(0).randbytes(SIZE))
    return path


def replaced(file, offset):
    """Change a byte in place, and restore the time of change."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def recorded(monkeypatch, *, inode_changed):
    """Every file has the same inode and the same time of its last change, as in an image."""
    true = os.fstat

    def fstat(descriptor):
        stat = true(descriptor)
        return SimpleNamespace(
            st_size=stat.st_size, st_mtime_ns=stat.st_mtime_ns, st_ctime_ns=inode_changed, st_ino=1, st_uid=stat.st_uid
        )

    monkeypatch.setattr(module.os, "fstat", fstat)


def watched_reads(monkeypatch):
    sizes = []
    true_pread, true_preadv = os.pread, os.preadv

    def pread(descriptor, size, offset):
        sizes.append(size)
        return true_pread(descriptor, size, offset)

    def preadv(descriptor, buffers, offset):
        sizes.append(read := true_preadv(descriptor, buffers, offset))
        return read

    monkeypatch.setattr(module.os, "pread", pread)
    monkeypatch.setattr(module.os, "preadv", preadv)
    return sizes


def test_the_same_file_has_the_same_identity(file, tmp_path):
    assert file_identity(file) == file_identity(file)
    (tmp_path / "link").symlink_to(file)
    assert file_identity(tmp_path / "link") == file_identity(file)


def test_another_content_of_equal_size_and_time_has_another_identity(file):
    before = file_identity(file)
    replaced(file, STRIDE - 1)  # not in a sampled page
    after = file_identity(file)
    assert before != after and before[:3] == after[:3]


@pytest.mark.parametrize("offset", [0, HEAD + 5, STRIDE - 1, 2 * STRIDE + 7, SIZE - 1])
def test_every_byte_counts_where_an_image_has_recorded_the_times(file, monkeypatch, offset):
    recorded(monkeypatch, inode_changed=1_500_000_000 * 10**9)
    before = file_identity(file)
    replaced(file, offset)
    after = file_identity(file)
    assert before[:5] == after[:5] and before.content != after.content


def test_every_byte_counts_where_the_file_system_cannot_be_written(file, monkeypatch):
    recorded(monkeypatch, inode_changed=1_500_000_000 * 10**9 + 1)
    monkeypatch.setattr(module.os, "fstatvfs", lambda _descriptor: SimpleNamespace(f_flag=os.ST_RDONLY))
    before = file_identity(file)
    replaced(file, STRIDE - 1)
    assert before != file_identity(file)


@pytest.mark.parametrize("width", [8, 64, 8192])
def test_exchanged_rows_count(file, monkeypatch, width):
    recorded(monkeypatch, inode_changed=0)
    before, mtime = file_identity(file), file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    content[:width], content[width : 2 * width] = content[width : 2 * width], content[:width]
    file.write_bytes(content)
    os.utime(file, ns=(mtime, mtime))
    assert before[:5] == file_identity(file)[:5] and before != file_identity(file)


def test_other_weights_count_where_only_a_part_is_read(file, monkeypatch):
    recorded(monkeypatch, inode_changed=1)
    sizes, before = watched_reads(monkeypatch), file_identity(file)
    assert sum(sizes) < HEAD + 8 * PAGE
    for offset in (0, STRIDE + 5, SIZE - 1):
        replaced(file, offset)
        assert before != file_identity(file)
        replaced(file, offset)
        assert before == file_identity(file)


@pytest.mark.parametrize("size", [1, 100, PAGE, HEAD])
def test_every_byte_of_small_files_counts(tmp_path, monkeypatch, size):
    path = tmp_path / "small"
    path.write_bytes(bytes(size))
    recorded(monkeypatch, inode_changed=1)
    before = file_identity(path)
    for offset in {0, size // 2, size - 1}:
        replaced(path, offset)
        assert file_identity(path).content != before.content
        replaced(path, offset)
    assert file_identity(path) == before


def test_an_empty_file_has_an_identity(tmp_path):
    (tmp_path / "empty").touch()
    assert file_identity(tmp_path / "empty").size == 0
