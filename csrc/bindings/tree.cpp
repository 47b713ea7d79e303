// Blocks that are cached, by tokens.
#include "bindings.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "integers.h"
#include "prefix_tree.h"

namespace kvpage {

namespace {

py::array_t<int32_t> block_ids_from(const Match& match, int64_t start_block) {
  check(start_block >= 0 && start_block <= match.num_blocks(), "start_block must be between 0 and num_blocks = ",
        match.num_blocks(), ", got ", start_block);
  const int64_t num_ids = match.num_blocks() - start_block;
  py::array_t<int32_t> ids(num_ids);
  match.tree().copy_block_ids(match, start_block, {ids.mutable_data(), static_cast<size_t>(num_ids)});
  return ids;
}

void check_tree(PrefixTree& tree, const py::object& owned_ids, const py::object& owned_host_ids) {
  std::optional<Integers> integers, host_integers;
  std::optional<std::span<const int32_t>> owned, host_owned;
  if (!owned_ids.is_none()) owned = integers.emplace(owned_ids, "owned_ids").copied_ids();
  if (!owned_host_ids.is_none()) host_owned = host_integers.emplace(owned_host_ids, "owned_host_ids").copied_ids();
  maybe_without_gil(tree.num_cached(), [&] { tree.check_invariants(owned, host_owned); });
}

// A call that has changed the tree must not fail for lack of memory: its pins and pairs would be lost, and what they name
// would be read without ever having been copied. So the objects that it returns are made before it.

py::array_t<int64_t> room_for_pairs(int64_t most) { return py::array_t<int64_t>({py::ssize_t{most}, py::ssize_t{2}}); }

void fill_pairs(py::array_t<int64_t>& array, const std::vector<TierPair>& pairs) {
  int64_t* out = array.mutable_data();
  for (const auto& [from, to] : pairs) *out++ = from, *out++ = to;
  const auto num_pairs = static_cast<py::ssize_t>(pairs.size());
  if (num_pairs < array.shape(0)) array.resize({num_pairs, py::ssize_t{2}}, false);  // gives memory back: needs none
}

template <typename T>
T& held_by(const py::object& object) {
  return *reinterpret_cast<py::detail::instance*>(object.ptr())->get_value_and_holder().value_ptr<T>();
}

template <typename Call>
py::object new_match(Call call) {
  py::object match = py::cast(Match());
  held_by<Match>(match) = call();
  return match;
}

py::object match_part(PrefixTree& tree, const Match& match, const py::object& tokens) {
  const Integers integers(tokens, "tokens");
  py::object part = py::cast(PartMatch{});
  std::optional<PartMatch> found = tree.match_part(match, integers.tokens());
  if (!found) return py::none();
  held_by<PartMatch>(part) = std::move(*found);
  return part;
}

py::array_t<int64_t> promote(PrefixTree& tree, const Match& match, const py::object& block_ids) {
  Integers integers(block_ids, "block_ids");
  const auto ids = integers.ids();
  py::array_t<int64_t> pairs = room_for_pairs(static_cast<int64_t>(ids.size()));
  fill_pairs(pairs, tree.promote(match, ids));
  return pairs;
}

py::array_t<int64_t> write_out(PrefixTree& tree, const Match& match, int64_t min_hits) {
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? match.num_blocks() : 0);
  fill_pairs(pairs, tree.write_out(match, min_hits));
  return pairs;
}

py::tuple demote(PrefixTree& tree, int64_t num_blocks) {
  const int64_t most = std::min(num_blocks, tree.num_evictable());
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? std::max<int64_t>(most, 0) : 0);
  py::tuple result = py::make_tuple(most, pairs);
  const auto [num_freed, moved] = maybe_without_gil(num_blocks, [&] { return tree.demote(most); });
  fill_pairs(pairs, moved);
  if (num_freed != most) result[0] = num_freed;  // where another thread has pinned some meanwhile
  return result;
}

py::tuple change_arrays(const TreeChanges& taken, py::ssize_t block_size) {
  py::array_t<int64_t> changes({static_cast<py::ssize_t>(taken.changes.size()), py::ssize_t{3}});
  int64_t* out = changes.mutable_data();
  for (const auto& [kind, id, value] : taken.changes) *out++ = static_cast<int64_t>(kind), *out++ = id, *out++ = value;
  const auto num_tokens = static_cast<py::ssize_t>(taken.tokens.size());
  py::array_t<int32_t> tokens({num_tokens / block_size, block_size});
  std::copy(taken.tokens.begin(), taken.tokens.end(), tokens.mutable_data());
  py::list namespaces;
  for (const std::string& name : taken.namespaces) namespaces.append(py::bytes(name));
  return py::make_tuple(taken.is_restart, taken.now, changes, tokens, namespaces);
}

py::tuple take_changes(PrefixTree& tree) {
  const int64_t num_blocks = tree.num_cached() + tree.num_host_cached();
  const TreeChanges taken = maybe_without_gil(num_blocks, [&] { return tree.take_changes(); });
  try {
    return change_arrays(taken, tree.block_size());
  } catch (...) {  // what was taken is gone
    tree.lose_changes();
    throw;
  }
}

}  // namespace

void bind_match(py::module_& m) {
  py::class_<Match>(m, "Match", "A pinned path of a PrefixTree; see kvpage/_C.pyi.")
      .def_property_readonly("num_blocks", &Match::num_blocks)
      .def_property_readonly("num_tokens", &Match::num_tokens)
      .def_property_readonly("priority", &Match::priority)
      .def_property_readonly("num_device_blocks",
                             [](const Match& match) { return match.tree().num_device_blocks(match); })
      .def_property_readonly("is_released", [](const Match& match) { return match.tree().is_released(match); })
      .def_property_readonly("block_ids", [](const Match& match) { return block_ids_from(match, 0); })
      .def("block_ids_from", &block_ids_from, py::arg("start_block"));
  py::class_<PartMatch>(m, "PartMatch", "The first tokens of a block of another path; see kvpage/_C.pyi.")
      .def_readonly("match", &PartMatch::match)
      .def_readonly("num_tokens", &PartMatch::num_tokens)
      .def_readonly("block_id", &PartMatch::block_id)
      .def_readonly("is_on_device", &PartMatch::is_on_device);
}

void bind_tree(py::module_& m) {
  py::class_<PrefixTree, std::shared_ptr<PrefixTree>>(m, "PrefixTree", "Cached blocks by tokens; see kvpage/_C.pyi.")
      .def(py::init<std::shared_ptr<BlockPool>, int64_t, std::shared_ptr<BlockPool>, uint64_t>(),
           py::arg("pool").none(false), py::arg("block_size"), py::arg("host_pool") = nullptr, py::kw_only(),
           py::arg("_hash_mask") = ~uint64_t{0})
      .def(
          "match",
          [](PrefixTree& tree, const py::object& tokens, const py::bytes& name, int priority) {
            const Integers integers(tokens, "tokens");
            const TokenView view = integers.tokens();
            const std::string_view space(name);
            return new_match(
                [&] { return maybe_without_gil(view.size(), [&] { return tree.match(view, space, priority); }); });
          },
          py::arg("tokens"), py::arg("namespace") = py::bytes(), py::arg("priority") = 0)
      .def("match_part", &match_part, py::arg("match"), py::arg("tokens"))
      .def(
          "insert",
          [](PrefixTree& tree, const py::object& tokens, const py::object& block_ids, const py::bytes& name,
             Match* after, int priority) {
            const Integers integers(tokens, "tokens");
            const TokenView view = integers.tokens();
            Integers ids(block_ids, "block_ids");
            const auto span = ids.copied_ids();
            const std::string_view space(name);
            return new_match([&] {
              return maybe_without_gil(view.size(), [&] { return tree.insert(view, span, space, after, priority); });
            });
          },
          py::arg("tokens"), py::arg("block_ids"), py::arg("namespace") = py::bytes(), py::arg("after") = nullptr,
          py::arg("priority") = 0)
      .def(
          "pin",
          [](PrefixTree& tree, const Match& match) { return new_match([&] { return tree.pin(match); }); },
          py::arg("match"))
      .def(
          "num_pinned_only_by",
          [](PrefixTree& tree, const std::vector<const Match*>& matches) {
            for (const Match* match : matches) check(match, "matches must be matches, got None");
            return tree.num_pinned_only_by(matches);
          },
          py::arg("matches"))
      .def("release", &PrefixTree::release, py::arg("match"))
      .def("trim", &PrefixTree::trim, py::arg("match"))
      .def("promote", &promote, py::arg("match"), py::arg("block_ids"))
      .def("write_out", &write_out, py::arg("match"), py::arg("min_hits") = 0)
      .def(
          "evict",
          [](PrefixTree& tree, int64_t num_blocks) {
            return maybe_without_gil(num_blocks, [&] { return tree.evict(num_blocks); });
          },
          py::arg("num_blocks"))
      .def("demote", &demote, py::arg("num_blocks"))
      .def(
          "evict_host",
          [](PrefixTree& tree, int64_t num_blocks) {
            return maybe_without_gil(num_blocks, [&] { return tree.evict_host(num_blocks); });
          },
          py::arg("num_blocks"))
      .def(
          "drop",
          [](PrefixTree& tree, const py::object& tokens, const py::bytes& name) {
            const Integers integers(tokens, "tokens");
            return tree.drop(integers.tokens(), std::string_view(name));
          },
          py::arg("tokens"), py::arg("namespace") = py::bytes())
      .def("clear", &PrefixTree::clear, py::call_guard<py::gil_scoped_release>())
      .def("log_changes", &PrefixTree::log_changes, py::arg("max_bytes"))
      .def("take_changes", &take_changes)
      .def("lose_changes", &PrefixTree::lose_changes)
      .def("check", &check_tree, py::arg("owned_ids") = py::none(), py::arg("owned_host_ids") = py::none())
      .def_property_readonly("block_size", &PrefixTree::block_size)
      .def_property_readonly("has_host_tier", &PrefixTree::has_host_tier)
      .def_property_readonly("num_cached", &PrefixTree::num_cached)
      .def_property_readonly("num_evictable", &PrefixTree::num_evictable)
      .def_property_readonly("num_host_cached", &PrefixTree::num_host_cached)
      .def_property_readonly("num_host_evictable", &PrefixTree::num_host_evictable)
      .def_property_readonly("num_nodes", &PrefixTree::num_nodes)
      .def_property_readonly("num_matches", &PrefixTree::num_matches);
}

}  // namespace kvpage
