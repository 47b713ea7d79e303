// Chunks, their hashes, and the codec of floats with their exponents apart.
#include "bindings/bindings.h"

#include <cerrno>

#include "base/copy_bytes.h"
#include "base/prefault.h"
#include "bindings/addresses.h"
#include "chunks/chunk_plan.h"
#include "chunks/stretch_copy.h"
#include "chunks/stretch_reader.h"
#include "chunks/stretch_writer.h"
#include "codec/exponent_codec.h"
#include "hash/xxh3.h"

namespace kvpage {

namespace {

py::bytes bytes_of(const Digest* digests, size_t count) {
  return {reinterpret_cast<const char*>(digests), count * sizeof(Digest)};
}

// [n, 2]: address and bytes of each.
using RunArray = py::array_t<int64_t, py::array::c_style>;

RunArray array_of(const std::vector<ByteRun>& runs) {
  RunArray array({static_cast<py::ssize_t>(runs.size()), py::ssize_t{2}});
  auto rows = array.mutable_unchecked<2>();
  for (size_t i = 0; i < runs.size(); ++i) {
    rows(static_cast<py::ssize_t>(i), 0) = static_cast<int64_t>(reinterpret_cast<uintptr_t>(runs[i].data));
    rows(static_cast<py::ssize_t>(i), 1) = runs[i].num_bytes;
  }
  return array;
}

std::vector<ByteRun> runs_of(const RunArray& array) {
  check(array.ndim() == 2 && array.shape(1) == 2, "runs must be [n, 2], addresses and bytes");
  const auto rows = array.unchecked<2>();
  std::vector<ByteRun> runs;
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) runs.push_back({pointer<const std::byte>(rows(i, 0)), rows(i, 1)});
  return runs;
}

// Raises OSError for an error of the file.
py::bytes write_stretches_of(int fd, int64_t offset, const py::buffer& lead, const RunArray& array,
                             int64_t stretch_bytes, const py::buffer& tail, int max_threads) {
  const std::vector<ByteRun> runs = runs_of(array);
  const py::buffer_info head = lead.request(), rest = tail.request(true);
  const StretchWrite args = {fd,
                             offset,
                             static_cast<const std::byte*>(head.ptr),
                             head.size * head.itemsize,
                             runs.data(),
                             static_cast<int64_t>(runs.size()),
                             stretch_bytes,
                             static_cast<std::byte*>(rest.ptr),
                             rest.size * rest.itemsize,
                             max_threads};
  std::vector<Digest> digests(static_cast<size_t>(count_stretches(args)));
  try {
    py::gil_scoped_release release;
    write_stretches(args, digests.data());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return bytes_of(digests.data(), digests.size());
}

// Raises OSError for an error of the file.
py::bytes read_stretches_of(int fd, int64_t offset, const RunArray& array, int64_t stretch_bytes,
                            const py::buffer& room, int max_threads) {
  const std::vector<ByteRun> runs = runs_of(array);
  const py::buffer_info piece = room.request(true);
  const StretchRead args = {fd,
                            offset,
                            runs.data(),
                            static_cast<int64_t>(runs.size()),
                            stretch_bytes,
                            static_cast<std::byte*>(piece.ptr),
                            piece.size * piece.itemsize,
                            max_threads};
  std::vector<Digest> digests(static_cast<size_t>(count_stretches(args)));
  try {
    py::gil_scoped_release release;
    read_stretches(args, digests.data());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return bytes_of(digests.data(), digests.size());
}

using MoveStretches = void (*)(const StretchCopy&, Digest*);

py::bytes move_stretches(MoveStretches move, const RunArray& array, int64_t payload, int64_t num_bytes,
                         int64_t stretch_bytes, int max_threads, bool streaming) {
  const std::vector<ByteRun> runs = runs_of(array);
  const StretchCopy args = {runs.data(),
                            static_cast<int64_t>(runs.size()),
                            pointer<std::byte>(payload),
                            num_bytes,
                            stretch_bytes,
                            max_threads,
                            streaming};
  std::vector<Digest> digests(static_cast<size_t>(count_stretches(args)));
  {
    py::gil_scoped_release release;
    move(args, digests.data());
  }
  return bytes_of(digests.data(), digests.size());
}

// Raises OSError where the system has no memory.
void prefault_memory(int64_t data, int64_t num_bytes, int max_threads) {
  check(num_bytes >= 0, "num_bytes must not be negative, got ", num_bytes);
  try {
    py::gil_scoped_release release;
    prefault(pointer<std::byte>(data), num_bytes, max_threads);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

// (address and number of block ids, start, max_threads, streaming)
using Place = std::tuple<int64_t, int64_t, int64_t, int, bool>;

ChunkPlace place_of(const Place& place) {
  const auto& [block_ids, num_block_ids, start, max_threads, streaming] = place;
  return {pointer<const int32_t>(block_ids), num_block_ids, start, max_threads, streaming};
}

std::vector<Digest> digests_of(const ChunkPlan& plan, int64_t num_bytes) {
  check(num_bytes >= 0, "num_bytes must not be negative, got ", num_bytes);
  return std::vector<Digest>(static_cast<size_t>(num_bytes / plan.stretch_bytes()));
}

void bind_stretches(py::module_& m) {
  m.def(
      "xxh3_128_of_stretches",
      [](int64_t data, int64_t num_bytes, int64_t stretch_bytes, int max_threads) {
        check(num_bytes >= 0, "num_bytes must not be negative, got ", num_bytes);
        check(stretch_bytes > 0, "stretch_bytes must be positive, got ", stretch_bytes);
        std::vector<Digest> digests(static_cast<size_t>(num_bytes / stretch_bytes + (num_bytes % stretch_bytes != 0)));
        {
          py::gil_scoped_release release;
          hash_stretches(pointer<const std::byte>(data), num_bytes, stretch_bytes, max_threads, digests.data());
        }
        return bytes_of(digests.data(), digests.size());
      },
      "See kvpage.store.tiers.stretches.");
  m.def(
      "copy_and_xxh3_128",
      [](int64_t data, int64_t to, int64_t num_bytes, bool streaming) {
        Digest digest;
        {
          py::gil_scoped_release release;
          Xxh3 hash;
          hash.update_and_copy(pointer<const std::byte>(data), num_bytes, pointer<std::byte>(to), streaming);
          if (streaming) end_streaming();
          digest = hash.digest();
        }
        return bytes_of(&digest, 1);
      },
      "See kvpage.store.tiers.stretches.");
  m.def("write_stretches", &write_stretches_of, "See kvpage.store.tiers.stretches.");
  m.def("read_stretches", &read_stretches_of, "See kvpage.store.tiers.stretches.");
  m.def(
      "gather_stretches",
      [](const RunArray& runs, int64_t payload, int64_t num_bytes, int64_t stretch_bytes, int threads, bool streaming) {
        return move_stretches(&gather_stretches, runs, payload, num_bytes, stretch_bytes, threads, streaming);
      },
      "See kvpage.store.tiers.stretches.");
  m.def(
      "scatter_stretches",
      [](int64_t payload, int64_t num_bytes, const RunArray& runs, int64_t stretch_bytes, int threads, bool streaming) {
        return move_stretches(&scatter_stretches, runs, payload, num_bytes, stretch_bytes, threads, streaming);
      },
      "See kvpage.store.tiers.stretches.");
  m.def("prefault", &prefault_memory, "See kvpage.layout.host_memory.");
}

void bind_chunk_plan(py::module_& m) {
  py::class_<ChunkPlan>(m, "ChunkPlan", "See kvpage.store.load.block_chunks, which checks what needs a tensor.")
      .def(py::init([](const std::vector<Part>& parts, const std::array<int64_t, 8>& shape) {
        return ChunkPlan(token_moves(parts),
                         {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]});
      }))
      .def("store",
           [](const ChunkPlan& plan, const Place& place, int64_t first, int64_t payload, int64_t num_bytes) {
             std::vector<Digest> digests = digests_of(plan, num_bytes);
             {
               py::gil_scoped_release release;
               plan.store(place_of(place), first, pointer<std::byte>(payload), num_bytes, digests.data());
             }
             return bytes_of(digests.data(), digests.size());
           })
      .def("runs", [](const ChunkPlan& plan, const Place& place) { return array_of(plan.runs(place_of(place))); })
      .def("load", [](const ChunkPlan& plan, const Place& place, int64_t first, int64_t payload, int64_t num_bytes,
                      int64_t first_token, int64_t last_token) {
        std::vector<Digest> digests = digests_of(plan, num_bytes);
        {
          py::gil_scoped_release release;
          plan.load(place_of(place), first, pointer<const std::byte>(payload), num_bytes, first_token, last_token,
                    digests.data());
        }
        return bytes_of(digests.data(), digests.size());
      });
}

void bind_xxh3(py::module_& m) {
  py::class_<Xxh3>(m, "_Xxh3", "The hash itself, with the kernel of an instruction set, for tests.")
      .def(py::init([](const std::string& name) { return Xxh3(xxh3_kernels().named(name)); }))
      .def("update",
           [](Xxh3& hash, const std::string& data) {
             const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
             hash.update(bytes, static_cast<int64_t>(data.size()), bytes);
           })
      .def("update_and_copy",
           [](Xxh3& hash, int64_t data, int64_t num_bytes, int64_t to, bool streaming) {
             const auto* bytes = pointer<const std::byte>(data);
             hash.update_and_copy(bytes, num_bytes, pointer<std::byte>(to), streaming, bytes);
             if (streaming) end_streaming();
           })
      .def("digest", [](const Xxh3& hash) {
        const Digest digest = hash.digest();
        return bytes_of(&digest, 1);
      });
}

int64_t encode_floats(int kind, int64_t raw, int64_t raw_bytes, const py::buffer& out, const std::string& kernel) {
  const py::buffer_info room = out.request(true);
  const int64_t most = most_payload_bytes(static_cast<FloatKind>(kind), raw_bytes);
  check(room.size * room.itemsize >= most, "out must have ", most, " bytes, got ", room.size * room.itemsize);
  const py::gil_scoped_release release;
  return encode_exponents(static_cast<FloatKind>(kind), pointer<const std::byte>(raw), raw_bytes,
                          static_cast<std::byte*>(room.ptr), kernel);
}

void decode_floats(int kind, int64_t payload, int64_t num_bytes, const py::buffer& out, const std::string& kernel) {
  const py::buffer_info room = out.request(true);
  const py::gil_scoped_release release;
  decode_exponents(static_cast<FloatKind>(kind), pointer<const std::byte>(payload), num_bytes,
                   static_cast<std::byte*>(room.ptr), room.size * room.itemsize, kernel);
}

std::vector<std::string> codec_kernels() { return exponent_kernels().names(); }

}  // namespace

void bind_chunks(py::module_& m) {
  m.def("exponent_kernels", &codec_kernels);
  m.def(
      "most_payload_bytes",
      [](int kind, int64_t raw_bytes) { return most_payload_bytes(static_cast<FloatKind>(kind), raw_bytes); },
      py::arg("kind"), py::arg("raw_bytes"));
  m.def("encode_exponents", &encode_floats, py::arg("kind"), py::arg("raw"), py::arg("raw_bytes"), py::arg("out"),
        py::arg("kernel") = "");
  m.def("decode_exponents", &decode_floats, py::arg("kind"), py::arg("payload"), py::arg("num_bytes"), py::arg("out"),
        py::arg("kernel") = "");
  bind_stretches(m);
  bind_chunk_plan(m);
  bind_xxh3(m);
}

}  // namespace kvpage
