// Sequences on the device, and the arguments of their steps.
#include "bindings/bindings.h"

#include "bindings/integers.h"
#include "bindings/methods.h"
#include "bindings/new_arrays.h"
#include "bindings/shared_tree.h"
#include "docs.h"
#include "sequences/sequence_rows.h"

namespace kvpage {

namespace {

SharedTree& tree_of(const SequenceRows& rows) { return static_cast<SharedTree&>(rows.tree()); }

// A method whose arguments have no names.
template <typename Call>
PyObject* of_rows(PyObject* self, Py_ssize_t num_args, Py_ssize_t wanted, Call call) noexcept {
  return as_method([&]() -> PyObject* {
    if (num_args != wanted) throw py::type_error("wrong number of arguments");
    try {
      return call(held_by_self<SequenceRows>(self));
    } catch (const UnknownRow& e) {
      throw py::key_error(e.what());
    }
  });
}

py::object object(PyObject* borrowed) { return py::reinterpret_borrow<py::object>(borrowed); }

bool flag(PyObject* value) { return value == Py_True; }

// One number for all rows, or one for each. It has memory of its own: see Integers::copied_ids.
class OwnCounts {
 public:
  explicit OwnCounts(PyObject* source) {
    if (PyLong_Check(source)) {
      counts_ = Counts(int64_from(source, "num_new_tokens"));
      return;
    }
    Integers integers(object(source), "num_new_tokens");
    const auto each = integers.wide();
    each_.reserve(each.size() + 1);  // so that it has an address
    each_.assign(each.begin(), each.end());
    counts_ = Counts(std::span<const int64_t>(each_.data(), each_.size()));
  }
  OwnCounts(const OwnCounts&) = delete;
  OwnCounts& operator=(const OwnCounts&) = delete;
  const Counts& get() const { return counts_; }

 private:
  std::vector<int64_t> each_;
  Counts counts_{0};
};

void remove_row(SequenceRows& rows, int64_t row) {
  tree_of(rows).run(kQuick, [&] { rows.remove(row); });
}

// Rows by the ids of their sequences. Ctrl-C may come as soon as a call has ended, and its result is lost then. So the
// call itself puts a new row into the dict, and takes it out.
class NamedRows {
 public:
  NamedRows(SequenceRows& rows, PyObject* names) : rows_(rows), names_(names) {
    if (!PyDict_CheckExact(names)) throw py::type_error("names must be a dict");
  }

  void add(PyObject* seq_id, int64_t row) const {
    const auto number = py::reinterpret_steal<py::object>(PyLong_FromLongLong(row));
    if (number && PyDict_SetItem(names_, seq_id, number.ptr()) == 0) return;
    const py::error_already_set error;
    remove_row(rows_, row);
    throw error;
  }

  void remove(PyObject* seq_id) const {
    const py::object number = object(PyDict_GetItemWithError(names_, seq_id));
    if (!number && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, seq_id);
    if (!number || PyDict_DelItem(names_, seq_id) != 0) throw py::error_already_set();
    remove_row(rows_, int64_from(number, "row"));
  }

 private:
  SequenceRows& rows_;
  PyObject* names_;
};

// A list of Python's to which a call adds moves, [kind, pairs] each. What the call changes would be wrong without them,
// so their places are made before it.
class MoveList {
 public:
  explicit MoveList(PyObject* list) : list_(list) {
    if (!PyList_CheckExact(list)) throw py::type_error("moves must be a list");
    places_.reserve(kMostPlaces);
  }
  MoveList(const MoveList&) = delete;
  MoveList& operator=(const MoveList&) = delete;

  // Takes places that were not needed out again.
  ~MoveList() {
    for (size_t i = places_.size(); i-- > 0;) {
      fill_pairs(places_[i].pairs, *places_[i].made);
      const auto at = first_ + static_cast<Py_ssize_t>(i);
      if (places_[i].made->empty() && PyList_SetSlice(list_, at, at + 1, nullptr) != 0) PyErr_Clear();
    }
  }

  // Makes a place for `most` pairs, which are those of `made` at the end.
  void add(const char* kind, int64_t most, const std::vector<TierPair>& made) {
    if (most <= 0) return;
    const py::object pairs = new_pairs(most);
    const auto name = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kind));
    const auto entry = py::reinterpret_steal<py::object>(name ? PyList_New(2) : nullptr);
    if (!entry) throw py::error_already_set();
    PyList_SET_ITEM(entry.ptr(), 0, name.inc_ref().ptr());
    PyList_SET_ITEM(entry.ptr(), 1, pairs.inc_ref().ptr());
    if (places_.empty()) first_ = PyList_GET_SIZE(list_);
    if (PyList_Append(list_, entry.ptr()) != 0) throw py::error_already_set();
    places_.push_back({py::reinterpret_borrow<py::array_t<int64_t>>(pairs), &made});
  }

  // Makes places for what a sequence may need that takes so many blocks.
  void add_all(int64_t num_blocks, const HostUse& host, bool has_host_tier, const DueMoves& moves) {
    if (!has_host_tier) return;
    if (host.keeps_evicted) add("swap_out", num_blocks, moves.demoted);
    add("swap_in", num_blocks, moves.promoted);
    if (host.keeps_evicted && host.min_hits > 0) add("swap_out", num_blocks, moves.written);
  }

 private:
  static constexpr size_t kMostPlaces = 4;
  struct Place {
    py::array_t<int64_t> pairs;
    const std::vector<TierPair>* made;
  };

  PyObject* list_;
  Py_ssize_t first_ = 0;
  std::vector<Place> places_;
};

// (keeps_evicted, fewest_loaded, min_hits), or None.
HostUse host_use(PyObject* source) {
  if (source == Py_None) return {};
  if (!PyTuple_CheckExact(source) || PyTuple_GET_SIZE(source) != 3) throw py::type_error("host must be a tuple of 3");
  return {flag(PyTuple_GET_ITEM(source, 0)), int64_from(PyTuple_GET_ITEM(source, 1), "fewest_loaded"),
          int64_from(PyTuple_GET_ITEM(source, 2), "min_hits")};
}

PyObject* begin(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 11, [&](SequenceRows& rows) -> PyObject* {
    const NamedRows names(rows, args[0]);
    const Integers integers(object(args[2]), "tokens");
    const auto name = py::cast<py::bytes>(object(args[3]));
    Prompt prompt{integers.tokens(), std::string_view(name)};
    const int64_t priority = int64_from(args[4], "priority"), size = tree_of(rows).block_size();
    check(priority == static_cast<int>(priority), "priority must be between 0 and 7, got ", priority);
    prompt.priority = static_cast<int>(priority);
    prompt.num_left_over = int64_from(args[5], "num_left_over");
    prompt.shares_parts = flag(args[6]);
    prompt.num_spare = int64_from(args[7], "num_spare");
    prompt.is_hit = flag(args[8]);
    const HostUse host = host_use(args[10]);
    const int64_t num_blocks = (prompt.tokens.size() + size - 1) / size;
    py::object ids = new_ids(num_blocks);
    DueMoves moves;
    MoveList list(args[9]);
    list.add_all(num_blocks, host, tree_of(rows).has_host_tier(), moves);
    const BegunSequence begun =
        tree_of(rows).walk(prompt.tokens.size(), [&] { return rows.begin(prompt, host, &moves); });
    rows.look_at(begun.row, [&](const Sequence& sequence) {
      std::copy(sequence.ids.begin(), sequence.ids.end(), values_of<int32_t>(ids));
    });
    names.add(args[1], begun.row);
    return Py_BuildValue("LLLiiiO", begun.num_cached, begun.num_host, begun.num_refused, begun.part_from, begun.part_to,
                         static_cast<int>(begun.is_part_on_device), ids.ptr());
  });
}

PyObject* num_blocks_to_append(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 2, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    const OwnCounts counts(args[1]);
    return PyLong_FromLongLong(rows.num_blocks_to_append(numbers.wide(), counts.get()));
  });
}

// With the GIL: nothing that it waits for takes long, and no thread writes to the caller's arrays meanwhile.
PyObject* append_if_free(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 2, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    const OwnCounts counts(args[1]);
    return PyBool_FromLong(rows.append_if_free(numbers.wide(), counts.get()));
  });
}

PyObject* append(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 4, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    const OwnCounts counts(args[1]);
    const auto read = numbers.wide();
    const std::vector<int64_t> span(read.begin(), read.end());
    const HostUse host = host_use(args[3]);
    SharedTree& tree = tree_of(rows);
    const int64_t most = std::min(rows.num_blocks_to_append(span, counts.get()), tree.pool()->num_blocks());
    DueMoves moves;
    MoveList list(args[2]);
    if (host.keeps_evicted && tree.has_host_tier()) list.add("swap_out", most, moves.demoted);
    list.add("copy", static_cast<int64_t>(span.size()), moves.copied);
    tree.run(most, [&] { rows.append(span, counts.get(), host, &moves); });
    return py::none().release().ptr();
  });
}

PyObject* commit(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 2, [&](SequenceRows& rows) {
    const int64_t row = int64_from(args[0], "row");
    const Integers integers(object(args[1]), "tokens");
    const TokenView tokens = integers.tokens();
    return PyLong_FromLongLong(tree_of(rows).walk(tokens.size(), [&] { return rows.commit(row, tokens); }));
  });
}

PyObject* commit_each(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 2, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    const auto read = numbers.wide();
    const std::vector<int64_t> span(read.begin(), read.end());
    Integers integers(object(args[1]), "tokens");
    const auto tokens = integers.copied_ids();
    const TokenView view(tokens.data(), static_cast<int64_t>(tokens.size()));
    return PyLong_FromLongLong(tree_of(rows).run(kQuick, [&] { return rows.commit_each(span, view); }));
  });
}

py::object new_tables(SequenceRows& rows, std::span<const int64_t> span) {
  const int64_t width = rows.most_blocks(span);
  py::object tables = new_ids(static_cast<int64_t>(span.size()), width);
  rows.fill_tables(span, width, values_of<int32_t>(tables));
  return tables;
}

PyObject* tables(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 1, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    return new_tables(rows, numbers.wide()).release().ptr();
  });
}

PyObject* last(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 1, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows");
    const auto span = numbers.wide();
    py::object slots = new_integers(static_cast<int64_t>(span.size()));
    py::object lengths = new_integers(static_cast<int64_t>(span.size()));
    rows.fill_last(span, values_of<int64_t>(slots), values_of<int64_t>(lengths));
    const py::object tables = new_tables(rows, span);
    return PyTuple_Pack(3, slots.ptr(), tables.ptr(), lengths.ptr());
  });
}

PyObject* slots(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 3, [&](SequenceRows& rows) {
    Integers numbers(object(args[0]), "rows"), starts(object(args[1]), "starts"), ends(object(args[2]), "ends");
    const auto span = numbers.wide(), begin = starts.wide(), end = ends.wide();
    py::object slots = new_integers(rows.check_positions(span, begin, end));
    rows.fill_slots(span, begin, end, values_of<int64_t>(slots));
    return slots.release().ptr();
  });
}

PyObject* remove(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 2, [&](SequenceRows& rows) {
    NamedRows(rows, args[0]).remove(args[1]);
    return py::none().release().ptr();
  });
}

int64_t fork(SequenceRows& rows, const py::dict& names, const py::object& seq_id, int64_t row, int64_t num_tokens) {
  const int64_t child = tree_of(rows).run(kQuick, [&] { return rows.fork(row, num_tokens); });
  NamedRows(rows, names.ptr()).add(seq_id.ptr(), child);
  return child;
}

PyObject* resume(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 14, [&](SequenceRows& rows) -> PyObject* {
    const NamedRows names(rows, args[0]);
    if (!py::isinstance<Match>(args[2])) throw py::type_error("match must be a Match");
    auto& match = py::handle(args[2]).cast<Match&>();
    Integers pending(object(args[3]), "pending"), host_ids(object(args[4]), "host_ids");
    const auto name = py::cast<py::bytes>(object(args[9]));
    const Resumption resumption{.num_tokens = int64_from(args[7], "num_tokens"),
                                .num_written = int64_from(args[8], "num_written"),
                                .pending = pending.copied_ids(),
                                .num_left = int64_from(args[5], "num_left"),
                                .num_spare = int64_from(args[6], "num_spare"),
                                .host_ids = host_ids.copied_ids(),
                                .name = std::string_view(name),
                                .is_private = flag(args[10]),
                                .is_hit = flag(args[11])};
    const HostUse host = host_use(args[13]);
    SharedTree& tree = tree_of(rows);
    const int64_t num_blocks = rows.num_blocks_to_resume(match, resumption);
    const py::object ids = new_ids(num_blocks);
    DueMoves moves;
    MoveList list(args[12]);
    list.add_all(std::min(num_blocks, tree.pool()->num_blocks()), host, tree.has_host_tier(), moves);
    list.add("swap_in", static_cast<int64_t>(resumption.host_ids.size()), moves.returned);
    const int64_t row = tree.run(num_blocks, [&] { return rows.resume(match, resumption, host, &moves); });
    rows.look_at(row, [&](const Sequence& sequence) {
      std::copy(sequence.ids.begin(), sequence.ids.end(), values_of<int32_t>(ids));
    });
    names.add(args[1], row);
    return ids.inc_ref().ptr();
  });
}

// Python's objects are made without the rows' mutex: making one may run code of others.
py::object ids(const SequenceRows& rows, int64_t row) {
  return copy_of(rows.look_at(row, [](const Sequence& sequence) { return sequence.ids; }));
}

PyObject* num_written(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return of_rows(self, num_args, 1, [&](SequenceRows& rows) {
    const int64_t row = int64_from(args[0], "row");
    return PyLong_FromLongLong(rows.look_at(row, [](const Sequence& sequence) { return sequence.num_written; }));
  });
}

// In the order of kvpage.blocks.sequence_state.SequenceState.
py::tuple state(const SequenceRows& rows, int64_t row) {
  const auto [numbers, pending, name, is_private] = rows.look_at(row, [](const Sequence& sequence) {
    const std::array<int64_t, 5> numbers{sequence.num_tokens, sequence.num_written, sequence.match.num_blocks(),
                                         sequence.num_left, sequence.match.priority()};
    return std::tuple(numbers, sequence.pending, sequence.name, sequence.is_private);
  });
  return py::make_tuple(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], copy_of(pending), py::bytes(name),
                        is_private);
}

void add_fast_sequence_methods(py::handle type) {
  static const std::string texts[] = {
      std::string("begin($self, names, seq_id, tokens, namespace, priority, num_left_over, share_parts, num_spare, "
                  "is_hit, moves, host, /)\n--\n\n") +
          doc("SequenceRows.begin"),
      std::string(
          "resume($self, names, seq_id, match, pending, host_ids, num_left, num_spare, num_tokens, num_written, "
          "namespace, is_private, is_hit, moves, host, /)\n--\n\n") +
          doc("SequenceRows.resume"),
      std::string("num_blocks_to_append($self, rows, num_new_tokens, /)\n--\n\n") +
          doc("SequenceRows.num_blocks_to_append"),
      std::string("append_if_free($self, rows, num_new_tokens, /)\n--\n\n") + doc("SequenceRows.append_if_free"),
      std::string("append($self, rows, num_new_tokens, moves, host, /)\n--\n\n") + doc("SequenceRows.append"),
      std::string("commit($self, row, tokens, /)\n--\n\n") + doc("SequenceRows.commit"),
      std::string("commit_each($self, rows, tokens, /)\n--\n\n") + doc("SequenceRows.commit_each"),
      std::string("tables($self, rows, /)\n--\n\n") + doc("SequenceRows.tables"),
      std::string("last($self, rows, /)\n--\n\n") + doc("SequenceRows.last"),
      std::string("slots($self, rows, starts, ends, /)\n--\n\n") + doc("SequenceRows.slots"),
      std::string("num_written($self, row, /)\n--\n\n") + doc("SequenceRows.num_written"),
      std::string("remove($self, names, seq_id, /)\n--\n\n") + doc("SequenceRows.remove"),
  };
  static PyMethodDef methods[] = {
      {"begin", fast_call(&begin), METH_FASTCALL, texts[0].c_str()},
      {"resume", fast_call(&resume), METH_FASTCALL, texts[1].c_str()},
      {"num_blocks_to_append", fast_call(&num_blocks_to_append), METH_FASTCALL, texts[2].c_str()},
      {"append_if_free", fast_call(&append_if_free), METH_FASTCALL, texts[3].c_str()},
      {"append", fast_call(&append), METH_FASTCALL, texts[4].c_str()},
      {"commit", fast_call(&commit), METH_FASTCALL, texts[5].c_str()},
      {"commit_each", fast_call(&commit_each), METH_FASTCALL, texts[6].c_str()},
      {"tables", fast_call(&tables), METH_FASTCALL, texts[7].c_str()},
      {"last", fast_call(&last), METH_FASTCALL, texts[8].c_str()},
      {"slots", fast_call(&slots), METH_FASTCALL, texts[9].c_str()},
      {"num_written", fast_call(&num_written), METH_FASTCALL, texts[10].c_str()},
      {"remove", fast_call(&remove), METH_FASTCALL, texts[11].c_str()},
  };
  for (PyMethodDef& method : methods) add_method(type, method);
}

}  // namespace

void bind_sequences(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const UnknownRow& e) {
      PyErr_SetString(PyExc_KeyError, e.what());
    }
  });
  py::class_<SequenceRows> rows(m, "SequenceRows", doc("SequenceRows"));
  add_fast_sequence_methods(rows);
  const auto make = [](const std::shared_ptr<SharedTree>& tree, bool is_caching) {
    return std::make_unique<SequenceRows>(tree, is_caching);
  };
  rows.def(py::init(make), py::arg("tree").none(false), py::arg("is_caching"), doc("SequenceRows.__init__"))
      .def("fork", &fork, py::arg("names"), py::arg("seq_id"), py::arg("row"), py::arg("num_tokens"),
           doc("SequenceRows.fork"))
      .def("give_back_room", &SequenceRows::give_back_room, py::arg("row"), doc("SequenceRows.give_back_room"))
      .def("release_before", &SequenceRows::release_before, py::arg("row"), py::arg("num_tokens"),
           doc("SequenceRows.release_before"))
      .def("make_private", &SequenceRows::make_private, py::arg("row"), doc("SequenceRows.make_private"))
      .def(
          "pin",
          [](const SequenceRows& rows, int64_t row) {
            SharedTree& tree = tree_of(rows);
            return new_match([&] {
              return tree.run(kQuick, [&] {
                return rows.look_at(row, [&](const Sequence& sequence) { return tree.pin(sequence.match); });
              });
            });
          },
          py::arg("row"), doc("SequenceRows.pin"))
      .def("ids", &ids, py::arg("row"), doc("SequenceRows.ids"))
      .def("state", &state, py::arg("row"), doc("SequenceRows.state"))
      .def_property_readonly("num_rows", &SequenceRows::num_rows, doc("SequenceRows.num_rows"));
}

}  // namespace kvpage
