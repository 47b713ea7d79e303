// Blocks that are cached, by tokens.
#include "bindings/bindings.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "bindings/integers.h"
#include "bindings/new_arrays.h"
#include "bindings/shared_tree.h"
#include "docs.h"
#include "tree/prefix_tree.h"

namespace kvpage {

namespace {

SharedTree& tree_of(const Match& match) { return static_cast<SharedTree&>(match.tree()); }

// A question that is answered at once.
template <typename T>
auto quick(T (PrefixTree::*get)() const) {
  return [get](SharedTree& tree) { return tree.run(kQuick, [&] { return (tree.*get)(); }); };
}

py::array_t<int32_t> block_ids_from(const Match& match, int64_t start_block) {
  check(start_block >= 0 && start_block <= match.num_blocks(),
        "start_block must be between 0 and num_blocks = ", match.num_blocks(), ", got ", start_block);
  const int64_t num_ids = match.num_blocks() - start_block;
  py::array_t<int32_t> ids(num_ids);
  const std::span<int32_t> out(ids.mutable_data(), static_cast<size_t>(num_ids));
  SharedTree& tree = tree_of(match);
  tree.run(kQuick, [&] { tree.copy_block_ids(match, start_block, out); });
  return ids;
}

py::array_t<int32_t> tier_block_ids(const Match& match, int64_t start_block) {
  check(start_block >= 0 && start_block <= match.num_blocks(),
        "start_block must be between 0 and num_blocks = ", match.num_blocks(), ", got ", start_block);
  const int64_t num_ids = match.num_blocks() - start_block;
  py::array_t<int32_t> ids({py::ssize_t{3}, py::ssize_t{num_ids}});
  const std::span<int32_t> out(ids.mutable_data(), static_cast<size_t>(3 * num_ids));
  SharedTree& tree = tree_of(match);
  tree.run(kQuick, [&] { tree.copy_path(match, start_block, out); });
  return ids;
}

void check_tree(SharedTree& tree, const py::object& owned_ids, const py::object& owned_host_ids) {
  std::optional<Integers> integers, host_integers;
  std::optional<std::span<const int32_t>> owned, host_owned;
  if (!owned_ids.is_none()) owned = integers.emplace(owned_ids, "owned_ids").copied_ids();
  if (!owned_host_ids.is_none()) host_owned = host_integers.emplace(owned_host_ids, "owned_host_ids").copied_ids();
  tree.run(kLong, [&] { tree.check_invariants(owned, host_owned); });
}

py::object match_part(SharedTree& tree, const Match& match, const py::object& tokens, int64_t num_left_over) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  py::object part = py::cast(PartMatch{});
  std::optional<PartMatch> found = tree.run(kQuick, [&] { return tree.match_part(match, view, num_left_over); });
  if (!found) return py::none();
  held_by<PartMatch>(part) = std::move(*found);
  return part;
}

py::array_t<int64_t> promote(SharedTree& tree, const Match& match, const py::object& block_ids) {
  Integers integers(block_ids, "block_ids");
  const auto ids = integers.copied_ids();
  py::array_t<int64_t> pairs = room_for_pairs(static_cast<int64_t>(ids.size()));
  fill_pairs(pairs, tree.run(kQuick, [&] { return tree.promote(match, ids); }));
  return pairs;
}

py::array_t<int64_t> write_out(SharedTree& tree, const Match& match, int64_t min_hits) {
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? match.num_blocks() : 0);
  fill_pairs(pairs, tree.run(kQuick, [&] { return tree.write_out(match, min_hits); }));
  return pairs;
}

py::array_t<int64_t> send_out(SharedTree& tree, const Match& match) {
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? match.num_blocks() : 0);
  fill_pairs(pairs, tree.run(match.num_blocks(), [&] { return tree.send_out(match); }));
  return pairs;
}

py::tuple demote(SharedTree& tree, int64_t num_blocks) {
  const int64_t most = std::min(num_blocks, tree.run(kQuick, [&] { return tree.num_evictable(); }));
  py::array_t<int64_t> pairs = room_for_pairs(tree.has_host_tier() ? std::max<int64_t>(most, 0) : 0);
  py::tuple result = py::make_tuple(most, pairs);
  const auto [num_freed, moved] = tree.run(num_blocks, [&] { return tree.demote(most); });
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

py::tuple take_changes(SharedTree& tree) {
  const TreeChanges taken = tree.run(kLong, [&] { return tree.take_changes(); });
  try {
    return change_arrays(taken, tree.block_size());
  } catch (...) {  // the taken changes are gone
    tree.lose_changes();
    throw;
  }
}

py::object match(SharedTree& tree, const py::object& tokens, const py::bytes& name, int priority, int64_t num_left_over,
                 bool is_hit) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  return new_match(
      [&] { return tree.walk(view.size(), [&] { return tree.match(view, space, priority, num_left_over, is_hit); }); });
}

py::object insert(SharedTree& tree, const py::object& tokens, const py::object& block_ids, const py::bytes& name,
                  Match* after, int priority) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  Integers ids(block_ids, "block_ids");
  const auto span = ids.copied_ids();
  const std::string_view space(name);
  return new_match(
      [&] { return tree.walk(view.size(), [&] { return tree.insert(view, span, space, after, priority); }); });
}

int64_t num_pinned_only_by(SharedTree& tree, const std::vector<const Match*>& matches) {
  for (const Match* match : matches) check(match, "matches must be matches, got None");
  return tree.num_pinned_only_by(matches);  // with the GIL: no thread may take one out of the caller's list
}

int64_t drop(SharedTree& tree, const py::object& tokens, const py::bytes& name) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  return tree.walk(view.size(), [&] { return tree.drop(view, space); });
}

int64_t put_first(SharedTree& tree, const py::object& tokens, const py::bytes& name, int64_t num_kept) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  return tree.walk(view.size(), [&] { return tree.put_first(view, space, num_kept); });
}

int64_t set_next_use(SharedTree& tree, const py::object& tokens, const py::bytes& name, double seconds) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  return tree.walk(view.size(), [&] { return tree.set_next_use(view, space, seconds); });
}

py::list entries(SharedTree& tree, int64_t limit, const std::optional<py::bytes>& name) {
  std::optional<std::string_view> space;
  if (name) space = std::string_view(*name);
  std::vector<TreeEntry> found = tree.run(kLong, [&] { return tree.entries(limit, space); });
  py::list list;
  for (TreeEntry& entry : found) list.append(py::cast(std::move(entry)));
  return list;
}

int64_t num_held(SharedTree& tree, const py::object& tokens, const py::bytes& name) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  return tree.walk(view.size(), [&] { return tree.num_held(view, space); });
}

py::tuple look(SharedTree& tree, const py::object& tokens, const py::bytes& name) {
  const Integers integers(tokens, "tokens");
  const TokenView view = integers.tokens();
  const std::string_view space(name);
  const PathLook look = tree.walk(view.size(), [&] { return tree.look(view, space); });
  py::array_t<int32_t> ids({py::ssize_t{3}, static_cast<py::ssize_t>(look.ids.size() / 3)});
  std::copy(look.ids.begin(), look.ids.end(), ids.mutable_data());
  return py::make_tuple(ids, look.num_common, look.cached_token, look.was_evicted);
}

py::list names(SharedTree& tree, int64_t limit, const py::bytes& begin) {
  const std::string first(begin);
  py::list list;
  const auto found = tree.run(kLong, [&] { return tree.names(limit, first); });
  for (const std::string& name : found) list.append(py::bytes(name));
  return list;
}

py::list hottest(SharedTree& tree, int64_t limit, int64_t max_tokens, const std::optional<py::bytes>& name) {
  std::optional<std::string_view> space;
  if (name) space = std::string_view(*name);
  std::vector<HotPrefix> found = tree.run(kLong, [&] { return tree.hottest(limit, max_tokens, space); });
  py::list list;
  for (HotPrefix& prefix : found) list.append(py::cast(std::move(prefix)));
  return list;
}

py::array_t<int32_t> as_array(const std::vector<int32_t>& values) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::optional<int64_t> unless_negative(int64_t value) { return value < 0 ? std::nullopt : std::optional(value); }

}  // namespace

void bind_match(py::module_& m) {
  py::class_<Match>(m, "Match", doc("Match"))
      .def_property_readonly("num_blocks", &Match::num_blocks, doc("Match.num_blocks"))
      .def_property_readonly("num_tokens", &Match::num_tokens, doc("Match.num_tokens"))
      .def_property_readonly("priority", &Match::priority, doc("Match.priority"))
      .def_property_readonly(
          "num_device_blocks",
          [](const Match& match) {
            SharedTree& tree = tree_of(match);
            return tree.run(kQuick, [&] { return tree.num_device_blocks(match); });
          },
          doc("Match.num_device_blocks"))
      .def_property_readonly(
          "is_released",
          [](const Match& match) {
            SharedTree& tree = tree_of(match);
            return tree.run(kQuick, [&] { return tree.is_released(match); });
          },
          doc("Match.is_released"))
      .def_property_readonly(
          "block_ids", [](const Match& match) { return block_ids_from(match, 0); }, doc("Match.block_ids"))
      .def("block_ids_from", &block_ids_from, py::arg("start_block"), doc("Match.block_ids_from"))
      .def("tier_block_ids", &tier_block_ids, py::arg("start_block") = 0, doc("Match.tier_block_ids"));
  py::class_<PartMatch>(m, "PartMatch", doc("PartMatch"))
      .def_readonly("match", &PartMatch::match, doc("PartMatch.match"))
      .def_readonly("num_tokens", &PartMatch::num_tokens, doc("PartMatch.num_tokens"))
      .def_readonly("block_id", &PartMatch::block_id, doc("PartMatch.block_id"))
      .def_readonly("is_on_device", &PartMatch::is_on_device, doc("PartMatch.is_on_device"));
}

static void bind_entry(py::module_& m) {
  const auto last_used = [](const TreeEntry& e) { return e.num_pins > 0 ? std::nullopt : std::optional(e.used_at); };
  py::class_<TreeEntry>(m, "TreeEntry", doc("TreeEntry"))
      .def_property_readonly(
          "namespace", [](const TreeEntry& e) { return py::bytes(e.name); }, doc("TreeEntry.namespace"))
      .def_property_readonly(
          "parent", [](const TreeEntry& e) { return unless_negative(e.parent); }, doc("TreeEntry.parent"))
      .def_readonly("start", &TreeEntry::start, doc("TreeEntry.start"))
      .def_property_readonly(
          "tokens", [](const TreeEntry& e) { return as_array(e.tokens); }, doc("TreeEntry.tokens"))
      .def_property_readonly(
          "block_ids", [](const TreeEntry& e) { return as_array(e.device_ids); }, doc("TreeEntry.block_ids"))
      .def_property_readonly(
          "host_block_ids", [](const TreeEntry& e) { return as_array(e.host_ids); }, doc("TreeEntry.host_block_ids"))
      .def_readonly("num_pins", &TreeEntry::num_pins, doc("TreeEntry.num_pins"))
      .def_readonly("priority", &TreeEntry::priority, doc("TreeEntry.priority"))
      .def_property_readonly("last_used", last_used, doc("TreeEntry.last_used"));
}

void bind_hot_prefix(py::module_& m) {
  py::class_<HotPrefix>(m, "HotPrefix", doc("HotPrefix"))
      .def_property_readonly(
          "namespace", [](const HotPrefix& p) { return py::bytes(p.name); }, doc("HotPrefix.namespace"))
      .def_property_readonly(
          "parent", [](const HotPrefix& p) { return unless_negative(p.parent); }, doc("HotPrefix.parent"))
      .def_readonly("start", &HotPrefix::start, doc("HotPrefix.start"))
      .def_readonly("num_tokens", &HotPrefix::num_tokens, doc("HotPrefix.num_tokens"))
      .def_property_readonly(
          "first_tokens", [](const HotPrefix& p) { return as_array(p.first_tokens); }, doc("HotPrefix.first_tokens"))
      .def_readonly("num_hits", &HotPrefix::num_hits, doc("HotPrefix.num_hits"))
      .def_readonly("num_pins", &HotPrefix::num_pins, doc("HotPrefix.num_pins"))
      .def_readonly("num_blocks", &HotPrefix::num_blocks, doc("HotPrefix.num_blocks"))
      .def_readonly("num_host_blocks", &HotPrefix::num_host_blocks, doc("HotPrefix.num_host_blocks"));
}

using TreeClass = py::class_<SharedTree, std::shared_ptr<SharedTree>>;

// Defines methods: the text before the arguments.
struct Methods {
  TreeClass& tree;

  template <typename Call, typename... Extra>
  void operator()(const char* name, Call call, const char* text, const Extra&... extra) const {
    tree.def(name, call, extra..., text);
  }
};

static void bind_questions(TreeClass& tree) {
  const auto ask = [&](const char* name, auto get, const char* text) { tree.def_property_readonly(name, get, text); };
  ask("block_size", &SharedTree::block_size, doc("PrefixTree.block_size"));
  ask("eviction", &SharedTree::eviction, doc("PrefixTree.eviction"));
  ask("has_host_tier", &SharedTree::has_host_tier, doc("PrefixTree.has_host_tier"));
  ask("num_cached", quick(&PrefixTree::num_cached), doc("PrefixTree.num_cached"));
  ask("num_evictable", quick(&PrefixTree::num_evictable), doc("PrefixTree.num_evictable"));
  ask("num_host_cached", quick(&PrefixTree::num_host_cached), doc("PrefixTree.num_host_cached"));
  ask("num_host_evictable", quick(&PrefixTree::num_host_evictable), doc("PrefixTree.num_host_evictable"));
  ask("num_nodes", quick(&PrefixTree::num_nodes), doc("PrefixTree.num_nodes"));
  ask("num_matches", quick(&PrefixTree::num_matches), doc("PrefixTree.num_matches"));
  const auto counts = [](SharedTree& t) {
    const TreeCounts counts = t.run(kQuick, [&] { return t.counts(); });
    return py::make_tuple(counts.num_evicted, counts.num_demoted, counts.num_written, counts.num_promoted,
                          counts.num_host_evicted);
  };
  ask("counts", counts, doc("PrefixTree.counts"));
}

static void bind_tiers(const Methods& def) {
  const auto trim = [](SharedTree& t, Match& match) { t.run(kQuick, [&] { t.trim(match); }); };
  def("trim", trim, doc("PrefixTree.trim"), py::arg("match"));
  const auto shorten = [](SharedTree& t, Match& match, int64_t num_blocks) {
    t.run(kQuick, [&] { t.shorten(match, num_blocks); });
  };
  def("shorten", shorten, doc("PrefixTree.shorten"), py::arg("match"), py::arg("num_blocks"));
  def("promote", &promote, doc("PrefixTree.promote"), py::arg("match"), py::arg("block_ids"));
  def("write_out", &write_out, doc("PrefixTree.write_out"), py::arg("match"), py::arg("min_hits") = 0);
  def("send_out", &send_out, doc("PrefixTree.send_out"), py::arg("match"));
  const auto evict = [](SharedTree& t, int64_t num_blocks) {
    return t.run(num_blocks, [&] { return t.evict(num_blocks); });
  };
  def("evict", evict, doc("PrefixTree.evict"), py::arg("num_blocks"));
  def("demote", &demote, doc("PrefixTree.demote"), py::arg("num_blocks"));
  const auto evict_host = [](SharedTree& t, int64_t num_blocks) {
    return t.run(num_blocks, [&] { return t.evict_host(num_blocks); });
  };
  def("evict_host", evict_host, doc("PrefixTree.evict_host"), py::arg("num_blocks"));
}

static void bind_watching(const Methods& def) {
  const auto log_changes = [](SharedTree& t, int64_t most) { t.run(kQuick, [&] { t.log_changes(most); }); };
  const auto give_companions = [](SharedTree& t, const Match& match, int64_t start, int64_t end) {
    t.run(kQuick, [&] { t.give_companions(match, start, end); });
  };
  def("give_companions", give_companions, doc("PrefixTree.give_companions"), py::arg("match"), py::arg("start"),
      py::arg("end"));
  def("dead_companions", quick(&PrefixTree::dead_companions), doc("PrefixTree.dead_companions"));
  const auto free_companions = [](SharedTree& t, int64_t num) { t.run(kQuick, [&] { t.free_companions(num); }); };
  def("free_companions", free_companions, doc("PrefixTree.free_companions"), py::arg("num_dead"));
  def("log_changes", log_changes, doc("PrefixTree.log_changes"), py::arg("max_bytes"));
  def("take_changes", &take_changes, doc("PrefixTree.take_changes"));
  const auto lose_changes = [](SharedTree& t) { t.run(kQuick, [&] { t.lose_changes(); }); };
  def("lose_changes", lose_changes, doc("PrefixTree.lose_changes"));
  def("check", &check_tree, doc("PrefixTree.check"), py::arg("owned_ids") = py::none(),
      py::arg("owned_host_ids") = py::none());
}

void bind_tree(py::module_& m) {
  bind_entry(m);
  bind_hot_prefix(m);
  TreeClass tree(m, "PrefixTree", doc("PrefixTree"));
  tree.def(py::init<std::shared_ptr<BlockPool>, int64_t, std::shared_ptr<BlockPool>, uint64_t, std::string_view>(),
           py::arg("pool").none(false), py::arg("block_size"), py::arg("host_pool") = nullptr, py::kw_only(),
           py::arg("_hash_mask") = ~uint64_t{0}, py::arg("eviction") = "lru", doc("PrefixTree.__init__"));
  const Methods def{tree};
  const auto in_namespace = py::arg("namespace") = py::bytes();
  const auto left_over = py::arg("num_left_over") = 1;
  def("match", &match, doc("PrefixTree.match"), py::arg("tokens"), in_namespace, py::arg("priority") = 0, left_over,
      py::arg("is_hit") = true);
  const auto count_hit = [](SharedTree& t, const Match& match) { t.run(kQuick, [&] { t.count_hit(match); }); };
  def("count_hit", count_hit, doc("PrefixTree.count_hit"), py::arg("match"));
  def("match_part", &match_part, doc("PrefixTree.match_part"), py::arg("match"), py::arg("tokens"), left_over);
  def("insert", &insert, doc("PrefixTree.insert"), py::arg("tokens"), py::arg("block_ids"), in_namespace,
      py::arg("after") = nullptr, py::arg("priority") = 0);
  const auto pin = [](SharedTree& t, const Match& match) {
    return new_match([&] { return t.run(kQuick, [&] { return t.pin(match); }); });
  };
  def("pin", pin, doc("PrefixTree.pin"), py::arg("match"));
  const auto release = [](SharedTree& t, Match& match) { t.run(kQuick, [&] { t.release(match); }); };
  def("release", release, doc("PrefixTree.release"), py::arg("match"));
  def("num_pinned_only_by", &num_pinned_only_by, doc("PrefixTree.num_pinned_only_by"), py::arg("matches"));
  def("drop", &drop, doc("PrefixTree.drop"), py::arg("tokens"), in_namespace);
  def("put_first", &put_first, doc("PrefixTree.put_first"), py::arg("tokens"), in_namespace, py::arg("num_kept") = 0);
  def("set_next_use", &set_next_use, doc("PrefixTree.set_next_use"), py::arg("tokens"), in_namespace, py::kw_only(),
      py::arg("seconds"));
  const auto set_time = [](SharedTree& t, double seconds) { t.run(kQuick, [&] { t.set_time(seconds); }); };
  def("set_time", set_time, doc("PrefixTree.set_time"), py::arg("seconds"));
  const auto drop_namespace = [](SharedTree& t, const py::bytes& name) {
    const std::string_view space(name);
    return t.run(kLong, [&] { return t.drop_namespace(space); });
  };
  def("drop_namespace", drop_namespace, doc("PrefixTree.drop_namespace"), py::arg("namespace"));
  def("clear", [](SharedTree& t) { return t.run(kLong, [&] { return t.clear(); }); }, doc("PrefixTree.clear"));
  def("entries", &entries, doc("PrefixTree.entries"), py::arg("limit"), py::arg("namespace") = py::none());
  def("look", &look, doc("PrefixTree.look"), py::arg("tokens"), in_namespace);
  def("num_held", &num_held, doc("PrefixTree.num_held"), py::arg("tokens"), in_namespace);
  def("names", &names, doc("PrefixTree.names"), py::arg("limit"), py::arg("begin") = py::bytes());
  def("hottest", &hottest, doc("PrefixTree.hottest"), py::arg("limit"), py::arg("max_tokens") = 16,
      py::arg("namespace") = py::none());
  bind_tiers(def);
  bind_watching(def);
  bind_questions(tree);
}

}  // namespace kvpage
