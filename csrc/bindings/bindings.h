// The extension's parts, each of which adds its noun to the module. Nothing outside of this folder knows Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvpage {

namespace py = pybind11;

struct OutOfBlocks;

void set_out_of_blocks(const OutOfBlocks& error);  // as Python's error

void bind_quantization(py::module_& m);
void bind_transpose(py::module_& m);
void bind_attention(py::module_& m);
void bind_tokens(py::module_& m);
void bind_blending(py::module_& m);
void bind_linear(py::module_& m);
void bind_recurrence(py::module_& m);
void bind_block_copies(py::module_& m);
void bind_chunks(py::module_& m);
void bind_pool(py::module_& m);
void bind_eviction(py::module_& m);
void bind_states(py::module_& m);
void bind_match(py::module_& m);
void bind_tree(py::module_& m);
void bind_sequences(py::module_& m);
void bind_slots(py::module_& m);
void bind_sampling(py::module_& m);

}  // namespace kvpage
