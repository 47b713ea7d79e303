// The codec of floats with their exponents apart.
#include "bindings/addresses.h"
#include "bindings/bindings.h"
#include "codec/exponent_codec.h"

namespace kvpage {

namespace {

int64_t encode(int kind, int64_t raw, int64_t raw_bytes, const py::buffer& out, const std::string& kernel) {
  const py::buffer_info room = out.request(true);
  const int64_t most = most_payload_bytes(static_cast<FloatKind>(kind), raw_bytes);
  check(room.size * room.itemsize >= most, "out must have ", most, " bytes, got ", room.size * room.itemsize);
  const py::gil_scoped_release release;
  return encode_exponents(static_cast<FloatKind>(kind), pointer<const std::byte>(raw), raw_bytes,
                          static_cast<std::byte*>(room.ptr), kernel);
}

void decode(int kind, int64_t payload, int64_t num_bytes, const py::buffer& out, const std::string& kernel) {
  const py::buffer_info room = out.request(true);
  const py::gil_scoped_release release;
  decode_exponents(static_cast<FloatKind>(kind), pointer<const std::byte>(payload), num_bytes,
                   static_cast<std::byte*>(room.ptr), room.size * room.itemsize, kernel);
}

std::vector<std::string> kernels() { return exponent_kernels().names(); }

}  // namespace

void bind_codec(py::module_& m) {
  m.def("exponent_kernels", &kernels);
  m.def(
      "most_payload_bytes",
      [](int kind, int64_t raw_bytes) { return most_payload_bytes(static_cast<FloatKind>(kind), raw_bytes); },
      py::arg("kind"), py::arg("raw_bytes"));
  m.def("encode_exponents", &encode, py::arg("kind"), py::arg("raw"), py::arg("raw_bytes"), py::arg("out"),
        py::arg("kernel") = "");
  m.def("decode_exponents", &decode, py::arg("kind"), py::arg("payload"), py::arg("num_bytes"), py::arg("out"),
        py::arg("kernel") = "");
}

}  // namespace kvpage
